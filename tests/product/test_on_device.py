"""The keystone on a device with streams: the whole path of a GPU, its kernels run by the host.

Copies, events and reads by disk go on in any order that is allowed, and torch's race detector hears
of every access to a slot.
"""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from speq.config import SamplingParams
from speq.engine.verification import RecordedVerification
from speq.registries import CACHE_POLICIES, PREFETCHERS
from speq.scheduler.stream_transfer import StreamTransfer
from tests.helpers.cells import Cell, Folders, loaded
from tests.helpers.host_device import ComputeStream, HostDevice, Race, host_device
from tests.helpers.pairwise import pairwise
from tests.helpers.tiny_models import (
    FAMILIES,
    UNLIKE_IN_CACHES,
    drawn_tokens,
    greedy_tokens,
    load_plain,
)

# A prompt whose rows go by expert, and one whose rows a kernel takes together.
PROMPTS = ([(7 * i * i + 3 * i) % 256 for i in range(70)], [7, 3, 200, 41, 9])
NEW_TOKENS = 16


@cache
def cells() -> list[Cell]:
    factors = (
        (0, 1, 3),
        ("two slots", "half", "all"),
        ("own", "poor", "gptq"),
        ("plain", "packed"),
        (1, 2),
        CACHE_POLICIES.names,
        PREFETCHERS.names,
        ("raw", "lossless", "residual"),
        ("auto",),
        ("auto", "none"),
        ("raw",),
        ("none", "small", "pruned"),
    )
    chosen = [Cell(*values) for values in pairwise(*factors)]  # type: ignore[arg-type]
    return random.Random(7).sample(chosen, len(chosen))


def run(cell: Cell, model: Path, draft: str, prompt: list[int], order: int, **sampling: Any) -> Any:
    """Tokens, and what the device saw. order: in which its streams go on, by chance."""
    context = len(prompt) + NEW_TOKENS
    with host_device(HostDevice(order)) as device:
        generator, _ = loaded(cell, model, draft, "float32", context, device="cuda")
        result = generator.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True, **sampling)
        verification = generator.runtime.engine.verification
        chains = [step for step in generator.last_run.decode if not step.branches]
        generator.close()
    assert device.pinned == {}
    recorded = cell.graphs == "auto" and generator.runtime.model.unrecordable is None
    assert isinstance(verification, RecordedVerification) == recorded
    if isinstance(verification, RecordedVerification):
        # Passes over trees are launched, and all of a short text may be such.
        assert verification.passes.shapes or not chains
    return result


@pytest.mark.parametrize(
    ("family", "trees"),
    [
        pytest.param(
            family,
            ("none", "small")[at % 2],
            marks=[pytest.mark.wide if family == "deepseek_v2" else pytest.mark.full],
        )
        for at, family in enumerate(FAMILIES)
        if family in UNLIKE_IN_CACHES
    ],
)
def test_texts_side_by_side(family: str, trees: str, folders: Folders) -> None:
    """Each has the exact model's tokens, and a text by itself is still recorded."""
    cell = Cell(2, "half", "own", cache_policy="lookahead", prefetch="three-phase", trees=trees)
    plain = load_plain(folders.published(family, cell))
    prompts = [*PROMPTS, [11, 12], PROMPTS[0][:20]]
    expected = [greedy_tokens(plain, prompt, NEW_TOKENS) for prompt in prompts]
    context = max(map(len, prompts)) + NEW_TOKENS
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    with host_device(HostDevice(3)) as device:
        model, draft = folders.of(family, cell)
        generator, _ = loaded(cell, model, draft, "float32", context, "cuda", max_batch=3)
        made = generator.generate_batch(prompts, **options)
        assert generator.last_run is not None
        assert max(step.sequences for step in generator.last_run.decode) == 3
        alone = generator.generate(prompts[1], **options)
        verification = generator.runtime.engine.verification
        recorded = generator.runtime.model.unrecordable is None
        generator.close()
    assert [each.token_ids for each in made] == expected
    assert alone.token_ids == expected[1]
    assert isinstance(verification, RecordedVerification) == recorded
    assert device.pinned == {}


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(at, marks=[pytest.mark.full if at % 16 else pytest.mark.wide])
        for at in range(len(cells()))
    ],
)
def test_greedy_tokens_are_the_exact_models(at: int, folders: Folders) -> None:
    cell, family = cells()[at], list(FAMILIES)[at % len(FAMILIES)]
    prompt = PROMPTS[at // len(FAMILIES) % 2]
    expected = greedy_tokens(load_plain(folders.published(family, cell)), prompt, NEW_TOKENS)
    result = run(cell, *folders.of(family, cell), prompt, order=at)
    assert result.token_ids == expected, cell
    assert (result.stats["draft_length_mean"] > 0) == (cell.draft_length > 0)


PARTS = [
    Cell(3, "half", "own", prefetch="three-phase", draft_experts=4),
    Cell(3, "half", "own", trees="small", draft_experts=1),
    Cell(2, "two slots", "own", graphs="none", draft_experts=0),
    Cell(3, "half", "own", prefetch="three-phase", draft_experts=1.0),
]


@pytest.mark.parametrize(
    ("family", "at"),
    [
        *(
            pytest.param(family, at, marks=mark)
            for family, at, mark in [
                ("qwen2_moe", 0, pytest.mark.full),
                ("deepseek_v3", 1, pytest.mark.wide),
            ]
        ),
        *(
            pytest.param(family, at, marks=pytest.mark.full)
            for family, at in [("deepseek_v3", 0), ("mixtral", 1), ("qwen2_moe", 2)]
        ),
        pytest.param("deepseek_v3", 3, marks=pytest.mark.full),
    ],
)
def test_drafts_of_some_experts(family: str, at: int, folders: Folders) -> None:
    """Rows choose again on the device, within passes that are recorded."""
    expected = greedy_tokens(load_plain(folders.float32(family)), PROMPTS[1], NEW_TOKENS)
    model, draft = folders.of(family, PARTS[at])
    assert run(PARTS[at], model, draft, PROMPTS[1], order=at).token_ids == expected


HEADS = [
    Cell(4, "half", "own", drafter="head", prefetch="three-phase", trees="small"),
    Cell(3, "half", "own", drafter="head", prefetch="three-phase"),
    Cell(4, "two slots", "own", drafter="head", trees="pruned", graphs="none"),
    Cell(3, "half", "own", drafter="head", head="eagle"),
]


@pytest.mark.parametrize(
    ("at", "family"),
    [
        pytest.param(at, family, marks=[pytest.mark.full if at else pytest.mark.wide])
        for at, family in enumerate(FAMILIES)
        if family in UNLIKE_IN_CACHES
    ],
)
def test_heads_leave_tokens_as_they_are(at: int, family: str, folders: Folders) -> None:
    """Of a head that knows nothing, greedy; and drawn, of the first family."""
    cell, prompt = HEADS[at % 4], PROMPTS[at % 2]
    model, draft = folders.of(family, cell)
    plain = load_plain(folders.published(family, cell))
    result = run(cell, model, draft, prompt, order=at)
    assert result.token_ids == greedy_tokens(plain, prompt, NEW_TOKENS)
    assert result.stats["draft_length_mean"] > 0
    if at:
        return
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "seed": 11}
    drawn = run(cell, model, draft, prompt, at, **options)
    expected = drawn_tokens(plain, prompt, NEW_TOKENS, SamplingParams(**options))
    assert drawn.token_ids == expected


