"""Recorded passes beside the fused decoder's own, bit for bit."""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from speq.engine.resident_slots import ResidentSlots
from speq.layers.cut_backend import PassedLayer
from speq.models.decoder_recordings import (
    IDLE_PASSES,
    MAX_IN_ALL,
    MAX_RECORDINGS,
    REPEATS,
    ChoiceCut,
)
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel
from speq.models.opened import open_model
from speq.models.packed_batch import SequenceTokens
from speq.models.tree import Tree
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.demand import Budget, demand_of
from speq.planning.model_spec import ModelSpec
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.read_queue import ReaderThreads
from speq.scheduler.transfer import Priority, State, TransferTicket
from tests.helpers.cells import Cell
from tests.helpers.cells import loaded as cell_loaded
from tests.helpers.often import often
from tests.helpers.some_experts import PROMPT, SomeExperts, loaded
from tests.helpers.tiny_models import BY_WALKED, INDEXED, WALKED

PASSES = REPEATS + 3
# Families whose rows attend to a choice of 16 tokens.
CHOOSING = (*INDEXED, "qwen4_exp")
COUNTED = ("route_recall", "acceptance_rate", "steps")


def both(model: MoEModel, backend: SomeExperts, *batch: SequenceTokens) -> tuple[Tensor, Tensor]:
    """Hidden states of a pass as recordings have them, where there is one, and as the decoder
    has them.
    """
    recorded = model.forward(backend, batch)
    recordings, model.recordings = model.recordings, None
    walked = model.forward(backend, batch)
    model.recordings = recordings
    return recorded, walked


def begin(model: MoEModel, cache: KVCache, backend: SomeExperts, count: int = PROMPT) -> None:
    model.forward(backend, [SequenceTokens(cache, [at * 7 % 256 for at in range(count)])])
    cache.advance(count)


def keep_stats(told: list[dict[str, Any]], reason: str, stats: dict[str, Any]) -> None:
    told.append(stats)


