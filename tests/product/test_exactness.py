"""The keystone: the exact model's own tokens come out, whatever the draft length, budget and draft,
wherever experts are read from, in whatever order they arrive, whoever is evicted or prefetched.

The oracle is plain transformers' `generate` on the same checkpoint, in float32 and float64, where
the shape of a pass does not turn near-ties.
"""

import json
import random
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.lab.step import DRAFT_KERNELS
from speq import Generator
from speq.bench.synthetic import KnownText, SetAcceptance
from speq.config import SamplingParams
from speq.engine.offload import fetch_from
from speq.experts.encoding_store import EncodingStore
from speq.experts.expert_store import ExpertStore
from speq.heads.head_file import head_path
from speq.kernels.dense_ops import RecordMatrix
from speq.measure.report import read_prompts
from speq.registries import CACHE_POLICIES, PREFETCHERS
from speq.scheduler.prefetch import ThreePhase
from speq.scheduler.transfer import Fetch
from tests.helpers.cells import Cell, Folder, Folders, loaded, outcomes
from tests.helpers.copies import first_runs_hold
from tests.helpers.fake_transfer import Reordering
from tests.helpers.heads import write_random_head
from tests.helpers.often import often
from tests.helpers.pairwise import pairwise
from tests.helpers.tiny_models import (
    BY_FAMILY,
    FAMILIES,
    UNLIKE_IN_CACHES,
    VOCAB,
    drawn_tokens,
    greedy_tokens,
    load_plain,
    write_model,
)

