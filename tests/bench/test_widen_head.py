"""A widened model's draft head says what its source's says."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from speq import Generator, SpeqError, pack
from speq.bench.widen import Settings, run
from speq.bench.widen_head import widen_tensor
from speq.heads.head_file import head_path
from speq.heads.head_shape import HeadShape
from tests.helpers.heads import head_in_numpy, random_head, write_random_head
from tests.helpers.tiny_models import write_model

PROMPT = [*range(30, 70)]


@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "shape",
    [HeadShape(64, 12, window=5), HeadShape(128, 24, branches=1, contrast=False)],
    ids=["contrast", "one branch"],
)
def test_a_wide_head_computes_the_same(shape: HeadShape, tied: bool, noise: float) -> None:
    head = random_head(shape)
    head.acceptance_rates = 0.5, 0.25
    wide = widen_tensor(head, 3, noise, seed=0, tied=tied)
    assert wide.shape.width == 3 * shape.width and wide.acceptance_rates == head.acceptance_rates
    generator = torch.Generator().manual_seed(1)
    embedded = torch.randn(7, shape.hidden_size, generator=generator)
    features = torch.randn(7, shape.hidden_size, generator=generator)
    scale = 3 if tied else 1  # of a tied model's features
    found = head_in_numpy(
        wide,
        embedded.repeat_interleave(3, 1).numpy(),
        (features / scale).repeat_interleave(3, 1).numpy(),
    )
    wanted = head_in_numpy(head, embedded.numpy(), features.numpy())
    assert found.keys() == wanted.keys()
    for name, rows in wanted.items():
        if name != "mixing":
            rows = np.repeat(rows, 3, axis=-1) / scale
        assert np.abs(found[name] - rows).max() < 1e-4 * np.abs(rows).max(), name


def test_noise_makes_copies_differ() -> None:
    head = random_head(HeadShape(64, 12))
    enter = widen_tensor(head, 2, 1.0, seed=0, tied=False).weight("enter")
    first, second = enter[:, ::2], enter[:, 1::2]
    assert (first - second).abs().mean() > 0.1 * first.abs().mean()
    whole = (first + second)[::2]
    assert torch.allclose(whole, head.weight("enter"), atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_the_widened_model_is_drafted_for_by_the_widened_head(tmp_path: Path, tied: bool) -> None:
    """Tokens that stand are the source's, at every step; and a pack of it has the head too."""
    source = write_model(tmp_path / "source", "qwen2_moe", tie_word_embeddings=tied)
    write_random_head(source)
    made = run(str(source), tmp_path / "wide", Settings(192, 96, 1.0))
    assert made["head"] is True
    pack(tmp_path / "wide", tmp_path / "packed", codec="raw")
    steps = []
    for path in (source, tmp_path / "wide", tmp_path / "packed"):
        generator = Generator.from_pretrained(
            path, "64MiB", dtype="float32", drafter="head", draft_length=3, profile="none"
        )
        drafts: list[list[int]] = []
        score = generator.runtime.engine.verification.score

        def scored(batch, drafts=drafts, score=score):  # type: ignore[no-untyped-def]
            drafts.append([*batch[0].token_ids[1:]])
            return score(batch)

        generator.reserve(len(PROMPT) + 24)
        generator.runtime.engine.verification.score = scored  # type: ignore[method-assign]
        generator.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
        generator.close()
        steps.append(drafts)
    assert len(steps[0]) > 5
    assert steps[0] == steps[1] == steps[2]


def test_a_source_without_a_head_has_none(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "qwen2_moe")
    assert run(str(source), tmp_path / "wide", Settings(128, 96, 0.0))["head"] is False
    assert not head_path(tmp_path / "wide").exists()


def test_heads_that_would_attend_otherwise_are_refused() -> None:
    with pytest.raises(SpeqError, match="has heads of 24, and widened 2 times of 48, which attend"):
        widen_tensor(random_head(HeadShape(24, 8)), 2, 0.0, seed=0, tied=False)


def test_a_packed_model_keeps_its_head(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "olmoe")
    path = write_random_head(source)
    pack(source, tmp_path / "packed", codec="raw")
    assert head_path(tmp_path / "packed").read_bytes() == path.read_bytes()
    assert json.loads((tmp_path / "packed" / "config.json").read_text())["model_type"] == "olmoe"
