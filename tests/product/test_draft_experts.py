"""Drafts with a part of the INT4 copy: which experts it holds, what it runs, what it takes."""

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speq import Generator, SpeqError
from speq.config import RunConfig
from speq.drafts import draft_file
from speq.drafts.draft_source import open_draft
from speq.experts.int4 import Int4Arena, Int4Layout
from speq.governor.profile import Profile, ProfileKey
from speq.kernels.decoder_ops import RouterRule
from speq.layers.draft_experts import DraftExperts
from speq.layers.expert_counts import ExpertCounts
from speq.layers.gates import ScoreGate
from speq.measure.plan import plan
from speq.models.opened import open_model
from speq.planning import used_experts
from speq.planning.cost.planner import partial_acceptance
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.run_governor import profile_prior
from speq.planning.used_experts import DraftPart, UsedExperts
from speq.routing import Route
from tests.helpers.cells import Cell, Folder, Folders
from tests.helpers.expert_problems import SILU
from tests.helpers.smallest import two_slot_budget
from tests.reference.experts import ACTIVATIONS
from tests.reference.experts import expert as expert_of
from tests.reference.int4 import unpacked

CPU = torch.device("cpu")
HIDDEN, WIDTH, LAYERS, EXPERTS = 64, 32, 2, 4
SILUS = [SILU] * LAYERS
# Of the first layer two experts, of the second one.
KEPT = [[3, 1], [2]]
BUDGET = "64MiB"
# Of sums of some tens, added up in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-3}


def arena_of(kept: list[list[int]] | None) -> Int4Arena:
    """Each expert the same in every arena that holds it."""
    arena = Int4Arena(Int4Layout(HIDDEN, WIDTH), LAYERS, EXPERTS, CPU, kept=kept)
    for base_slot, number in enumerate(arena.held):
        made = torch.Generator().manual_seed(number)
        gate_up = torch.randn(2 * WIDTH, HIDDEN, generator=made)
        arena.quantize_into(base_slot, gate_up, torch.randn(HIDDEN, WIDTH, generator=made))
    return arena


def test_an_arena_addresses_those_that_it_holds() -> None:
    arena = arena_of(KEPT)
    assert arena.base_slots.tolist() == [[-1, 0, -1, 1], [-1, -1, 2, -1]]
    assert arena.held == [1, 3, 6] and not arena.whole
    assert arena.nbytes == 3 * arena.layout.nbytes
    every = arena_of([[0, 1, 2, 3]] * LAYERS)
    assert every.whole and torch.equal(every.base_slots, arena_of(None).base_slots)


# What they run


def routed(top_k: int) -> tuple[Tensor, Route, Tensor]:
    """Rows, what their router chose by its softmax, and its scores."""
    torch.manual_seed(1)
    rows, logits = torch.randn(16, HIDDEN), torch.randn(16, EXPERTS)
    scores = logits.softmax(-1)
    weights, ids = scores.topk(top_k, -1)
    return rows, Route(ids, weights, logits), scores


def summed(arena: Int4Arena, layer: int, rows: Tensor, chosen: list[dict[int, float]]) -> Tensor:
    """Rows through some experts of a layer, each with its weight, one by one."""
    out = torch.zeros(len(rows), HIDDEN)
    backend = arena.experts
    for at, weights in enumerate(chosen):
        for expert, weight in weights.items():
            base_slot = int(arena.base_slots[layer, expert])
            parts = backend.expert(base_slot)[:2]
            gate_up, down = (unpacked(codes.numpy(), steps.numpy()) for codes, steps in parts)
            row = rows[at].double().numpy()
            made = expert_of(row, gate_up, down, ACTIVATIONS["silu"], int8=True)
            out[at] += weight * torch.from_numpy(made)
    return out