NEW_TOKENS, FEWER_TOKENS = 72, 56
DRAFT_LENGTHS = (0, 1, 3, 8)
BUDGETS = ("two slots", "half", "all")
DRAFTS = ("own", "poor", "gptq")
STORES = ("plain", "packed")
# Out of a plain store, experts are encoded as they are read.
CODECS = ("raw", "lossless", "residual")
READERS = (1, 2, 4, 8)
# Drafts that branch, and trees of which rows are given up at random.
TREES = ("none", "small", "pruned")
# Two runs of different length, so that prompts end inside and at the end of a chunk.
PROMPTS = ([*range(40, 60)], [(7 * i * i + 3 * i) % 256 for i in range(64)])
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@pytest.fixture(autouse=True)
def reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts arrive in an order that is not the one they were asked for in."""

    def fetch(store: ExpertStore) -> Fetch:
        return Reordering(fetch_from(store), seed=3)

    monkeypatch.setattr("speq.engine_layout.fetch_from", fetch)


def run_cell(
    cell: Cell,
    model: Path,
    draft: str,
    dtype: str,
    prompt: list[int],
    expected: list[int],
    **sampling: Any,
) -> set[str]:
    """Generate in one cell and compare; the outcomes of its drafts."""
    context = len(prompt) + len(expected)
    generator, experts = loaded(cell, model, draft, dtype, context)
    slots = generator.runtime.plan.slots
    assert slots == {"two slots": 2, "half": experts // 2, "all": experts}[cell.budget]
    result = generator.generate(prompt, max_new_tokens=len(expected), ignore_eos=True, **sampling)
    assert result.token_ids == expected, cell
    steps = generator.last_run.decode
    if cell.draft_length and cell.draft_nodes is None:
        assert max(step.draft_length for step in steps) == cell.draft_length
    elif cell.draft_length:
        assert max(step.rows for step in steps) <= cell.draft_nodes + 1
        assert 0 < max(step.passes for step in steps) <= cell.draft_length
        assert max(step.branches for step in steps) > 0
        assert cell.trees != "pruned" or any(step.given_up for step in steps)
    else:
        assert result.stats["draft_length_mean"] == 0
    tied = cell.codec == "residual"
    held = cell.draft_length > 0 and cell.drafter == "auto"
    assert (generator.runtime.plan.items["draft"] > 0) == (held or tied)
    generator.close()
    return outcomes(steps)


def check_family(
    family: str, cells: list[Cell], folders: Folders, dtype: str, new_tokens: int = NEW_TOKENS
) -> None:
    expected: dict[tuple[Path, int], list[int]] = {}
    seen: set[str] = set()
    for at, cell in enumerate(cells):
        which = at % len(PROMPTS)
        key = folders.published(family, cell), which
        if key not in expected:
            plain = load_plain(key[0], DTYPES[dtype])
            expected[key] = greedy_tokens(plain, PROMPTS[which], new_tokens)
        model, draft = folders.of(family, cell)
        seen |= run_cell(cell, model, draft, dtype, PROMPTS[which], expected[key])
    assert seen == {"full", "partial", "rejected"}


def wide(*values: Any) -> list[Any]:
    """Parameters of the wider checks."""
    return [pytest.param(value, marks=pytest.mark.wide) for value in values]


@cache
def pairwise_cells() -> list[Cell]:
    factors = (
        DRAFT_LENGTHS,
        BUDGETS,
        DRAFTS,
        STORES,
        READERS,
        CACHE_POLICIES.names,
        PREFETCHERS.names,
        CODECS,
        TREES,
    )
    cells = pairwise(*factors)
    return [Cell(*values[:-1], trees=values[-1]) for values in cells]  # type: ignore[arg-type]


def share(cells: list[Cell], family: str) -> list[Cell]:
    """The cells of a family, where each cell is given to one of them."""
    # In any order: neighbours differ in the same factors again and again.
    cells = random.Random(5).sample(cells, len(cells))
    return cells[list(FAMILIES).index(family) :: len(FAMILIES)]


# One of each kind of cache before the others: the first always, the next in the wider checks.
FEWER_FAMILIES = often(
    sorted(FAMILIES, key=lambda each: each not in UNLIKE_IN_CACHES), quick=1, wide=3
)


GOOD_AND_POOR = [
    # One token alone stands whole often enough, where three hardly do.
    Cell(1, "half", "own"),
    Cell(3, "half", "own"),
    Cell(3, "two slots", "poor"),
    Cell(5, "half", "poor", trees="large"),
]


@pytest.mark.parametrize("family", BY_FAMILY)
def test_greedy_tokens_are_the_exact_models(family: str, folders: Folders) -> None:
    """A good and a poor draft with every family, and every cell with one of the families, those of
    the wider checks included: what options do does not depend on the family.
    """
    cells = [*GOOD_AND_POOR, *share(pairwise_cells(), family)]
    check_family(family, cells, folders, "float32", FEWER_TOKENS)


# Heads that know nothing: nearly all that they draft is rejected.
HEADS = [
    Cell(4, "half", "own", drafter="head", prefetch="three-phase"),
    Cell(5, "two slots", "own", drafter="head", trees="large"),
    Cell(3, "half", "own", drafter="head", prefetch="three-phase", trees="pruned"),
    Cell(1, "half", "own", drafter="head"),
]
PUBLISHED = [
    Cell(4, "half", "own", drafter="head", prefetch="three-phase", head="eagle"),
    Cell(5, "two slots", "own", drafter="head", trees="large", head="eagle"),
    Cell(3, "half", "own", drafter="head", trees="pruned", head="eagle"),
]


@pytest.mark.parametrize("family", FEWER_FAMILIES)
def test_heads_leave_tokens_as_they_are(family: str, folders: Folders) -> None:
    """One cell greedily and another one drawn, with each family; each cell with some of them."""
    at, plain = list(FAMILIES).index(family), load_plain(folders.float32(family))
    prompt, cell = PROMPTS[at % 2], HEADS[at % 4]
    expected = greedy_tokens(plain, prompt, 40)
    seen = run_cell(cell, *folders.of(family, cell), "float32", prompt, expected)
    assert "rejected" in seen
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "seed": 11}
    cell = HEADS[(at + 1) % 4]
    expected = drawn_tokens(plain, prompt, 40, SamplingParams(**options))
    run_cell(cell, *folders.of(family, cell), "float32", prompt, expected, **options)


@pytest.mark.parametrize("cell", [HEADS[0], HEADS[2]], ids=str)
def test_names_of_experts_leave_tokens_as_they_are(
    cell: Cell, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that knows nothing, and whose names are fetched nevertheless, all of them."""
    monkeypatch.setattr("speq.scheduler.prefetch.PAYS", 0.0)
    told: list[tuple[int, int]] = []
    suppose = ThreePhase._expect

    def heard(self: ThreePhase, token: int, layer: int, named: dict[int, float]) -> None:
        told.append((token, layer))
        suppose(self, token, layer, named)

    monkeypatch.setattr(ThreePhase, "_expect", heard)
    expected = greedy_tokens(load_plain(folders.float32("qwen2_moe")), PROMPTS[0], 40)
    model, draft = folders.of("qwen2_moe", cell)
    beside = head_path(model)
    other, named = beside.read_bytes(), tmp_path / "head.safetensors"
    named.write_bytes(write_random_head(model, names=True).read_bytes())
    beside.write_bytes(other)
    cell = replace(cell, head=str(named))
    run_cell(cell, model, draft, "float32", PROMPTS[0], expected)
    # Of the pending token, and of drafted ones; of every second layer.
    assert {token for token, _ in told} >= {0, 1, 2}
    assert {layer for _, layer in told} == set(range(0, 1 + max(layer for _, layer in told), 2))