def count_of(model: MoEModel, cache: KVCache) -> int:
    assert model.recordings is not None
    return len(model.recordings._by_cache[cache].passes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", WALKED)
@torch.inference_mode()
def test_recorded_passes_are_the_decoders(
    family: str, dtype: torch.dtype, tiny: Callable[[str], Path]
) -> None:
    model, cache = loaded(tiny(family), dtype)
    backend = SomeExperts()
    begin(model, cache, backend)
    for at in range(PASSES):
        for count in (1, 6):
            tokens = [(at * 31 + count * 17 + each * 5) % 256 for each in range(count)]
            recorded, walked = both(model, backend, SequenceTokens(cache, tokens))
            assert torch.equal(recorded, walked)
        cache.advance(1 + at)
    assert count_of(model, cache) == 2


@pytest.mark.parametrize("family", [each for each in WALKED if each in CHOOSING])
@torch.inference_mode()
def test_one_recording_chooses_below_and_above(family: str, tiny: Callable[[str], Path]) -> None:
    """Trees of contexts all of which is chosen, and of longer ones."""
    model, cache = loaded(tiny(family), torch.float32)
    backend = SomeExperts()
    begin(model, cache, backend, 5)
    for at in range(20):
        tokens = SequenceTokens(cache, [at, 5, 7 * at, 9], Tree.of([0, at % 2, 1]))
        recorded, walked = both(model, backend, tokens)
        assert torch.equal(recorded, walked)
        cache.advance(1)
    assert count_of(model, cache) == 1


@pytest.mark.parametrize("family", [each for each in WALKED if each in CHOOSING])
@torch.inference_mode()
def test_choices_in_recordings_are_planned(family: str, tiny: Callable[[str], Path]) -> None:
    """A byte for each row and each token of the cache, in as many recordings as there may be."""
    model, cache = loaded(tiny(family), torch.float32)
    backend = SomeExperts()
    begin(model, cache, backend)
    counts = (1, 4, 9)
    for count in counts * PASSES:
        model.forward(backend, [SequenceTokens(cache, [*range(count)])])
    assert model.recordings is not None
    made = model.recordings._by_cache[cache].passes.values()
    located = [each for recorded, _ in made for each in recorded.sequences]
    cuts = [each for of in located for each in of.layers if isinstance(each, ChoiceCut)]
    held = {each._chosen.data_ptr(): each._chosen.nbytes for each in cuts}
    assert sorted(held.values()) == [count * cache.capacity for count in counts]

    opened = open_model(tiny(family))
    model_spec = ModelSpec.of_model("tiny", opened, "float32")
    opened.close()
    shape = model_spec.shape
    attention = replace(shape.attention, kv_shapes=shape.attention.kv_shapes[:2], by_layer=())
    unindexed = replace(model_spec, shape=replace(shape, attention=attention))
    plan = ResidencyPlan("raw", "none", 1 << 14, 1 << 14, 1 << 14)
    budget = Budget(1 << 30, cache.capacity, on_cpu=True, longest_side=counts[-1] - 1)
    planned, without = (
        demand_of(each, plan, budget).workspace(16, cache.capacity)
        for each in (model_spec, unindexed)
    )
    assert planned - without == MAX_IN_ALL * max(held.values())


@torch.inference_mode()
def test_results_of_a_pass_are_not_the_next_ones(tiny: Callable[[str], Path]) -> None:
    model, cache = loaded(tiny("qwen3_moe"), torch.float32)
    backend = SomeExperts()
    begin(model, cache, backend)
    passes = [model.forward(backend, [SequenceTokens(cache, [at])]) for at in range(8)]
    assert len({tuple(each.flatten().tolist()) for each in passes}) == 8


@torch.inference_mode()
def test_features_of_recorded_passes(tiny: Callable[[str], Path]) -> None:
    model, cache = loaded(tiny("qwen3_moe"), torch.float32)
    model.capture_hidden_states((0, 2))
    backend = SomeExperts()
    begin(model, cache, backend)
    for at in range(PASSES):
        tokens = SequenceTokens(cache, [at, at + 1, 3 * at])
        features = []
        for recordings in (model.recordings, None):
            kept, model.recordings = model.recordings, recordings
            features.append(model.features(model.forward(backend, [tokens])[0]))
            model.recordings = kept
        assert features[0].shape == (3, 128)
        assert torch.equal(*features)
    assert count_of(model, cache) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", BY_WALKED)
@torch.inference_mode()
def test_trees_and_batches(family: str, dtype: torch.dtype, tiny: Callable[[str], Path]) -> None:
    """Trees of one size that branch elsewhere each time, and sequences that grow apart."""
    model, cache = loaded(tiny(family), dtype)
    opened = open_model(tiny(family))
    other = opened.shape.cache(64, dtype, model.device)
    opened.close()
    backend = SomeExperts()
    begin(model, cache, backend)
    begin(model, other, backend, 5)
    for at in range(PASSES):
        tokens = [(at * 31 + each * 5) % 256 for each in range(4)]
        tree = Tree.of([0, at % 2, (at // 2) % 3])
        several = SequenceTokens(cache, tokens, tree), SequenceTokens(other, tokens[:2])
        for batch in (several[:1], several, several[::-1], [SequenceTokens(other, tokens, tree)]):
            recorded, walked = both(model, backend, *batch)
            assert torch.equal(recorded, walked)
        cache.advance(1)
        other.advance(2)
    assert count_of(model, cache) == count_of(model, other) == 2


@torch.inference_mode()
def test_recordings_that_are_not_used_go(tiny: Callable[[str], Path]) -> None:
    model, cache = loaded(tiny("qwen3_moe"), torch.float32)
    backend = SomeExperts()
    begin(model, cache, backend)

    def run(count: int, times: int) -> None:
        for _ in range(times):
            recorded, walked = both(model, backend, SequenceTokens(cache, [5] * count))
            assert torch.equal(recorded, walked)

    def recorded_counts() -> list[int]:
        assert model.recordings is not None
        shapes = model.recordings._by_cache[cache].passes
        return [sequence.tokens for _, (sequence,) in shapes]

    for count in range(1, MAX_RECORDINGS + 2):
        run(count, REPEATS + 1)
    assert recorded_counts() == [*range(1, MAX_RECORDINGS + 1)]
    run(2, IDLE_PASSES)
    run(MAX_RECORDINGS + 1, 1)
    assert recorded_counts() == [*range(3, MAX_RECORDINGS + 1), 2, MAX_RECORDINGS + 1]


@torch.inference_mode()
def test_caches_share_room_for_recordings(tiny: Callable[[str], Path]) -> None:
    model, cache = loaded(tiny("qwen3_moe"), torch.float32)
    opened = open_model(tiny("qwen3_moe"))
    caches = [cache, *(opened.shape.cache(64, torch.float32, model.device) for _ in range(3))]
    opened.close()
    backend = SomeExperts()
    for each in caches:
        begin(model, each, backend)

    def counts() -> list[int]:
        assert model.recordings is not None
        held = model.recordings._by_cache
        return [len(held[each].passes) for each in caches if each in held]

    for each in caches:
        for count in range(1, MAX_RECORDINGS):
            for _ in range(REPEATS + 1):
                recorded, walked = both(model, backend, SequenceTokens(each, [7] * count))
                assert torch.equal(recorded, walked)
    assert sum(counts()) == MAX_IN_ALL
    # Those of the first cache have not run for long.
    for _ in range(IDLE_PASSES):
        model.forward(backend, [SequenceTokens(caches[1], [7])])
    before = counts()
    for _ in range(REPEATS + 1):
        model.forward(backend, [SequenceTokens(caches[3], [7] * 20)])
    assert sum(counts()) == MAX_IN_ALL
    assert counts()[0] == before[0] - 1
    assert counts()[3] == before[3] + 1


@torch.inference_mode()
def test_recordings_are_freed_with_their_cache(tiny: Callable[[str], Path]) -> None:
    """Without a search for cycles: the memory of a cache is wanted at once."""
    model, cache = loaded(tiny("mixtral"), torch.float32)
    backend = SomeExperts()
    gc.collect()
    gc.disable()
    try:
        begin(model, cache, backend)
        for at in range(PASSES):
            model.forward(backend, [SequenceTokens(cache, [at])])
        assert count_of(model, cache) == 1
        seen, keys = ref(cache), ref(cache.layers[0].keys)
        del cache
        assert seen() is None
        assert keys() is None
    finally:
        gc.enable()


@torch.inference_mode()
def test_a_pass_that_the_host_reads_stays_with_the_decoder(
    tiny: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    model, cache = loaded(tiny("qwen3_moe"), torch.float32)
    norm: Any = model.body.norm
    own = norm.forward

    def forward(hidden: Tensor, *others: Tensor) -> Any:
        made = own(hidden, *others)
        float(hidden.sum())
        return made

    norm.forward = forward
    backend = SomeExperts()
    begin(model, cache, backend)
    with caplog.at_level(logging.DEBUG, "speq"):
        for at in range(PASSES):
            recorded, walked = both(model, backend, SequenceTokens(cache, [at]))
            assert torch.equal(recorded, walked)
    assert count_of(model, cache) == 0
    reasons = [each for each in caplog.messages if "module by module" in each]
    assert reasons == ["passes run module by module: the host reads the result of item"]


@pytest.mark.parametrize("draft_length", [0, 3])
@pytest.mark.parametrize("budget", often(["half", "all"], quick=1, wide=1))
@pytest.mark.parametrize(
    "family",
    [
        *("gpt_oss", "deepseek_v2"),
        *(pytest.param(each, marks=pytest.mark.wide) for each in ("qwen2_moe", "qwen3_moe")),
    ],
)
def test_runs_by_recordings_are_runs_without(
    family: str, budget: str, draft_length: int, tiny: Callable[[str], Path]
) -> None:
    """Tokens, log-probabilities to the last bit, and what was counted."""
    found = []
    for graphs in ("none", "auto"):
        cell = Cell(draft_length, budget, "own", prefetch="none", graphs=graphs)
        generator, _ = cell_loaded(cell, tiny(family), "auto", "float32", 64)
        told: list[dict[str, Any]] = []
        keep = partial(keep_stats, told)
        tokens = [
            (token.id, token.logprobs)
            for _ in range(2)
            for token in generator.stream(
                [5, 6, 7, 8],
                max_new_tokens=40,
                ignore_eos=True,
                top_logprobs=2,
                on_finish=keep,
            )
        ]
        recordings = generator.runtime.model.recordings
        assert (recordings is not None) == (graphs == "auto")
        assert recordings is None or recordings._why_not is None
        # What has arrived when it is asked for depends on the disk, unless all of it has.
        hits = told[1]["hit_rate"] if budget == "all" else None
        counted = [{name: stats[name] for name in COUNTED} for stats in told]
        found.append((tokens, counted, hits))
        generator.close()
    assert found[0] == found[1]


def read_at_once(
    self: ReaderThreads, key: ExpertKey, slot: int, priority: Priority
) -> TransferTicket:
    """What has arrived when it is asked for depends on the disk otherwise."""
    ticket = TransferTicket(key, slot, priority)
    ticket.state = State.RUNNING
    self._queue.running[id(ticket)] = ticket
    self._queue.read(ticket, reader=0)
    return ticket


@pytest.mark.parametrize("prefetch", ["none", "three-phase"])
@pytest.mark.parametrize("policy", ["lru", "lfu", "lookahead"])
def test_layers_of_residents_pass_without_the_host(
    policy: str, prefetch: str, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over slots that experts leave: its tokens, and on demand its hits and its bytes, are
    those of a run whose layers are all served.
    """
    passed: list[int] = []
    note = ResidentSlots.passed

    def noted(self: ResidentSlots, layers: Sequence[PassedLayer]) -> None:
        passed.extend(each.layer for each in layers)
        note(self, layers)

    monkeypatch.setattr(ResidentSlots, "passed", noted)
    monkeypatch.setattr(ReaderThreads, "submit", read_at_once)
    found = []
    for graphs in ("none", "auto"):
        cell = Cell(0, "half", "own", readers=1, cache_policy=policy, graphs=graphs)
        cell = replace(cell, prefetch=prefetch)
        generator, _ = cell_loaded(cell, tiny("qwen3_moe"), "auto", "float32", 96)
        told = []
        for start in (5, 90):
            result = generator.generate([start, 6, 7], max_new_tokens=60, ignore_eos=True)
            counted = ("hit_rate", "moved_bytes") if prefetch == "none" else ()
            told.append((result.token_ids, {name: result.stats[name] for name in counted}))
        assert generator.runtime.engine.offload.loader.cache.policy.keeps_all is False
        generator.close()
        assert bool(passed) == (graphs == "auto")
        found.append(told)
    assert found[0] == found[1]
    layers = generator.runtime.opened.store.num_layers
    assert 0 < len(passed) < 2 * 60 * layers
