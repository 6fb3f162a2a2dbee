"""Eviction by the next use, against LRU and against the best that any policy could do."""

import random
from functools import cache

import pytest

from speq.scheduler.expert_cache import EvictionPolicy, ExpertCache, ExpertKey
from speq.scheduler.lookahead_policy import LookaheadPolicy
from speq.scheduler.policies import LruPolicy
from speq.scheduler.supply import ExpertSupply
from speq.scheduler.transfer import Priority
from speq.stats import Recorder
from tests.fake_transfer import FakeTransfer

Trace = list[tuple[int, list[int]]]


def random_trace(rng: random.Random, layers: int, experts: int, passes: int, most: int) -> Trace:
    """Layers in turn; some experts are more wanted than others, and tastes change."""
    weights = [[rng.random() ** 3 + 0.01 for _ in range(experts)] for _ in range(layers)]
    trace = []
    for _ in range(passes):
        for layer in range(layers):
            if rng.random() < 0.1:
                rng.shuffle(weights[layer])
            wanted = set(rng.choices(range(experts), weights[layer], k=rng.randint(1, most)))
            trace.append((layer, sorted(wanted)))
    return trace


def loads(policy: EvictionPolicy, slots: int, trace: Trace) -> int:
    """Experts that serving a trace on demand brings into slots."""
    transfer = FakeTransfer()
    supply = ExpertSupply(ExpertCache(slots, policy), transfer, Recorder())
    for layer, experts in trace:
        served = [expert for wave in supply.serve(layer, experts) for expert in wave]
        assert sorted(served) == experts
    return len(transfer.asked)


def knowing(slots: int, layers: int, experts: int, trace: Trace) -> LookaheadPolicy:
    policy = LookaheadPolicy(slots, layers, experts)
    for layer, wanted in trace:
        policy.foresee(layer, wanted)
    return policy


def fewest_loads(slots: int, trace: Trace) -> int:
    """The least that any choice of victims needs, by trying all."""
    visits = [frozenset(ExpertKey(layer, e) for e in experts) for layer, experts in trace]

    @cache
    def rest(at: int, held: frozenset[ExpertKey]) -> int:
        if at == len(visits):
            return 0
        wanted = visits[at]
        missing = len(wanted - held)
        kept = sorted(held - wanted)
        room = slots - len(wanted)
        best = None
        for mask in range(1 << len(kept)):
            keep = frozenset(key for i, key in enumerate(kept) if mask >> i & 1)
            # Throwing away what there is room for never helps.
            if len(keep) == min(room, len(kept)):
                found = rest(at + 1, keep | wanted)
                best = found if best is None else min(best, found)
        assert best is not None
        return missing + best

    return rest(0, frozenset())


def test_with_a_known_future_nothing_does_better() -> None:
    rng = random.Random(1)
    differ = 0
    for _ in range(150):
        layers, experts = rng.choice([(1, 5), (2, 4), (3, 3)])
        slots = rng.randint(2, 5)
        trace = random_trace(rng, layers, experts, passes=9 // layers, most=2)
        best = fewest_loads(slots, trace)
        assert loads(knowing(slots, layers, experts, trace), slots, trace) == best
        differ += loads(LruPolicy(slots, layers), slots, trace) > best
    assert differ > 30  # cases in which it matters who goes


def test_with_a_known_future_it_never_moves_more_than_lru() -> None:
    """Where a layer's share of LRU holds a visit. With less, LRU lets experts pass one by one
    through a single slot, which keeps others and has but one read under way at a time.
    """
    rng = random.Random(2)
    total = {"lru": 0, "lookahead": 0}
    for _ in range(1000):
        layers, experts = rng.randint(1, 4), rng.randint(3, 9)
        most = rng.randint(1, 3)
        slots = rng.randint(layers * most, layers * experts)
        trace = random_trace(rng, layers, experts, passes=12, most=most)
        lru = loads(LruPolicy(slots, layers), slots, trace)
        known = loads(knowing(slots, layers, experts, trace), slots, trace)
        assert known <= lru
        total["lru"] += lru
        total["lookahead"] += known
    assert total["lookahead"] < 0.95 * total["lru"]


def test_without_any_knowledge_every_trace_is_served() -> None:
    rng = random.Random(3)
    for _ in range(100):
        layers, experts, slots = rng.randint(1, 4), rng.randint(3, 9), rng.randint(1, 12)
        trace = random_trace(rng, layers, experts, passes=12, most=3)
        distinct = {(layer, expert) for layer, wanted in trace for expert in wanted}
        asked = loads(LookaheadPolicy(slots, layers, experts), slots, trace)
        assert asked >= len(distinct)
        if slots >= len(distinct):
            assert asked == len(distinct)


def order(policy: LookaheadPolicy, layer: int | None = None) -> list[tuple[int, int]]:
    return [tuple(key) for key in policy.candidates(layer)]


def test_who_goes_first() -> None:
    policy = LookaheadPolicy(8, 3, 4)
    for key in [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2)]:
        policy.touch(ExpertKey(*key))
    policy.visit(0, [1])
    # Equally likely ones go by their layers: layer 1 is next, layer 0 was just visited. What a
    # visit just wanted is likelier than the rest, and here that counts for more.
    assert order(policy) == [(0, 2), (2, 1), (1, 1), (1, 2), (0, 1)]
    policy.foretell(2, [1, 3])
    policy.foretell(1, [2])
    # Foretold ones stay, the sooner the surer.
    assert order(policy)[-2:] == [(2, 1), (1, 2)]
    assert order(policy, layer=1) == [(1, 1), (1, 2)]
    policy.visit(1, [2])
    policy.visit(2, [0])
    # Its visit is past, foretold or not.
    assert order(policy)[0] == (2, 1)
    policy.forget(ExpertKey(2, 1))
    assert (2, 1) not in order(policy)


def test_a_prefetch_evicts_nobody_who_is_needed_sooner() -> None:
    policy = LookaheadPolicy(4, 4, 4)
    supply = ExpertSupply(ExpertCache(4, policy), FakeTransfer(), Recorder())
    for layer in (0, 1, 2, 3):
        list(supply.serve(layer, [0]))
    for layer in (0, 1, 2):
        policy.foretell(layer, [0, 1])
    # Layer 3 is not foretold: its expert makes room for the nearest need.
    assert supply.load(ExpertKey(1, 1), Priority.PREFETCH)
    assert ExpertKey(3, 0) not in supply.cache
    # Those of layers 0 to 2 are needed before what layer 3 might want ...
    assert not supply.load(ExpertKey(3, 1), Priority.PREFETCH)
    # ... and layer 0 may take the place of what layer 2 needs later.
    assert supply.load(ExpertKey(0, 1), Priority.PREFETCH)
    assert ExpertKey(2, 0) not in supply.cache
    assert {ExpertKey(0, 0), ExpertKey(1, 0)} <= {
        key for layer in range(3) if (key := ExpertKey(layer, 0)) in supply.cache
    }


@pytest.mark.parametrize("slots", [3, 6])
def test_shares_do_not_bind_a_layer(slots: int) -> None:
    policy = LookaheadPolicy(slots, 3, 9)
    supply = ExpertSupply(ExpertCache(slots, policy), FakeTransfer(), Recorder())
    list(supply.serve(0, list(range(slots))))
    assert all(ExpertKey(0, expert) in supply.cache for expert in range(slots))