# Drafts with what lies in slots, down to two for all layers together.
CACHED = [
    Cell(4, "half", "own", drafter="cached", prefetch="three-phase", cache_policy="lookahead"),
    Cell(5, "two slots", "own", drafter="cached", prefetch="three-phase", trees="large"),
    Cell(3, "half", "own", drafter="cached", trees="pruned"),
    Cell(2, "two slots", "own", "packed", 4, "lfu", "three-phase", drafter="cached"),
    Cell(3, "half", "own", codec="lossless", prefetch="three-phase", drafter="cached"),
    Cell(3, "half", "gptq", "packed", codec="residual", drafter="cached"),
    Cell(3, "all", "own", prefetch="three-phase", drafter="cached", trees="small"),
]


@pytest.mark.parametrize("family", FEWER_FAMILIES)
def test_experts_in_slots_leave_tokens_as_they_are(family: str, folders: Folders) -> None:
    """One cell greedily and another one drawn, with each family; each cell with some of them."""
    at, prompt, count = list(FAMILIES).index(family), PROMPTS[0], len(CACHED)
    cell = CACHED[at % count]
    plain = load_plain(folders.published(family, cell))
    expected = greedy_tokens(plain, prompt, 40)
    run_cell(cell, *folders.of(family, cell), "float32", prompt, expected)
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "seed": 11}
    cell = CACHED[(at + 3) % count]
    plain = load_plain(folders.published(family, cell))
    expected = drawn_tokens(plain, prompt, 40, SamplingParams(**options))
    run_cell(cell, *folders.of(family, cell), "float32", prompt, expected, **options)


@pytest.mark.wide
def test_experts_in_slots_draft_what_stands_and_what_does_not(folders: Folders) -> None:
    check_family("qwen2_moe", CACHED[:3], folders, "float32", FEWER_TOKENS)


@pytest.mark.full
@pytest.mark.parametrize("family", UNLIKE_IN_CACHES)
def test_experts_in_slots_in_every_cell(family: str, folders: Folders) -> None:
    for cell in CACHED:
        plain = load_plain(folders.published(family, cell))
        for prompt in PROMPTS:
            expected = greedy_tokens(plain, prompt, FEWER_TOKENS)
            run_cell(cell, *folders.of(family, cell), "float32", prompt, expected)


# First runs, which read records of the packed copy that they make, or encode what they read.
FIRST = [
    Cell(0, "half", "own", prefetch="three-phase"),
    Cell(3, "half", "own", cache_policy="lookahead", prefetch="three-phase"),
    Cell(4, "half", "own", drafter="cached", prefetch="three-phase", trees="small"),
    Cell(3, "half", "poor", cache_policy="lfu", trees="pruned", readers=4),
]


