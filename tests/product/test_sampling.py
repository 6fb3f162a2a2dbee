"""From logits to tokens, against plain numpy in double precision."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from speq.config import SamplingParams
from speq.engine.request import Request
from speq.engine.sampling import (
    choose,
    distribution,
    draw,
    greedy,
    noise,
    penalise,
    runners_up,
    standings,
)
from speq.errors import SpeqError

ROWS, V = 48, 40
# Rows where a sum of probabilities comes this close to top_p are left out: rounding decides them.
MARGIN = 1e-5


def expected_probs(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float
) -> np.ndarray | None:
    """One row's probabilities; None where rounding may decide which tokens remain."""
    scores = logits.astype(np.float64) / temperature
    keep = np.ones(len(scores), dtype=bool)
    if top_k:
        keep = scores >= np.sort(scores)[-min(top_k, len(scores))]
    weights = np.where(keep, np.exp(scores - scores.max()), 0)
    probs = weights / weights.sum()
    if top_p < 1:
        # A token stays while those before it, likeliest first, do not make up top_p.
        before = np.array([probs[probs > own].sum() for own in probs])
        if np.abs(before[keep] - top_p).min() < MARGIN:
            return None
        probs = np.where(before < top_p, probs, 0)
    return probs / probs.sum()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7, V, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.6, 0.05])
