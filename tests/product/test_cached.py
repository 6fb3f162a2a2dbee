"""Drafts with the experts in slots: beside plain transformers restricted to the same, and what the
supply lends them.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from speq import Generator
from speq.config import RunConfig, SamplingParams
from speq.engine.draft import Draft
from speq.engine.drafter import DraftLimits
from speq.engine.engine import Engine
from speq.engine.request import Request
from speq.engine.request_step import RequestStep
from speq.governor.draft_length import FixedDraftLength
from speq.kernels.decoder_ops import RouterRule
from speq.kernels.ops import Activation
from speq.layers.cached_experts import CachedExperts
from speq.layers.gates import ScoreGate
from speq.layers.route_reader import HostRoutes
from speq.layers.slot_table import HostSlotTable
from speq.measure.probe import verify
from speq.routing import Route
from speq.scheduler.eviction import LruPolicy
from speq.scheduler.expert_cache import ExpertCache
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.transfer import Priority
from speq.stats import Recorder
from tests.helpers.cells import Cell, Folder, Folders, loaded
from tests.helpers.expert_problems import SILU
from tests.helpers.fake_transfer import Clock, FakeTransfer
from tests.helpers.tiny_models import load_plain

PROMPT = [*range(40, 60)]


# Beside plain transformers


def chosen_by_hand(logits: Tensor, allowed: list[int], top_k: int, divided: bool) -> Any:
    """Of softmax routers: weights [T, K] and ids [T, K] among some experts."""
    scores = np.exp(logits.double().numpy())
    scores /= scores.sum(1, keepdims=True)
    ranked = sorted(allowed, key=lambda expert: -scores[0, expert])
    ids = np.array([ranked[:top_k]])
    weights = np.take_along_axis(scores, ids, 1)
    if divided:
        weights /= weights.sum(1, keepdims=True)
    return torch.from_numpy(weights).float(), torch.from_numpy(ids)


@contextmanager
def restricted(plain: Any, residents: list[list[int]], divided: bool) -> Iterator[None]:
    """Within the block a plain model's layers have these experts and no others."""
    routers = [layer.mlp.gate for layer in plain.model.layers if hasattr(layer.mlp, "gate")]
    hooks = []
    for router, allowed in zip(routers, residents, strict=True):

        def choose(module: Any, args: Any, output: Any, allowed: list[int] = allowed) -> Any:
            top_k = min(output[2].shape[1], len(allowed))
            return output[0], *chosen_by_hand(output[0], allowed, top_k, divided)

        hooks.append(router.register_forward_hook(choose))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def drafted(engine: Engine, request: Request, limits: DraftLimits) -> Draft:
    engine.recorder.begin("by hand")
    turn = RequestStep(request, engine.caches[0], engine.drafters[0], limits)
    engine.propose([turn], FixedDraftLength(limits.length, nodes=limits.nodes))
    return turn.draft


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_drafts_are_those_of_the_model_with_the_experts_in_slots(
    family: str, folders: Folders
) -> None:
    """Without prefetching these are the same until the draft ends."""
    cell = Cell(4, "half", "own", drafter="cached")
    plain = load_plain(folders.float32(family))
    divided = bool(plain.config.norm_topk_prob)
    generator, _ = loaded(cell, *folders.of(family, cell), "float32", 64)
    engine = generator.runtime.engine
    request = Request(PROMPT, SamplingParams(max_new_tokens=20, ignore_eos=True))
    engine.prefill(request)
    lacking = 0
    while request.remaining > 5:
        loader = engine.offload.loader
        layers = range(generator.runtime.model.num_moe_layers)
        experts = range(plain.config.num_experts)
        residents = [loader.residents(layer, experts) for layer in layers]
        before = engine.caches[0].length
        draft = drafted(engine, request, DraftLimits(4))
        assert engine.caches[0].length == before
        text = torch.tensor([PROMPT + request.output_token_ids])
        with torch.inference_mode():
            past = plain(text[:, :-1], use_cache=True).past_key_values
            tokens = [request.pending_id]
            with restricted(plain, residents, divided):
                for _ in draft.token_ids:
                    made = plain(torch.tensor([tokens[-1:]]), past_key_values=past, use_cache=True)
                    tokens.append(int(made.logits[0, -1].argmax()))
        assert len(tokens) == 5
        assert draft.token_ids == tokens[1:]
        engine.step([request], 0)
        lacking += draft.token_ids[0] != request.pending_id
    assert lacking
    generator.close()