@pytest.mark.parametrize("family", FEWER_FAMILIES)
def test_first_runs_leave_tokens_as_they_are(
    family: str, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the copy is made, and once it is complete; each cell with some of the families."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("speq.experts.packed_copy.LEAST_BYTES", 1)
    monkeypatch.setattr("speq.experts.packed_copy.SPARE_SHARE", 0)
    monkeypatch.setattr("speq.experts.packed_copy.REST", 0)
    monkeypatch.setattr("speq.experts.record_writer.BATCH_BYTES", 1)
    cell = replace(FIRST[list(FAMILIES).index(family) % len(FIRST)], codec="lossless")
    model, draft = folders.of(family, cell)
    prompt = PROMPTS[0]
    expected = greedy_tokens(load_plain(model), prompt, 40)
    with first_runs_hold(records=True):
        auto = replace(cell, codec="auto")
        generator, experts = loaded(auto, model, draft, "float32", len(prompt) + 40)
    assert isinstance(generator.runtime.opened.store, EncodingStore)
    slots = generator.runtime.plan.slots
    assert 2 <= slots <= experts
    for _ in range(2):
        result = generator.generate(prompt, max_new_tokens=40, ignore_eos=True)
        assert result.token_ids == expected
        generator.runtime.finish_copy()
    # Where the buffers of the copy leave no room for the draft, all records fit in its place.
    assert (result.stats["verified_bytes"] > 0) is (slots < experts)
    generator.close()


# Drafts with a part of the INT4 copy, from none of it to all.
PARTS = [
    Cell(3, "half", "own", prefetch="three-phase", draft_experts=4),
    Cell(4, "two slots", "poor", trees="large", draft_experts=1),
    Cell(2, "half", "gptq", "packed", cache_policy="lookahead", draft_experts=0),
    Cell(5, "half", "own", codec="lossless", trees="pruned", draft_experts=0.75),
    Cell(3, "all", "own", prefetch="three-phase", draft_experts=1.0),
]


@pytest.mark.parametrize(("family", "at"), [("qwen2_moe", 0), ("deepseek_v3", 1)])
def test_drafts_of_some_experts_leave_tokens_as_they_are(
    family: str, at: int, folders: Folders
) -> None:
    """Rows that lack experts choose again, fewer where fewer are held than a row chooses."""
    expected = greedy_tokens(load_plain(folders.float32(family)), PROMPTS[0], 40)
    run_cell(PARTS[at], *folders.of(family, PARTS[at]), "float32", PROMPTS[0], expected)


@pytest.mark.wide
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "mixtral", "gpt_oss"])
def test_drafts_of_some_experts_in_every_cell(family: str, folders: Folders) -> None:
    check_family(family, PARTS, folders, "float32", 40)


@pytest.mark.parametrize("family", often(["qwen3_moe", "deepseek_v2", "glm4_moe"], quick=0, wide=1))
def test_published_heads_leave_tokens_as_they_are(family: str, folders: Folders) -> None:
    plain = load_plain(folders.float32(family))
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "seed": 11}
    drawn = drawn_tokens(plain, PROMPTS[1], 40, SamplingParams(**options))
    greedily = greedy_tokens(plain, PROMPTS[1], 40)
    for cell in PUBLISHED:
        model, draft = folders.of(family, cell)
        seen = run_cell(cell, model, draft, "float32", PROMPTS[1], greedily)
        assert "rejected" in seen
        run_cell(cell, model, draft, "float32", PROMPTS[1], drawn, **options)