@pytest.mark.parametrize(("layer", "top_k"), [(0, 2), (0, 3), (1, 2), (1, 1)])
def test_rows_choose_among_the_experts_that_are_held(layer: int, top_k: int) -> None:
    """By hand: the best of the scores that are left, and their scores for weights."""
    rows, route, scores = routed(top_k)
    told: list[tuple[int, Route]] = []
    backend = DraftExperts(arena_of(KEPT), SILUS, gates=[ScoreGate(RouterRule())] * LAYERS)
    backend.on_route = lambda *route: told.append(route)
    got = backend(layer, rows, route)
    held, chosen, lacking = set(KEPT[layer]), [], 0
    for at, ids in enumerate(route.topk_ids.tolist()):
        best = sorted(held, key=lambda expert: -float(scores[at, expert]))[:top_k]
        chosen.append({expert: float(scores[at, expert]) for expert in best})
        lacking += not held >= set(ids)
    torch.testing.assert_close(got, summed(arena_of(None), layer, rows, chosen), **CLOSE)
    assert lacking
    # What is fetched is what routers chose among all experts.
    assert told == [(layer, route)]


def test_rows_that_lack_nothing_keep_their_routers_weights() -> None:
    """Weights that no gate would give come out of the router as they went in."""
    rows, route, scores = routed(2)
    backend = DraftExperts(arena_of(KEPT), SILUS, gates=[ScoreGate(RouterRule())] * LAYERS)
    got = backend(0, rows, Route(route.topk_ids, 3 * route.topk_weights, route.router_logits))
    held = [set(ids) <= set(KEPT[0]) for ids in route.topk_ids.tolist()]
    assert any(held) and not all(held)
    chosen = [
        {expert: float(scores[at, expert]) * (3 if held[at] else 1) for expert in KEPT[0]}
        for at in range(len(rows))
    ]
    torch.testing.assert_close(got, summed(arena_of(None), 0, rows, chosen), **CLOSE)


def test_all_experts_are_run_as_a_whole_copy_is() -> None:
    rows, route, _ = routed(2)
    every = DraftExperts(arena_of([[0, 1, 2, 3]] * LAYERS), SILUS)
    whole = DraftExperts(arena_of(None), SILUS)
    assert every.whole and whole.whole
    for layer in range(LAYERS):
        assert torch.equal(every(layer, rows, route), whole(layer, rows, route))


def test_no_expert_adds_nothing() -> None:
    rows, route, _ = routed(2)
    backend = DraftExperts(arena_of([[], [2]]), SILUS, gates=[ScoreGate(RouterRule())] * LAYERS)
    assert not backend.whole
    assert torch.equal(backend(0, rows, route), torch.zeros(16, HIDDEN))


# Which they are


COUNTS = ExpertCounts("a model", 10, 2, [[9, 1, 2, 8], [5, 5, 0, 10]])


def test_experts_used_most_by_hand() -> None:
    used = UsedExperts(LAYERS, EXPERTS, COUNTS)
    assert used.most(2) == [[0, 3], [0, 3]]
    assert used.most(3) == [[0, 2, 3], [0, 1, 3]]
    assert used.most(0) == [[], []]
    # 9 + 8 and 5 + 10 of 20 choices in each layer.
    assert used.part(2) == used.part(0.5) == DraftPart(2, 32 / 40)
    assert used.part(0.3) == DraftPart(2, 32 / 40)  # 1.2 of 4
    assert used.part(0) == DraftPart(0, 0.0)
    assert used.part(4) == used.part(1.0) == used.part(None) == DraftPart(None, 1.0)
    unknown = UsedExperts(LAYERS, EXPERTS)
    assert unknown.most(2) == [[0, 1], [0, 1]] and unknown.part(2) == DraftPart(2, 0.5)
    with pytest.raises(SpeqError, match="draft_experts is 5 and a layer has 4 experts; give 0 to"):
        used.part(5)


def test_the_planner_chooses_among_shares() -> None:
    used = UsedExperts(LAYERS, EXPERTS, COUNTS)
    assert used.parts("auto") == (DraftPart(), DraftPart(2, 32 / 40), DraftPart(1, 19 / 40))
    assert used.parts(0.5) == (DraftPart(2, 32 / 40),)
    assert UsedExperts(LAYERS, EXPERTS).parts("auto") == (DraftPart(),)