def test_a_draft_moves_no_bytes_and_names_what_it_lacks(folders: Folders) -> None:
    """Routes are those of all experts: more than lie in two slots."""
    cell = Cell(3, "two slots", "own", drafter="cached")
    generator, _ = loaded(cell, *folders.of("qwen2_moe", cell), "float32", 64)
    engine = generator.runtime.engine
    request = Request(PROMPT, SamplingParams(max_new_tokens=20, ignore_eos=True))
    engine.prefill(request)
    step = engine.recorder.begin("by hand")
    turn = RequestStep(request, engine.caches[0], engine.drafters[0], DraftLimits(3))
    residents = sorted(engine.offload.loader.cache.residents())
    engine.propose([turn], FixedDraftLength(3))
    assert sorted(engine.offload.loader.cache.residents()) == residents
    assert step.moved_bytes == 0
    lookahead, top_k = engine.lookahead, generator.runtime.shape.top_k
    for layer in range(lookahead.num_layers):
        for token in range(3):
            assert len(set(lookahead.expert_ids(token, layer))) == top_k
    # The first layer sees what the exact model's does: its names are the exact ones.
    verify(engine, request.pending_id, Draft())
    assert lookahead.used[0].ids[0] == lookahead.expert_ids(0, 0)
    generator.close()


def test_where_all_is_in_slots_the_draft_is_the_exact_model(tiny: Folder) -> None:
    generator = Generator.from_pretrained(
        tiny("olmoe"), "1GiB", drafter="cached", draft_length=4, dtype="float32"
    )
    generator.generate(PROMPT, max_new_tokens=60, ignore_eos=True)
    loader, shape = generator.runtime.engine.offload.loader, generator.runtime.shape
    for layer in range(len(shape.experts.layers)):
        for expert in range(shape.experts.num_experts):
            loader.load(ExpertKey(layer, expert), Priority.DEMAND)
    for layer in range(len(shape.experts.layers)):
        for _ in loader.serve(layer, [*range(shape.experts.num_experts)]):
            pass
    result = generator.generate(PROMPT, max_new_tokens=60, ignore_eos=True)
    assert result.stats["acceptance_rate"] == 1
    assert result.stats["route_recall"] == 1
    generator.close()


def test_it_takes_no_memory(folders: Folders) -> None:
    """As many slots as without a draft, by the same plan."""
    model = folders.float32("qwen2_moe")

    def items(drafter: str) -> dict[str, int]:
        generator = Generator.from_pretrained(
            model, "1280KiB", drafter=drafter, draft_length=3, dtype="float32", context_length=64
        )
        made = generator.runtime.plan.items
        generator.close()
        return made

    assert items("cached") == items("ngram")


def test_trees_are_for_it_too() -> None:
    config = RunConfig.of("1GiB", drafter="cached", draft_nodes=8)
    assert config.draft_nodes == 8


# The bank by hand


class Lending:
    """A lender that holds certain experts; notes what is lent."""

    def __init__(self, slots: dict[int, int]) -> None:
        self.slots = slots
        self.lent: list[int] = []

    def residents(self, layer: int, experts: Any) -> list[int]:
        return [expert for expert in experts if expert in self.slots]

    @contextmanager
    def lend(self, layer: int, experts: Any) -> Iterator[dict[int, int]]:
        self.lent = [*experts]
        yield {expert: self.slots[expert] for expert in experts}
        self.lent = []