@pytest.mark.parametrize(
    ("trees", "head"), [("none", "auto"), ("small", "auto"), ("none", "eagle"), ("small", "eagle")]
)
def test_heads_go_on_from_tokens_that_stand(trees: str, head: str, folders: Folders) -> None:
    """A head that is told some of the tokens, so that it hears of accepted ones."""
    cell = Cell(3, "half", "own", drafter="head", prefetch="three-phase", trees=trees, head=head)
    prompt = PROMPTS[0]
    expected = greedy_tokens(load_plain(folders.float32("qwen2_moe")), prompt, NEW_TOKENS)
    generator, _ = loaded(cell, *folders.of("qwen2_moe", cell), "float32", len(prompt) + NEW_TOKENS)
    drafter: Any = generator.runtime.engine.drafters[0]
    draws = random.Random(5)
    stands = [draws.random() < 0.6 for _ in range(NEW_TOKENS)]
    known = {tuple(prompt): KnownText(expected, stands)}
    drafter.next_tokens = SetAcceptance(drafter.next_tokens, known, VOCAB)
    result = generator.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    assert result.token_ids == expected
    assert outcomes(generator.last_run.decode) >= {"partial", "rejected"}
    assert result.stats["acceptance_rate"] > 0.2
    generator.close()


@pytest.mark.full
@pytest.mark.parametrize("family", UNLIKE_IN_CACHES)
def test_heads_in_every_cell(family: str, folders: Folders) -> None:
    plain = load_plain(folders.float32(family))
    for prompt in PROMPTS:
        expected = greedy_tokens(plain, prompt, FEWER_TOKENS)
        for cell in HEADS:
            run_cell(cell, *folders.of(family, cell), "float32", prompt, expected)


@pytest.mark.full
@pytest.mark.parametrize("family", UNLIKE_IN_CACHES)
def test_greedy_tokens_in_every_cell(family: str, folders: Folders) -> None:
    check_family(family, pairwise_cells(), folders, "float32")


@pytest.mark.parametrize(
    "family",
    [
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in ("deepseek_v2", "qwen2_moe", "gpt_oss")
        ),
    ],
)
def test_greedy_tokens_in_float64(family: str, folders: Folders) -> None:
    cells = [
        Cell(1, "half", "own", "packed", 4),
        Cell(3, "two slots", "poor"),
        Cell(8, "all", "own"),
        Cell(0, "two slots", "own", "packed", 1),
        Cell(3, "half", "gptq"),
        Cell(3, "half", "own", "packed", codec="lossless"),
        Cell(3, "half", "gptq", "packed", codec="residual"),
        Cell(5, "half", "own", prefetch="three-phase", trees="large"),
        Cell(5, "half", "poor", trees="pruned"),
    ]
    check_family(family, cells, folders, "float64")


@pytest.mark.parametrize("family", often(["qwen2_moe", "mixtral", "deepseek_v2"], quick=0, wide=1))
def test_drawn_tokens_are_the_exact_models(family: str, folders: Folders) -> None:
    """A seed gives the text that the exact model alone draws with it, whatever drafts."""
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "seed": 11}
    plain = load_plain(folders.float32(family))
    sampling = SamplingParams(**options)
    expected = drawn_tokens(plain, PROMPTS[0], 100, sampling)
    assert expected != greedy_tokens(plain, PROMPTS[0], 100)
    seen: set[str] = set()
    for cell in (
        Cell(0, "half", "own"),
        Cell(1, "two slots", "own", "packed"),
        Cell(3, "half", "poor", cache_policy="lookahead", prefetch="three-phase"),
        Cell(5, "two slots", "poor", cache_policy="entropy", prefetch="three-phase"),
        Cell(8, "all", "gptq", readers=4),
        Cell(3, "half", "poor", prefetch="three-phase", trees="small"),
        Cell(5, "two slots", "own", trees="pruned"),
        Cell(8, "half", "poor", cache_policy="lookahead", prefetch="three-phase", trees="large"),
    ):
        model, draft = folders.of(family, cell)
        seen |= run_cell(cell, model, draft, "float32", PROMPTS[0], expected, **options)
    assert seen == {"full", "partial", "rejected"}


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.1, "presence_penalty": 0.6, "frequency_penalty": 0.2},
        *wide(
            {"repetition_penalty": 1.3},
            {"temperature": 0.9, "top_k": 50, "min_p": 0.02, "repetition_penalty": 1.2, "seed": 11},
            {"temperature": 0.8, "top_k": 90, "presence_penalty": 1.0, "seed": 12},
        ),
    ],
    ids=lambda options: " ".join(options),
)
def test_penalised_tokens_are_the_exact_models(options: dict[str, Any], folders: Folders) -> None:
    """Penalties look at the tokens before a position, drafted ones among them."""
    family, prompt = "qwen2_moe", PROMPTS[0]
    plain, sampling = load_plain(folders.float32(family)), SamplingParams(**options)
    expected = drawn_tokens(plain, prompt, 100, sampling)
    unpenalised = greedy_tokens(plain, prompt, 100)
    assert expected != unpenalised
    assert len(set(expected)) > len(set(unpenalised))
    seen: set[str] = set()
    for cell in (
        Cell(0, "half", "own"),
        Cell(1, "two slots", "own", "packed"),
        Cell(3, "half", "poor", cache_policy="lookahead", prefetch="three-phase"),
        Cell(5, "half", "own", prefetch="three-phase", trees="small"),
        Cell(5, "two slots", "poor", trees="pruned"),
    ):
        model, draft = folders.of(family, cell)
        seen |= run_cell(cell, model, draft, "float32", prompt, expected, **options)
    assert seen == {"full", "partial", "rejected"}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("readers", often([8, 1, 2, *range(3, 8)], quick=1, wide=2))