CACHED = [
    Cell(3, "half", "own", drafter="cached", prefetch="three-phase", cache_policy="lookahead"),
    Cell(4, "two slots", "own", drafter="cached", prefetch="three-phase", trees="small"),
    Cell(2, "half", "own", "packed", codec="lossless", drafter="cached", graphs="none"),
]


@pytest.mark.parametrize(
    ("at", "family"),
    [
        pytest.param(at, family, marks=[pytest.mark.full if at else pytest.mark.wide])
        for at, family in enumerate(FAMILIES)
        if family in UNLIKE_IN_CACHES
    ],
)
def test_experts_in_slots_leave_tokens_as_they_are(at: int, family: str, folders: Folders) -> None:
    """Drafts read slots that are filled again as they go on."""
    cell, prompt = CACHED[at % 3], PROMPTS[at % 2]
    model, draft = folders.of(family, cell)
    plain = load_plain(folders.published(family, cell))
    result = run(cell, model, draft, prompt, order=at)
    assert result.token_ids == greedy_tokens(plain, prompt, NEW_TOKENS)
    assert result.stats["draft_length_mean"] > 0


@pytest.mark.parametrize(
    ("family", "trees"),
    [
        pytest.param("glm4_moe", "none", marks=pytest.mark.wide),
        pytest.param("glm4_moe", "small", marks=pytest.mark.full),
        pytest.param("deepseek_v3", "small", marks=pytest.mark.full),
        pytest.param("qwen3_next", "none", marks=pytest.mark.full),
        pytest.param("ernie4_5_moe", "small", marks=pytest.mark.full),
    ],
)
def test_layers_that_predict_tokens_ahead(family: str, trees: str, folders: Folders) -> None:
    """Their experts lie on the device, and prompts have more rows than a kernel takes."""
    cell = Cell(3, "half", "own", drafter="head", head="mtp", trees=trees)
    model, draft = folders.of(family, cell)
    expected = greedy_tokens(load_plain(model), PROMPTS[0], NEW_TOKENS)
    result = run(cell, model, draft, PROMPTS[0], order=2)
    assert result.token_ids == expected
    assert result.stats["draft_length_mean"] > 0


@pytest.mark.parametrize("missing", ["launched", "after"])
def test_a_run_without_an_order_is_caught(
    missing: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that are reused under kernels, and kernels that do not wait for their experts."""
    cell = Cell(3, "two slots", "own", prefetch="three-phase")
    if missing == "launched":
        monkeypatch.setattr(StreamTransfer, "launched", lambda engine, slots: None)
    else:
        monkeypatch.setattr(ComputeStream, "after", lambda stream, event: None)
    with pytest.raises(Race):
        run(cell, *folders.of("qwen3_moe", cell), PROMPTS[1], order=1)