class Scaling:
    """Slot experts of which slot s multiplies its rows by s + 1."""

    def run(
        self,
        layer: int,
        hidden: Tensor,
        grouping: Any,
        slots: dict[int, int],
        table: Tensor,
        activation: Activation,
        outputs: Tensor,
    ) -> None:
        for row, ids in enumerate(grouping.topk_ids.tolist()):
            for at, expert in enumerate(ids):
                assert table[expert] == slots[expert]
                outputs[row, at] = hidden[row] * (slots[expert] + 1)


@pytest.mark.parametrize(
    ("slots", "wanted"),
    [
        # Shares 0.5, 0.25, 0.15, 0.1: the two best of what is there.
        ({0: 6, 1: 2, 2: 0, 3: 1}, (0.5 * 7 + 0.25 * 3) / 0.75),
        ({1: 2, 2: 0, 3: 1}, (0.25 * 3 + 0.15 * 1) / 0.4),
        ({3: 4}, 5.0),
        ({}, 0.0),
    ],
)
def test_rows_choose_among_residents(slots: dict[int, int], wanted: float) -> None:
    lender, gate = Lending(slots), ScoreGate(RouterRule(divided=True))
    told: list[tuple[int, list[list[int]], list[int]]] = []
    table, routes = HostSlotTable(4), HostRoutes()
    backend = CachedExperts(lender, Scaling(), table, routes, [gate] * 3, [SILU] * 3)  # type: ignore[arg-type]
    backend.on_route = lambda layer, route: told.append((layer, route.ids, lender.lent))
    shares = torch.tensor([[0.5, 0.25, 0.15, 0.1]])
    weights, ids = shares.topk(2)
    route = Route(ids, weights / weights.sum(), shares.log())
    hidden = torch.tensor([[1.0, -2.0]])
    made = backend(2, hidden, route)
    assert made.numpy() == pytest.approx((hidden * wanted).numpy(), rel=1e-6)
    # What it would have liked is told while what it reads is kept in place.
    ((layer, named, lent),) = told
    assert (layer, named) == (2, [[0, 1]])
    assert set(lent) == set(sorted(slots)[:2])


# What is lent


def test_what_is_lent_is_not_evicted() -> None:
    """Whatever is asked for meanwhile, and whatever arrives."""
    for seed in range(40):
        rng = random.Random(seed)
        transfer = FakeTransfer(rng)
        loader = ExpertLoader(ExpertCache(4, LruPolicy(4, 1, 12)), transfer, Recorder(Clock()))
        for _ in loader.serve(0, [0, 1, 2, 3]):
            pass
        lent = rng.sample(range(4), rng.randint(1, 4))
        with loader.lend(0, lent) as slots:
            for expert in rng.sample(range(4, 12), 6):
                loader.load(ExpertKey(0, expert), Priority.PREFETCH)
                transfer.end_some()
                loader.residents(0, range(12))
                for each, slot in slots.items():
                    assert transfer.contents[slot] == ExpertKey(0, each)
                    assert slot not in transfer.open_slots
            assert set(lent) <= set(loader.residents(0, range(12)))
        # Then they may go like others.
        for _ in loader.serve(0, [4, 5, 6, 7]):
            pass
        transfer.end_all()
        assert not set(lent) & set(loader.residents(0, range(12)))


def test_lending_is_no_use() -> None:
    """What was brought ahead and only drafted with was not needed yet, nor is it younger."""
    loader = ExpertLoader(ExpertCache(2, LruPolicy(2, 1, 4)), FakeTransfer(), Recorder(Clock()))
    for _ in loader.serve(0, [0, 1]):
        pass
    with loader.lend(0, [0]):
        pass
    loader.load(ExpertKey(0, 2), Priority.DEMAND)
    assert loader.residents(0, range(4)) == [1]


def test_those_that_have_arrived_are_lent() -> None:
    transfer = FakeTransfer(depth=2)
    loader = ExpertLoader(ExpertCache(3, LruPolicy(3, 1, 4)), transfer, Recorder(Clock()))
    for expert in (0, 1):
        loader.load(ExpertKey(0, expert), Priority.PREFETCH)
    assert loader.residents(0, range(4)) == []
    transfer.end(ExpertKey(0, 1))
    assert loader.residents(0, range(4)) == [1]