def test_any_number_of_readers_gives_the_exact_tokens(
    readers: int, store: str, folders: Folders
) -> None:
    expected = greedy_tokens(load_plain(folders.float32("qwen3_moe")), PROMPTS[1], 60)
    for draft_length in (0, 3):
        cell = Cell(draft_length, "half", "own", store, readers)
        run_cell(cell, *folders.of("qwen3_moe", cell), "float32", PROMPTS[1], expected)


@pytest.mark.full
@pytest.mark.parametrize("family", BY_FAMILY)
def test_greedy_tokens_full_product(family: str, folders: Folders) -> None:
    """Every cell of two products with one of the families: of budgets, drafts and where experts
    come from, and of policies with prefetches.
    """
    cells = []
    for at, values in enumerate(product(DRAFT_LENGTHS, BUDGETS, DRAFTS, STORES)):
        cells += [Cell(*values, readers=1 + at * 5 % 8, codec=codec) for codec in CODECS]
    policies = product(CACHE_POLICIES.names, PREFETCHERS.names, BUDGETS[:2], (1, 3, 8))
    for at, (policy, mode, budget, draft_length) in enumerate(policies):
        store = STORES[at // 2 % 2]
        cells.append(Cell(draft_length, budget, DRAFTS[at % 3], store, 2, policy, mode))
    check_family(family, [*GOOD_AND_POOR, *share(cells, family)], folders, "float32", FEWER_TOKENS)


VARIANTS = {
    "qwen2_moe with windows in some layers": (
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "qwen3_moe with a window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 16}),
    "mixtral without a window": ("mixtral", {"sliding_window": None}),
    "phimoe with a window": ("phimoe", {"sliding_window": 20}),
    "deepseek_v2 with groups": (
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "q_lora_rank": 20,
        },
    ),
    "olmoe with clipped and tied weights": (
        "olmoe",
        {"clip_qkv": 1.5, "tie_word_embeddings": True},
    ),
    "qwen2_moe in gelu": ("qwen2_moe", {"hidden_act": "gelu"}),
    "deepseek_v3 without latent queries": (
        "deepseek_v3",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    ),
    "ernie4_5_moe with biases and tied weights": (
        "ernie4_5_moe",
        {"use_bias": True, "tie_word_embeddings": True, "moe_num_shared_experts": 0},
    ),
    "hunyuan_v1_moe without scaled turns": (
        "hunyuan_v1_moe",
        {"rope_scaling": None, "moe_topk": 2, "attention_bias": True},
    ),
    "gpt_oss with windows in all layers and tied weights": (
        "gpt_oss",
        {
            "layer_types": ["sliding_attention"] * 3,
            "sliding_window": 16,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
        },
    ),
    "gemma4 with one width, values of their own, a head of its own and a narrow cap": (
        "gemma4",
        {
            "global_head_dim": 16,
            "attention_k_eq_v": False,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 2.0,
        },
    ),
    "laguna with a gate for each element and capped logits of routers": (
        "laguna",
        {"gating": "per-element", "moe_router_logit_softcapping": 0.5, "attention_bias": True},
    ),
    "afmoe without scaled embeddings and with tied weights": (
        "afmoe",
        {"mup_enabled": False, "tie_word_embeddings": True, "num_dense_layers": 0},
    ),
    "granitemoehybrid with positions": (
        "granitemoehybrid",
        {"position_embedding_type": "rope", "mamba_n_groups": 1},
    ),
    "mimo_v2_flash with windows in all layers and values as they are": (
        "mimo_v2_flash",
        {
            "layer_types": ["sliding_attention"] * 3,
            "attention_value_scale": None,
            "attention_bias": True,
            "n_group": 1,
        },
    ),
    "mistral4 without latent queries and with heads in halves": (
        "mistral4",
        {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1},
    ),
    "exaone_moe with windows in all layers": (
        "exaone_moe",
        {"layer_types": ["sliding_attention"] * 3, "n_group": 1, "norm_topk_prob": False},
    ),
}


INSTALLED = [variant for variant, (family, _) in VARIANTS.items() if family in FAMILIES]
NOT_FIRST = [variant for at, variant in enumerate(INSTALLED) if at % 5]


@pytest.mark.parametrize("variant", [*INSTALLED[::5], *wide(*NOT_FIRST)])
def test_variants_within_a_family(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    model = write_model(tmp_path / family, family, max_shard_size="200KB", **overrides)
    assert len(list(model.glob("*.safetensors"))) > 1
    expected = greedy_tokens(load_plain(model), PROMPTS[1], NEW_TOKENS)
    run_cell(Cell(3, "half", "own"), model, "auto", "float32", PROMPTS[1], expected)
    branching = Cell(6, "half", "own", prefetch="three-phase", trees="pruned")
    run_cell(branching, model, "auto", "float32", PROMPTS[1], expected)


@pytest.mark.parametrize("stored", [torch.bfloat16, *wide(torch.float16)])
def test_sixteen_bit_checkpoints_computed_in_float32(stored: torch.dtype, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "olmoe", dtype=stored)
    expected = greedy_tokens(load_plain(model), PROMPTS[0], NEW_TOKENS)
    run_cell(Cell(3, "half", "own"), model, "auto", "float32", PROMPTS[0], expected)


@pytest.mark.wide
def test_bundled_model_on_three_prompts(bundled: Path) -> None:
    compare_bundled(bundled, [(4, "40MiB")], 3)


@pytest.mark.full
def test_bundled_model_on_twenty_prompts(bundled: Path) -> None:
    compare_bundled(bundled, [(1, "44MiB"), (8, "48MiB")], 20)


def compare_bundled(model: Path, settings: list[tuple[int, str]], count: int) -> None:
    """So many prompts x 128 tokens, in float32."""
    prompts = read_prompts(None, count)
    assert len(prompts) == count
    plain = load_plain(model)
    generator = Generator.from_pretrained(model, "64MiB", draft="none", draft_length=0)
    encoded = [generator.encode(prompt) for prompt in prompts]
    generator.close()
    expected = [greedy_tokens(plain, ids, 128) for ids in encoded]
    mismatches = []
    for draft_length, budget in settings:
        generator = Generator.from_pretrained(
            model, budget, dtype="float32", draft_length=draft_length
        )
        drafted = 0
        for at, (ids, tokens) in enumerate(zip(encoded, expected, strict=True)):
            result = generator.generate(ids, max_new_tokens=128, ignore_eos=True)
            drafted += sum(step.draft_length for step in generator.last_run.decode)
            if result.token_ids != tokens:
                mismatches.append((draft_length, budget, at))
        assert (drafted > 0) == (draft_length > 0)
        generator.close()
    assert mismatches == []


@pytest.mark.wide
def test_sixteen_bit_output_does_not_depend_on_what_lies_in_slots(bundled: Path) -> None:
    """In 16 bits the shape of a pass matters (here prompts of one chunk), and nothing else."""
    texts = set()
    for budget, codec in (("20MiB", "raw"), ("26MiB", "lossless"), ("64MiB", "raw")):
        generator = Generator.from_pretrained(
            bundled, budget, draft_length=4, context_length=160, codec=codec
        )
        chunk = generator.runtime.plan.chunk
        assert chunk >= 16
        result = generator.generate([5, 6, 7, 8], max_new_tokens=100, ignore_eos=True)
        assert result.stats["draft_length_mean"] > 3
        texts.add(json.dumps(result.token_ids))
        generator.close()
    assert len(texts) == 1


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_every_draft_kernel_gives_the_exact_tokens(family: str, tiny: Folder) -> None:
    expected = greedy_tokens(load_plain(tiny(family)), PROMPTS[0], 60)
    recalled = {}
    for kernel in DRAFT_KERNELS:
        generator = Generator.from_pretrained(
            tiny(family), "64MiB", draft_length=3, dtype="float32"
        )
        assert generator.runtime.draft_backend is not None
        generator.runtime.draft_backend.kernel = DRAFT_KERNELS[kernel]
        result = generator.generate(PROMPTS[0], max_new_tokens=60, ignore_eos=True)
        generator.close()
        assert result.token_ids == expected
        recalled[kernel] = result.stats["route_recall"]
    # One arithmetic, two ways to call it: the drafts differ by no more than a near-tie.
    assert recalled["fused"] == pytest.approx(recalled["unfused"], abs=0.02)


@pytest.mark.parametrize("family", often(["qwen2_moe", "deepseek_v2"], quick=0, wide=1))
def test_prompt_lookup_gives_the_exact_tokens(family: str, folders: Folders) -> None:
    """Texts that repeat themselves, so that drafts are found, and some of them stand."""
    cells = [
        Cell(3, "half", "own", drafter="ngram"),
        Cell(2, "half", "own", "plain", 2, "lru", "three-phase", drafter="ngram"),
        Cell(8, "two slots", "own", "packed", 4, "lookahead", "three-phase", drafter="ngram"),
        Cell(1, "all", "own", "plain", 2, "lfu", codec="lossless", drafter="ngram"),
        Cell(8, "half", "gptq", "packed", codec="residual", drafter="ngram"),
        Cell(3, "half", "own", "plain", 2, "entropy", codec="residual", drafter="ngram"),
    ]
    check_family(family, cells, folders, "float32", 100)


@pytest.mark.parametrize("family", FEWER_FAMILIES)
def test_compact_dense_layers_give_the_tokens_of_words(family: str, folders: Folders) -> None:
    """In bfloat16, where both compute the same sums: tokens of one are tokens of the other."""
    cells = [
        Cell(3, "half", "own", codec="lossless", prefetch="three-phase"),
        Cell(0, "two slots", "own", "packed", codec="lossless"),
    ]
    for cell, prompt in zip(cells, PROMPTS, strict=True):
        model, draft = folders.of(family, cell)
        wanted: list[int] = []
        for dense in ("raw", "lossless"):
            of_form = replace(cell, dense=dense)
            generator, _ = loaded(of_form, model, draft, "bfloat16", len(prompt) + 40)
            kinds = {type(layer.exact) for layer in generator.runtime.model.dense.values()}
            assert (RecordMatrix in kinds) == (dense == "lossless")
            memory = generator.runtime.plan.items["non_expert_weights"]
            assert memory == generator.runtime.model.nbytes
            result = generator.generate(prompt, max_new_tokens=40, ignore_eos=True)
            generator.close()
            assert result.stats["dense"] == dense
            wanted = wanted or result.token_ids
            assert result.token_ids == wanted, of_form