def test_distribution_matches_numpy(temperature: float, top_k: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(11)
    logits = 2 * torch.randn(ROWS, V, generator=generator)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    ours = distribution(logits, sampling)
    assert ours.dtype == torch.float32
    assert ours.shape == (ROWS, V)
    compared = 0
    for row, probs in zip(logits.numpy(), ours.numpy(), strict=True):
        wanted = expected_probs(row, temperature, top_k, top_p)
        if wanted is None:
            continue
        compared += 1
        assert np.array_equal(probs > 0, wanted > 0)
        np.testing.assert_allclose(probs, wanted, rtol=2e-5, atol=1e-7)
    assert compared > ROWS // 2


@pytest.mark.parametrize("min_p", [0.01, 0.2, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.3])
def test_min_p_keeps_what_is_near_the_likeliest(min_p: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(21)
    logits = 2 * torch.randn(ROWS, V, generator=generator)
    ours = distribution(logits, SamplingParams(temperature=temperature, min_p=min_p))
    for row, probs in zip(logits.double().numpy(), ours.numpy(), strict=True):
        weights = np.exp((row - row.max()) / temperature)
        assert np.abs(weights - min_p).min() > 1e-6 or min_p == 1  # rounding decides none
        wanted = np.where(weights >= min_p, weights, 0)
        np.testing.assert_allclose(probs, wanted / wanted.sum(), rtol=2e-5, atol=1e-7)


def test_min_p_comes_last() -> None:
    """Probabilities are 0.4, 0.3, 0.2, 0.1. A share of 0.6 keeps two of them at temperature 1, and
    one at temperature 1/2, where they are as 16, 9, 4 and 1.
    """
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    ours = distribution(logits, SamplingParams(temperature=1.0, min_p=0.6))[0]
    torch.testing.assert_close(ours, torch.tensor([4 / 7, 3 / 7, 0, 0]))
    assert distribution(logits, SamplingParams(temperature=0.5, min_p=0.6))[0].tolist() == [
        1,
        0,
        0,
        0,
    ]


def test_penalties_count_tokens_before_a_position() -> None:
    """Tokens 0 and 1 are the prompt's, 1 was generated twice and 2 once, 3 is drafted."""
    logits = torch.tensor([2.0, 2.0, -2.0, 2.0, 2.0, -torch.inf])
    given = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.125}
    text = Request([0, 1], SamplingParams(**given), output_token_ids=[1, 2, 1])
    expected = torch.tensor([1, 1 - 0.5 - 0.25, -4 - 0.625, 1 - 0.625, 2, -torch.inf])
    torch.testing.assert_close(penalise(logits, text, [3]), expected)
    assert choose(logits, text, [3]) == 4
    assert choose(logits, text, [3, 4]) == 0
    assert logits[0] == 2  # what is given is left alone


def test_order_is_temperature_then_top_k_then_top_p() -> None:
    """Probabilities are 0.4, 0.3, 0.2, 0.1; other orders of the three leave other tokens."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # top-k first: 4/7 alone reaches 0.5; top-p first would leave 0.4 and 0.3.
    sampling = SamplingParams(temperature=1.0, top_k=2, top_p=0.5)
    assert distribution(logits, sampling)[0].tolist() == [1, 0, 0, 0]
    # At temperature 1/2 probabilities are 16, 9, 4 and 1 of 30: two make up 0.8 of it, and at
    # temperature 1 it would take three.
    sampling = SamplingParams(temperature=0.5, top_p=0.8)
    expected = torch.tensor([16 / 25, 9 / 25, 0, 0])
    torch.testing.assert_close(distribution(logits, sampling)[0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_dtype(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(12)
    logits = (3 * torch.randn(5, V, generator=generator)).to(dtype)
    ours = distribution(logits, SamplingParams(temperature=0.8))
    assert ours.dtype == torch.float32
    for row, probs in zip(logits.double().numpy(), ours.numpy(), strict=True):
        np.testing.assert_allclose(probs, expected_probs(row, 0.8, 0, 1.0), rtol=2e-5)


@pytest.mark.parametrize("temperature", [1e-3, 1e-38, 1e-60, 5e-324])
def test_tiny_temperatures_approach_greedy(temperature: float) -> None:
    generator = torch.Generator().manual_seed(13)
    logits = 20 * torch.randn(6, V, generator=generator)
    ours = distribution(logits, SamplingParams(temperature=temperature))
    assert ours.argmax(-1).tolist() == greedy(logits)
    assert ours.amax(-1).tolist() == [1.0] * 6


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_greedy_takes_the_first_of_equals(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 9, dtype=dtype)
    logits[1, [4, 6, 8]] = 2
    logits[2, :] = -3
    logits[2, [7, 8]] = 0.5
    assert greedy(logits) == [0, 4, 7]


def test_greedy_compares_in_float32() -> None:
    logits = torch.tensor([[1.0, 1.0 + 1e-12, 0.0]], dtype=torch.float64)
    assert greedy(logits) == [0]


def test_greedy_matches_numpy() -> None:
    logits = torch.randint(-5, 6, (200, 17), generator=torch.Generator().manual_seed(14))
    assert greedy(logits) == logits.numpy().argmax(1).tolist()


def test_draw_follows_the_distribution() -> None:
    probs = torch.tensor([0.05, 0.0, 0.5, 0.3, 0.15])
    counts = np.bincount([draw(probs, 15, at) for at in range(4000)], minlength=5)
    assert counts[1] == 0
    possible = probs.numpy() > 0
    expected = probs.double().numpy()[possible]
    assert stats.chisquare(counts[possible], 4000 * expected / expected.sum()).pvalue > 1e-3


def test_noise_is_exponential_and_its_own_at_every_seed_and_position() -> None:
    rows = [noise(seed, at, 3000) for seed in (0, 1, 2**63 - 1) for at in (0, 1, 2**40)]
    for row in rows:
        assert row.dtype == torch.float32 and row.min() > 0
        assert stats.kstest(row.numpy(), "expon").pvalue > 1e-3
    correlations = np.corrcoef(torch.stack(rows).numpy())
    assert np.abs(correlations - np.eye(len(rows))).max() < 5 / 3000**0.5
    # A longer row begins like a shorter one: the vocabulary's size is no part of it.
    assert torch.equal(noise(1, 2, 10), noise(1, 2, 3000)[:10])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, r"max_new_tokens is 0; it must be at least 1"),
        ({"max_new_tokens": -3}, r"max_new_tokens is -3; it must be at least 1"),
        ({"max_new_tokens": 2.0}, r"max_new_tokens is 2\.0; it must be a whole number"),
        ({"max_new_tokens": True}, r"max_new_tokens is True; it must be a whole number"),
        ({"top_k": -1}, r"top_k is -1; it must be at least 0"),
        ({"top_k": "5"}, r"top_k is '5'; it must be a whole number"),
        ({"seed": -1}, r"seed is -1; it must be from 0 to 9223372036854775807"),
        ({"seed": 2**63}, r"seed is 9223372036854775808; it must be from 0"),
        ({"temperature": -0.1}, r"temperature is -0\.1; it must be from 0 to 10000"),
        ({"temperature": math.inf}, r"temperature is inf; it must be from 0"),
        ({"temperature": math.nan}, r"temperature is nan; it must be from 0"),
        ({"temperature": "hot"}, r"temperature is 'hot'; it must be a number"),
        ({"temperature": True}, r"temperature is True; it must be a number"),
        ({"top_p": 1.01}, r"top_p is 1\.01; it must be above 0 and at most 1"),
        ({"top_p": 0}, r"top_p is 0; it must be above 0 and at most 1"),
        ({"top_p": math.nan}, r"top_p is nan; it must be above 0"),
        ({"top_p": None}, r"top_p is None; it must be a number"),
        ({"min_p": -0.1}, r"min_p is -0\.1; it must be from 0 to 1"),
        ({"min_p": 1.5}, r"min_p is 1\.5; it must be from 0 to 1"),
        ({"repetition_penalty": 0}, r"repetition_penalty is 0; it must be from 0\.01 to 100"),
        ({"repetition_penalty": math.nan}, r"repetition_penalty is nan; it must be from"),
        ({"presence_penalty": 3}, r"presence_penalty is 3; it must be from -2 to 2"),
        ({"frequency_penalty": "1"}, r"frequency_penalty is '1'; it must be a number"),
        ({"temperature": 10**400}, r"temperature is 10{79}; it must be from 0 to 10000"),
        ({"temperature": 10**19}, r"temperature is 10000000000000000000; it must be from 0"),
        ({"stop": ("",)}, r"stop is empty; give non-empty strings"),
        ({"stop": ("a", 3)}, r"stop is 3; give non-empty strings"),
        ({"stop": 3}, r"stop is 3; it must be non-empty strings"),
        ({"ignore_eos": 1}, r"ignore_eos is 1; it must be True or False"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpeqError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"temperature": 0},
        {"temperature": 100.0},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"top_k": 0},
        {"min_p": 1},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100},
        {"presence_penalty": -2},
        {"frequency_penalty": 2},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"stop": ("a", "b c")},
    ],
)
def test_options_at_their_bounds_are_taken(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    for name, value in options.items():
        assert getattr(params, name) == value


def test_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-9).greedy


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
def test_a_lead_is_what_logits_may_change_by(temperature: float) -> None:
    """If those of the choose token and of the next one come closer by less, the choice is the same.
    If they do by more, the next one is choose.
    """
    rng = torch.Generator().manual_seed(21)
    for position in range(50):
        request = Request([1], SamplingParams(temperature=temperature, seed=3))
        request.output_token_ids = [0] * position
        logits = 2 * torch.randn(V, generator=rng)
        standing = standings(logits, request, [])
        first, second = standing.topk(2).indices.tolist()
        behind = runners_up(standing, request.sampling, 2)[1].tolist()
        ahead = behind[0]
        assert ahead <= behind[1]
        assert choose(logits, request, []) == first
        for share, expected in ((0.99, first), (1.01, second)):
            moved = logits.clone()
            moved[first] -= ahead * share / 2
            moved[second] += ahead * share / 2
            assert choose(moved, request, []) == expected


def test_leads_by_hand() -> None:
    greedily = SamplingParams()
    drawn = SamplingParams(temperature=0.5, seed=1)

    def following(standing: list[float], sampling: SamplingParams) -> list[list[float]]:
        return [each.tolist() for each in runners_up(torch.tensor(standing), sampling, 2)]

    assert following([1.0, 3.5, 2.0, -1.0], greedily) == [[2, 0], [1.5, 2.5]]
    assert following([4.0, 0.0, 4.0], greedily)[1] == [0.0, 4.0]
    assert following([2.0, 8.0], drawn) == [[0], [pytest.approx(0.5 * math.log(4))]]
    # Where top-k, top-p or min-p leave one token.
    assert following([0.0, 8.0, 0.0], drawn)[1] == [math.inf, math.inf]