def test_a_part_is_expected_to_stand_less_often() -> None:
    assert partial_acceptance(0.9, 1.0) == 0.9
    assert partial_acceptance(0.9, 0.6) == pytest.approx(0.54)
    whole = ResidencyPlan("raw", "int4", 1, 1, 1)
    part = replace(whole, draft_experts=3, draft_covers=0.6)
    assert part.name.endswith("of 3 experts a layer")
    # A profile is of a draft of all experts.
    key = ProfileKey("weights", "cpu: some", 1, "1")
    measured = Profile(key, ((1.0, 1.0),), 0.0, 0.0, 1, 0.0, 0.1, ((1.0, 1.0),), acceptance=0.9)
    assert profile_prior(measured, whole).acceptance == 0.9
    assert profile_prior(measured, part).acceptance == pytest.approx(0.54)
    assert profile_prior(replace(measured, acceptance=None), part).acceptance is None


def copied(model: Path, to: Path) -> Path:
    """A model's files, without what is kept beside it."""
    to.mkdir()
    for file in model.iterdir():
        if file.is_file():
            (to / file.name).symlink_to(file)
    return to


def counts_for(model: Path) -> ExpertCounts:
    """The last expert of each layer is used most, and each one before it less."""
    with closing(open_model(model)) as opened:
        experts, top_k = opened.shape.experts, opened.shape.top_k
    rising = [*range(experts.num_experts)]
    tokens = sum(rising)
    spread = [top_k * each for each in rising]
    assert max(spread) <= tokens
    return ExpertCounts("this", tokens, top_k, [spread] * len(experts.layers))


def with_counts(model: Path, to: Path) -> tuple[Path, ExpertCounts]:
    """A copy of a model that counts are kept of."""
    model = copied(model, to)
    counts = counts_for(model)
    with closing(open_model(model)) as opened:
        used_experts.write_counts(counts, opened.checkpoint)
    return model, counts


def loaded(model: Path, **options: Any) -> Generator:
    given: dict[str, Any] = {"draft_length": 3, "dtype": "float32", "profile": "none"}
    return Generator.from_pretrained(model, BUDGET, device="cpu", **given, **options)


