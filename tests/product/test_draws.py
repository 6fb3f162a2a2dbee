"""Drawn tokens follow the exact distribution, at the vocabularies of published models.

The judge is numpy's float64, by the definitions of temperature, top-k and top-p, and scipy's tests.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats
from torch import Tensor

from speq import Generator
from speq.config import SamplingParams
from speq.engine.request import Request
from speq.engine.sampler import DeviceSampler
from speq.engine.sampling import choose, noise, shape_probs
from tests.helpers.host_device import HostDevice, host_device
from tests.helpers.tiny_models import load_plain, write_model
from tests.reference import noise as reference

SEEDS = 100
# Of one seed's test; and of the test that p-values of all seeds are uniform.
LEAST, LEAST_OF_ALL = 1e-4, 1e-2
# The least that is expected in a cell of a chi-square test.
EXPECTED = 5


def exact(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """[V] probabilities by definition. No two logits at an edge may be equal."""
    scores = logits.astype(np.float64) / temperature
    order = np.argsort(-scores)
    weights = np.exp(scores[order] - scores.max())
    if top_k:
        weights[top_k:] = 0
    shares = weights / weights.sum()
    if top_p < 1:
        before = np.concatenate([[0], shares.cumsum()[:-1]])
        shares = np.where(before < top_p, shares, 0)
    probs = np.empty_like(shares)
    probs[order] = shares / shares.sum()
    return probs


def p_value(tokens: list[int], probs: np.ndarray) -> float:
    """Of the chi-square test that tokens were drawn from `probs`: the likeliest have cells of their
    own, the others share one.
    """
    counts = np.bincount(tokens, minlength=len(probs))
    if counts[probs == 0].any():
        return 0.0
    alone = probs * len(tokens) >= EXPECTED
    observed = np.append(counts[alone], counts[~alone].sum())
    expected = np.append(probs[alone], probs[~alone].sum()) * len(tokens)
    if expected[-1] < EXPECTED:  # too few for a cell of their own
        observed = np.append(observed[:-2], observed[-2:].sum())
        expected = np.append(expected[:-2], expected[-2:].sum())
    return float(stats.chisquare(observed, expected * len(tokens) / expected.sum()).pvalue)


def judge(drawn: list[list[int]], probs: np.ndarray) -> tuple[float, float]:
    """The least p-value of all seeds, and how uniform all are; both are checked."""
    values = [p_value(tokens, probs) for tokens in drawn]
    uniform = float(stats.kstest(values, "uniform").pvalue)
    assert min(values) >= LEAST
    assert uniform >= LEAST_OF_ALL
    return min(values), uniform


def logits_like_a_models(vocab_size: int) -> Tensor:
    """Few likely tokens and a long tail: about a third of the mass is outside the first hundred."""
    rng = np.random.default_rng(5)
    ranks = rng.permutation(vocab_size) + 1
    return torch.from_numpy(-1.2 * np.log(ranks) + 0.1 * rng.standard_normal(vocab_size)).float()


def text(position: int, **sampling: Any) -> Request:
    return Request([1], SamplingParams(**sampling), output_token_ids=[0] * position)


SHAPES = [(1.0, 0, 1.0), (0.7, 0, 0.95), (1.3, 40, 0.9)]
LARGE = (151_936, 201_088)


@pytest.mark.parametrize(
    ("vocab_size", "temperature", "top_k", "top_p"),
    [
        (1_000, 1.0, 0, 1.0),
        *(pytest.param(1_000, *shape, marks=pytest.mark.wide) for shape in SHAPES[1:]),
        pytest.param(LARGE[0], *SHAPES[0], marks=pytest.mark.full),
        pytest.param(LARGE[1], *SHAPES[2], marks=pytest.mark.full),
    ],
)
def test_tokens_follow_the_exact_distribution(
    vocab_size: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits = logits_like_a_models(vocab_size)
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    drawn = [
        [choose(logits, text(at, seed=seed, **given), []) for at in range(200)]
        for seed in range(SEEDS)
    ]
    least, uniform = judge(drawn, exact(logits.numpy(), temperature, top_k, top_p))
    print(f"V={vocab_size} {given}: least p {least:.2g}, uniform {uniform:.2g}")


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SHAPES)
def test_a_device_draws_from_a_large_vocabulary_as_the_processor_does(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = logits_like_a_models(LARGE[1])
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    with host_device() as device:
        sampler, there = DeviceSampler(device), logits[None].to(device.torch)
        for at in range(5):
            request = text(at, seed=at, **given)
            token = int(sampler.choose(there, request, [[]]))
            assert token == choose(logits, request, [])


def tailed(tail: int, mass: float) -> Tensor:
    """Logits of 8 tokens that are alike and a tail that weighs `mass` in all."""
    logprobs = np.log(mass / tail / ((1 - mass) / 8))
    return torch.cat([torch.zeros(8), torch.full((tail,), float(logprobs))])


@pytest.mark.wide
def test_a_tail_that_weighs_nothing_is_never_drawn() -> None:
    """A draw that is 0, or one of few small values, would bring it in."""
    logits = tailed(2**18, 1e-7)
    drawn = [choose(logits, text(at, temperature=1.0, seed=9), []) for at in range(2000)]
    assert max(drawn) < 8
    assert p_value(drawn, exact(logits.numpy(), 1.0, 0, 1.0)) >= LEAST


@pytest.mark.full
def test_a_device_never_draws_such_a_tail() -> None:
    logits = tailed(2**18, 1e-7)
    with host_device() as device:
        sampler, there = DeviceSampler(device), logits[None].to(device.torch)
        for at in range(2000):
            request = text(at, temperature=1.0, seed=9)
            assert int(sampler.choose(there, request, [[]])) < 8


@pytest.mark.wide
def test_a_light_tail_is_drawn_as_often_as_it_weighs() -> None:
    logits = tailed(2**16, 0.01)
    drawn = [choose(logits, text(at, temperature=1.0, seed=9), []) for at in range(3000)]
    in_tail = sum(token >= 8 for token in drawn)
    assert stats.binomtest(in_tail, 3000, 0.01).pvalue >= 1e-3


@pytest.mark.parametrize(
    ("seed", "position", "size"), [(0, 0, 1), (7, 3, 264), (2**63 - 1, 2**40, 20_001)]
)
def test_noise_is_that_of_its_definition(seed: int, position: int, size: int) -> None:
    assert np.array_equal(
        noise(seed, position, size).numpy(), reference.noise(seed, position, size)
    )


def test_small_draws_are_exponential_too() -> None:
    """Of 2^23 draws those below 2^-10, where float32 has few values left: they are uniform there,
    all of them differ, and there are as many as there should be.
    """
    draws = np.concatenate([noise(3, at, 2**18).numpy() for at in range(32)])
    small = np.sort(draws[draws < 2.0**-10]).astype(np.float64)
    chance = -np.expm1(-(2.0**-10))
    assert stats.binomtest(len(small), len(draws), chance).pvalue >= 1e-3
    assert stats.kstest(-np.expm1(-small) / chance, "uniform").pvalue >= 1e-3
    assert len(np.unique(small)) > 0.999 * len(small)
    least = small[:20] * len(draws)  # as arrivals of a Poisson process
    assert least[0] > 0 and stats.kstest(np.diff(least, prepend=0), "expon").pvalue >= 1e-3


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1 - 1e-9])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_the_nucleus_of_a_large_vocabulary(top_p: float, spread: float) -> None:
    """Flat or steep, the same tokens stay on the processor and on a device."""
    scores = spread * torch.randn(2, 50_021, generator=torch.Generator().manual_seed(2))
    ours = shape_probs(scores, SamplingParams(temperature=1.0, top_p=top_p))
    with host_device() as device:
        there = shape_probs(
            scores.to(device.torch), SamplingParams(temperature=1.0, top_p=top_p)
        ).cpu()
    assert torch.equal(ours > 0, there > 0)
    for row, probs in zip(scores.numpy(), ours.numpy(), strict=True):
        if not spread:  # all are alike, so all stay
            assert (probs > 0).all()
            continue
        wanted = exact(row, 1.0, 0, top_p)
        # Rounding may decide on the last token.
        assert abs(int((probs > 0).sum()) - int((wanted > 0).sum())) <= 1
        np.testing.assert_allclose(probs[probs > 0], wanted[probs > 0], rtol=1e-4, atol=1e-7)


def one_distribution(folder: Path, vocab_size: int) -> Path:
    """A model whose next token has the same distribution wherever it stands: all its tokens have
    one embedding, so that what attention brings is the same from everywhere.
    """
    path = write_model(
        folder, "olmoe", vocab_size=vocab_size, num_hidden_layers=2, tie_word_embeddings=False
    )
    tensors = load_file(path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    table[:] = table[7].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        hidden = load_plain(path).model(torch.tensor([[3]])).last_hidden_state[0, 0]
    likely = logits_like_a_models(vocab_size)
    noise_of_rows = 0.05 * torch.randn(vocab_size, 64, generator=torch.Generator().manual_seed(9))
    tensors["lm_head.weight"] = noise_of_rows + likely[:, None] * hidden / hidden.square().sum()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def texts_of(generator: Generator, count: int, length: int, **sampling: Any) -> list[list[int]]:
    """Texts of as many seeds, side by side."""
    made: dict[int, list[int]] = {}
    with generator.batch(length + 1) as batch:
        for seed in range(count):
            options = SamplingParams(max_new_tokens=length, seed=seed, ignore_eos=True, **sampling)
            batch.add(Request([3], options))
        while not batch.idle:
            for emitted in batch.step(None):
                assert emitted.error is None
                seed = emitted.request.seed
                made.setdefault(seed, []).extend(token.id for token in emitted.tokens)
    return [made[seed] for seed in range(count)]


@pytest.mark.parametrize(
    ("vocab_size", "drafter", "on"),
    [
        (1_000, "int4", "cpu"),
        pytest.param(1_000, "none", "cpu", marks=pytest.mark.full),
        pytest.param(1_000, "ngram", "cpu", marks=pytest.mark.wide),
        pytest.param(1_000, "int4", "cuda", marks=pytest.mark.full),
        pytest.param(LARGE[0], "int4", "cpu", marks=pytest.mark.wide),
        pytest.param(LARGE[1], "ngram", "cpu", marks=pytest.mark.full),
    ],
)
def test_drafted_tokens_follow_the_exact_distribution(
    vocab_size: int, drafter: str, on: str, tmp_path: Path
) -> None:
    path = one_distribution(tmp_path / "model", vocab_size)
    with torch.no_grad():
        logits = load_plain(path)(torch.tensor([[3, 9, 4]])).logits[0]
    torch.testing.assert_close(logits[0], logits[2], rtol=1e-4, atol=1e-4)
    probs = exact(logits[1].numpy(), 1.0, 0, 1.0)

    def run() -> list[list[int]]:
        generator = Generator.from_pretrained(
            path,
            "2GiB",
            device=on,
            dtype="float32",
            context_length=61,
            draft="none" if drafter in ("none", "ngram") else "auto",
            draft_length=0 if drafter == "none" else 3,
            drafter="auto" if drafter == "none" else drafter,
            max_batch=20,
        )
        # The stand-in device and large vocabularies take their time.
        seeds = SEEDS if on == "cpu" and vocab_size < LARGE[0] else SEEDS // 5
        drawn = texts_of(generator, seeds, 60, temperature=1.0)
        figures = generator.last_run.summary()
        generator.close()
        if drafter != "none":
            assert 0 < figures["acceptance_rate"] < 1
        return drawn

    if on == "cpu":
        drawn = run()
    else:
        with host_device(HostDevice(3)):
            drawn = run()
    least, uniform = judge(drawn, probs)
    print(f"V={vocab_size} {drafter} {on}: least p {least:.2g}, uniform {uniform:.2g}")