@pytest.mark.parametrize("count", [0, 3])
def test_what_is_planned_is_what_is_held(
    count: int, tiny: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The experts of counts that are kept, and bytes for no others."""
    model, counts = with_counts(tiny("qwen2_moe"), tmp_path / "model")
    with closing(loaded(model, draft_experts=count, draft_dense="none")) as generator:
        runtime = generator.runtime
        arena = runtime._loaded.arena
        assert arena is not None and runtime.draft_backend is not None
        layers, experts = arena.base_slots.shape
        held = [[*range(experts - count, experts)]] * layers
        assert (arena.base_slots >= 0).tolist() == [
            [expert in of_layer for expert in range(experts)] for of_layer in held
        ]
        assert runtime.plan.items["draft"] == arena.nbytes
        assert sum(part.nbytes for part in arena.parts.values()) == arena.nbytes
        assert runtime.residency_plan.draft_experts == count
        assert runtime.residency_plan.draft_covers == pytest.approx(
            sum(sum(row[experts - count :]) for row in counts.counts)
            / (counts.tokens * counts.top_k * layers)
        )
        with closing(loaded(model, draft_dense="none")) as other:
            whole = other.runtime._loaded.arena
            assert whole is not None
            more = runtime.plan.items["draft"]
            assert other.runtime.plan.items["draft"] - more == layers * (experts - count) * (
                whole.layout.nbytes
            )
            for base_slot, number in enumerate(arena.held):
                for name, part in arena.parts.items():
                    assert torch.equal(part[base_slot], whole.parts[name][number])
    assert "nothing was counted" not in caplog.text


def test_where_all_do_not_fit_a_part_may(tiny: Folder, tmp_path: Path) -> None:
    """The first budget that has no room for all of them, beside two slots."""
    model, _ = with_counts(tiny("qwen2_moe"), tmp_path / "model")
    budget, _ = two_slot_budget(model, 64, "float32", 3)
    given: dict[str, Any] = {"draft_length": 3, "dtype": "float32", "profile": "none"}
    given |= {"dense": "raw", "context_length": 64, "reader_threads": 2, "device": "cpu"}
    for choice, held in ((None, None), ("auto", {2, 4})):
        made = Generator.from_pretrained(model, budget - 1, draft_experts=choice, **given)
        with closing(made) as generator:
            residency_plan = generator.runtime.residency_plan
            assert residency_plan.drafts == (held is not None)
            assert residency_plan.draft_experts is None or (
                held and residency_plan.draft_experts in held
            )


def test_plans_count_a_part(tiny_bfloat16: Folder, tmp_path: Path) -> None:
    model, counts = with_counts(tiny_bfloat16("qwen2_moe"), tmp_path / "model")
    given: dict[str, Any] = {"preset": "rtx-4090", "device": "cpu", "context_length": 64}
    layers, experts = counts.num_layers, counts.num_experts

    def drafts(**options: Any) -> dict[str, int | None]:
        """Of raw experts: what drafts hold."""
        made = plan(model, BUDGET, **given, **options)
        raw = [way for way in made.candidates if (way.codec, way.drafter) == ("raw", "int4")]
        return {way.draft_bytes: way.draft_experts for way in raw if not way.encoded}

    (whole,) = drafts()
    layout = Int4Layout(64, 48)
    assert drafts(draft_experts="auto") == {
        whole - layers * fewer * layout.nbytes: kept
        for fewer, kept in ((0, None), (experts // 2, experts // 2), (6, 2))
    }
    assert drafts(draft_experts=1) == {whole - layers * 7 * layout.nbytes: 1}
    path = tmp_path / "counts.json"
    counts.write(path)
    with pytest.raises(SpeqError, match="draft_counts is given without draft_experts"):
        plan(model, BUDGET, draft_counts=path, **given)


def test_residual_experts_have_a_whole_draft(tiny_bfloat16: Folder, tmp_path: Path) -> None:
    """They are read over it, whatever would be the best size of a draft."""
    model, _ = with_counts(tiny_bfloat16("qwen2_moe"), tmp_path / "model")
    with closing(loaded(model, draft_experts="auto", codec="residual")) as generator:
        residency_plan = generator.runtime.residency_plan
        assert residency_plan.drafter == "int4" and residency_plan.draft_experts is None


def test_without_counts_the_first_ones_are_held(
    tiny: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = copied(tiny("qwen3_moe"), tmp_path / "model")
    with caplog.at_level(logging.WARNING), closing(loaded(model, draft_experts=2)) as generator:
        arena = generator.runtime._loaded.arena
        assert arena is not None
        assert (arena.base_slots >= 0).tolist() == [[True] * 2 + [False] * 6] * len(
            arena.base_slots
        )
    assert "nothing was counted of which experts are used most" in caplog.text
    caplog.clear()
    # A file that is named goes before one that is kept.
    path = tmp_path / "counts.json"
    counts_for(model).write(path)
    with closing(loaded(model, draft_experts=2, draft_counts=path)) as generator:
        arena = generator.runtime._loaded.arena
        assert arena is not None
        assert (arena.base_slots >= 0).tolist() == [[False] * 6 + [True] * 2] * len(
            arena.base_slots
        )
    assert "nothing was counted" not in caplog.text
    with pytest.raises(SpeqError, match=r"expert counts .*counts\.json are of this"):
        loaded(tiny("mixtral"), draft_experts=2, draft_counts=path)


# Where they come from


def test_some_are_rounded_and_kept_or_read_out_of_all(tiny: Folder, tmp_path: Path) -> None:
    """The same codes, whatever they come from; only those that are held are rounded."""
    model = copied(tiny("olmoe"), tmp_path / "model")
    with closing(open_model(model)) as opened:
        store, checkpoint = opened.store, opened.checkpoint
        layout = Int4Layout(store.codec.shape.hidden_size, store.codec.shape.expert_width)
        sizes = store.num_layers, store.num_experts
        kept = [[layer, layer + 2] for layer in range(store.num_layers)]

        def filled(kept: list[list[int]] | None, told: Callable[..., None] | None) -> Int4Arena:
            arena = Int4Arena(layout, *sizes, CPU, kept=kept)
            draft_file.load_or_make(arena, checkpoint, store, told)
            return arena

        steps: list[int] = []
        rounded = filled(kept, lambda done, total: steps.append(total))
        assert set(steps) == {2 * store.num_layers + 1}
        (file,) = (model / ".speq").iterdir()
        assert "-some-" in file.name
        again = filled(kept, None)
        filled([[0]] * store.num_layers, None)
        assert len([*(model / ".speq").iterdir()]) == 2
        whole = filled(None, None)
        for each in (model / ".speq").glob("*-some-*"):
            each.unlink()
        out_of_all = filled(kept, None)
        assert len([*(model / ".speq").iterdir()]) == 1
        for name, part in whole.parts.items():
            wanted = part[whole.base_slots.new_tensor(rounded.held)]
            for arena in (rounded, again, out_of_all):
                assert torch.equal(arena.parts[name].view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("draft", ["gptq", "packed"])
def test_sources_bring_those_that_an_arena_holds(draft: str, folders: Folders) -> None:
    cell = Cell(1, "all", "gptq", "packed", codec="residual")
    packed, _ = folders.of("qwen2_moe", cell)
    published = folders.published("qwen2_moe", cell)
    source_of = str(packed) if draft == "packed" else folders.draft("qwen2_moe", cell)
    with closing(open_model(published)) as opened:
        store = opened.store
        source = open_draft(source_of, opened.checkpoint, store, opened.shape.experts)
        with closing(source):
            sizes = store.num_layers, store.num_experts
            kept = [[7, 0]] * store.num_layers
            arena = Int4Arena(source.layout, *sizes, CPU, kept=kept)
            source.fill(arena)
            for base_slot, number in enumerate(arena.held):
                wanted = source.expert(number)
                for name, part in wanted.parts.items():
                    assert torch.equal(arena.parts[name][base_slot], part)


# What is refused


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"draft_experts": "0%"}, "draft_experts is '0%'; it must be a whole number from 0"),
        ({"draft_experts": "half"}, "draft_experts is 'half'; it must be a whole number from 0"),
        (
            {"draft_experts": -1},
            "draft_experts is -1; it must be a whole number from 0, a share such as 50%, or auto",
        ),
        ({"draft_experts": 2, "drafter": "ngram"}, "draft_experts is given and drafter is ngram"),
        ({"draft_experts": 2, "draft": "none"}, "draft_experts is given and draft is none"),
        ({"draft_counts": "counts.json"}, "draft_counts is given without draft_experts"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpeqError, match=sentence):
        RunConfig.of("1GiB", 3, **options)


def test_residual_experts_want_all_codes(folders: Folders) -> None:
    cell = Cell(1, "all", "own", "packed", codec="residual")
    packed, _ = folders.of("qwen2_moe", cell)
    with pytest.raises(SpeqError, match="codec residual are read over the INT4 codes of all"):
        loaded(packed, draft_experts=2)
    published = folders.published("qwen2_moe", cell)
    with pytest.raises(SpeqError, match="draft_experts is 2 and experts of codec residual are"):
        loaded(published, draft_experts=2, codec="residual")
    with pytest.raises(SpeqError, match="draft_experts is 2 and experts of codec residual are"):
        plan(packed, "1GiB", draft_experts="25%", preset="rtx-4090")
    with pytest.raises(SpeqError, match="draft_experts is 9 and a layer has 8 experts"):
        loaded(published, draft_experts=9)
