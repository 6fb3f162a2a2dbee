"""Eviction by the next use, against LRU and against the best that any policy could do."""

import math
import random
from functools import cache

import numpy as np
import pytest

from speq.scheduler import eviction
from speq.scheduler.eviction import (
    DARING,
    JUDGED,
    LEAST,
    RECENCIES,
    EvictionPolicy,
    LookaheadPolicy,
    LruPolicy,
)
from speq.scheduler.expert_cache import ExpertCache
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.transfer import Priority
from speq.stats import Recorder
from tests.helpers.fake_transfer import FakeTransfer

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
    loader = ExpertLoader(ExpertCache(slots, policy), transfer, Recorder())
    for layer, experts in trace:
        served = [expert for wave in loader.serve(layer, experts) for expert in wave]
        assert sorted(served) == experts
    return len(transfer.asked)


class Knowing(LookaheadPolicy):
    """As soon as a layer was visited, its next visit is foretold: over two passes, all that comes.

    What is not yet foretold then belongs to layers of which nothing is resident.
    """

    def __init__(self, slots: int, layers: int, experts: int, trace: Trace) -> None:
        super().__init__(slots, layers, experts)
        self._trace = [[wanted for at, wanted in trace if at == layer] for layer in range(layers)]
        for layer in range(layers):
            self._foretell_next(layer)

    def visit(self, layer: int, experts: list[int]) -> None:
        super().visit(layer, experts)
        self._foretell_next(layer)

    def _foretell_next(self, layer: int) -> None:
        if self._trace[layer]:
            self.hint_next_use(layer, self._trace[layer].pop(0), 1.0)


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
    for _ in range(300):
        layers, experts = rng.choice([(1, 5), (2, 4), (3, 3)])
        slots = rng.randint(2, 5)
        trace = random_trace(rng, layers, experts, passes=2, most=2)
        best = fewest_loads(slots, trace)
        assert loads(Knowing(slots, layers, experts, trace), slots, trace) == best
        differ += loads(LruPolicy(slots, layers, 8), slots, trace) > best
    assert differ > 30  # cases in which it matters who goes


def test_what_is_foretold_saves_moves_over_lru() -> None:
    """Where a layer's share of LRU holds a visit. With less, LRU lets experts pass one by one
    through a single slot, which keeps others and has but one read under way at a time.
    """
    rng = random.Random(2)
    total = {"lru": 0, "lookahead": 0}
    for _ in range(300):
        layers, experts = rng.randint(1, 4), rng.randint(3, 9)
        most = rng.randint(1, 3)
        slots = rng.randint(layers * most, layers * (most + 1))
        trace = random_trace(rng, layers, experts, passes=12, most=most)
        total["lru"] += loads(LruPolicy(slots, layers, experts), slots, trace)
        total["lookahead"] += loads(Knowing(slots, layers, experts, trace), slots, trace)
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


def texts(rng: random.Random, changing: bool) -> Trace:
    """Tokens of six texts in four layers: each chooses three of 32 experts at most, nine times of
    ten one of six that its text prefers, or of six that all texts do.
    """
    trace: Trace = []
    preferred = [rng.sample(range(32), 6) for _ in range(4)]
    for _ in range(6):
        if changing:
            preferred = [rng.sample(range(32), 6) for _ in range(4)]
        for _ in range(40):
            for layer in range(4):
                others = rng.sample(range(32), 3)
                wanted = [
                    rng.choice(preferred[layer]) if rng.random() < 0.9 else other
                    for other in others
                ]
                trace.append((layer, sorted(set(wanted))))
    return trace


@pytest.mark.parametrize("changing", [True, False])
def test_it_forgets_as_fast_as_pays(changing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts with experts of their own and of those that have the same, it misses little more
    than by the better of the slowest and the fastest mean.
    """
    trace = texts(random.Random(6), changing)
    found = {}
    for recencies in (RECENCIES, RECENCIES[:1], RECENCIES[-1:]):
        monkeypatch.setattr(eviction, "RECENCIES", recencies)
        monkeypatch.setattr(eviction, "KEPT", 1 - np.array(recencies))
        found[recencies] = loads(LookaheadPolicy(32, 4, 32), 32, trace)
    slow, fast = found[RECENCIES[:1]], found[RECENCIES[-1:]]
    assert (fast < 0.8 * slow) if changing else (slow < 0.95 * fast)
    assert found[RECENCIES] < 1.1 * min(slow, fast)


def order(policy: LookaheadPolicy, layer: int | None = None) -> list[tuple[int, int]]:
    return [tuple(key) for key in policy.candidates(layer)]


def test_who_goes_first() -> None:
    policy = LookaheadPolicy(8, 3, 4)
    for key in [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2)]:
        policy.touch(ExpertKey(*key))
    for _ in range(2):
        policy.visit(0, [1])
    # Equally likely ones go by their layers: layer 1 is next, layer 0 was just visited. What its
    # visits wanted is likelier than the rest: it is expected before layer 2's.
    assert order(policy) == [(0, 2), (2, 1), (0, 1), (1, 1), (1, 2)]
    policy.hint_next_use(2, [1, 3])
    policy.hint_next_use(1, [2])
    # Foretold ones stay, the sooner the surer.
    assert order(policy)[-2:] == [(2, 1), (1, 2)]
    assert order(policy, layer=1) == [(1, 1), (1, 2)]
    policy.visit(1, [2])
    policy.visit(2, [0])
    # Its visit is past, foretold or not.
    assert order(policy)[0] == (2, 1)
    policy.forget(ExpertKey(2, 1))
    assert (2, 1) not in order(policy)


def test_a_prefetch_evicts_nobody_who_is_wanted_in_this_pass() -> None:
    policy = LookaheadPolicy(4, 4, 4)
    loader = ExpertLoader(ExpertCache(4, policy), FakeTransfer(), Recorder())
    for layer in (0, 1, 2, 3):
        list(loader.serve(layer, [0]))
    for layer in (0, 1, 2):
        policy.hint_next_use(layer, [0, 1])
    # Layer 3 is not foretold: its expert makes room.
    assert loader.load(ExpertKey(1, 1), Priority.PREFETCH)
    assert ExpertKey(3, 0) not in loader.cache
    # Those of layers 0 to 2 are all wanted, also by layers behind the one that asks.
    assert not loader.load(ExpertKey(3, 1), Priority.PREFETCH)
    assert not loader.load(ExpertKey(0, 1), Priority.PREFETCH)
    assert all(ExpertKey(layer, 0) in loader.cache for layer in (0, 1, 2))
    # Once layer 0 has passed, it can spare what it had.
    list(loader.serve(0, [0]))
    assert loader.load(ExpertKey(2, 1), Priority.PREFETCH)
    assert ExpertKey(0, 0) not in loader.cache
    # On demand, whoever is needed last goes, wanted or not.
    list(loader.serve(1, [0, 1, 2]))


class Stated:
    """What `_eviction_candidates` says, told step by step from its description: who is resident,
    what the next visit of each layer wants as far as was foretold, how often a row chose each
    expert, by the mean that would have missed least, and how many rows this pass and the next ones
    have.
    """

    def __init__(self, slots: int, layers: int, experts: int) -> None:
        self.layers, self.experts = layers, experts
        self.share = min(max(slots // layers, 1), experts)
        keys = [ExpertKey(at, e) for at in range(layers) for e in range(experts)]
        self.means = {recency: dict.fromkeys(keys, 1 / experts) for recency in RECENCIES}
        self.missed = dict.fromkeys(RECENCIES, 0.0)
        self.resident: set[ExpertKey] = set()
        self.wanted: set[ExpertKey] = set()
        self.known = dict.fromkeys(range(layers), 0.0)
        self.at = layers - 1
        self.rows = self.rows_after = 1

    def visit(self, layer: int, chosen: list[list[int]], rows_after: int) -> None:
        self.at = layer
        self.rows, self.rows_after = len(chosen), rows_after
        self.known[layer] = 0.0
        self.wanted = {key for key in self.wanted if key.layer != layer}
        share = {
            ExpertKey(layer, expert): sum(expert in row for row in chosen) / len(chosen)
            for expert in range(self.experts)
        }
        for recency, mean in self.means.items():
            likeliest = sorted((mean[key] for key in share), reverse=True)[: self.share]
            missed = sum(share[key] for key in share if mean[key] < likeliest[-1])
            self.missed[recency] = (1 - JUDGED) * self.missed[recency] + JUDGED * missed
            old = (1 - recency) ** len(chosen)
            mean.update({key: old * mean[key] + (1 - old) * share[key] for key in share})

    @property
    def probability(self) -> dict[ExpertKey, float]:
        return self.means[min(RECENCIES, key=self.missed.__getitem__)]

    def hint_next_use(self, layer: int, experts: list[int], known: float) -> None:
        self.known[layer] = known
        self.wanted |= {ExpertKey(layer, expert) for expert in experts}

    def needed(self, key: ExpertKey) -> float:
        """In how many visits of any layer: for what is wanted in this pass, the time after."""
        turns = (key.layer - self.at - 1) % self.layers + 1
        known = 1.0 if key in self.wanted else self.known[key.layer]

        def used(rows: int) -> float:
            return 1 - (1 - max(self.probability[key], LEAST)) ** rows

        at_next_visit = used(self.rows if key.layer > self.at else self.rows_after) * (1 - known)
        # Visits until one that uses it are geometrically distributed.
        return turns + self.layers * (1 - at_next_visit) / used(self.rows_after)

    def doomed(self) -> list[ExpertKey]:
        """Of all that are there or still come, those needed last: as many as come, times DARING,
        and one. Of them, who is there and not wanted in this pass.
        """
        coming = len(self.wanted - self.resident)
        last = sorted(sorted(self.resident | self.wanted), key=self.needed, reverse=True)
        last = last[: 1 + math.ceil(DARING * coming)]
        return [key for key in last if key not in self.wanted]


def test_whom_a_prefetch_may_evict_is_as_stated() -> None:
    rng = random.Random(4)
    some, none, held_back = 0, 0, 0
    for _ in range(60):
        layers, experts = rng.randint(1, 4), rng.randint(2, 6)
        policy, stated = LookaheadPolicy(9, layers, experts), Stated(9, layers, experts)
        everyone = sorted(stated.probability)
        at = 0
        for _ in range(60):
            turn = rng.random()
            if turn < 0.35:
                rows, top_k = rng.choice([1, 1, 2, 40]), rng.randint(1, experts)
                chosen = [rng.sample(range(experts), top_k) for _ in range(rows)]
                wanted = sorted({expert for row in chosen for expert in row})
                rows_after = rng.choice([rows, 1, 3])
                policy.observe(at, np.array(chosen), np.ones((rows, top_k), np.float32))
                if rows_after != rows:
                    policy.expect(rows_after)
                policy.visit(at, wanted)
                stated.visit(at, chosen, rows_after)
                at = (at + 1) % layers
            elif turn < 0.6:
                layer, known = rng.randrange(layers), rng.choice([0.0, 0.25, 0.5, 1.0])
                told = rng.sample(range(experts), rng.randint(0, min(2, experts)))
                policy.hint_next_use(layer, told, known)
                stated.hint_next_use(layer, told, known)
            elif turn < 0.9:
                key = rng.choice(everyone)
                policy.touch(key)
                stated.resident.add(key)
            elif stated.resident:
                key = rng.choice(sorted(stated.resident))
                policy.forget(key)
                stated.resident.remove(key)
            doomed = stated.doomed()
            assert list(policy.candidates(None, ahead=True)) == doomed
            assert stated.wanted.isdisjoint(doomed)
            some += bool(doomed)
            none += not doomed
            held_back += len(doomed) < len(stated.resident - stated.wanted)
    assert min(some, none, held_back) > 200


def test_prefetches_leave_what_this_pass_wants() -> None:
    """Random foretold passes, prefetched in any order over a full cache."""
    rng = random.Random(5)
    evicted, refused = 0, 0
    for _ in range(150):
        layers, experts = rng.randint(2, 4), rng.randint(3, 7)
        slots = rng.randint(layers, layers * experts - 2)
        policy = LookaheadPolicy(slots, layers, experts)
        cache = ExpertCache(slots, policy)
        transfer = FakeTransfer()
        loader = ExpertLoader(cache, transfer, Recorder())
        for layer, experts_of in random_trace(rng, layers, experts, passes=4, most=3):
            list(loader.serve(layer, experts_of))
        told = {ExpertKey(rng.randrange(layers), rng.randrange(experts)) for _ in range(6)}
        for key in told:
            policy.hint_next_use(key.layer, [key.expert], rng.random())
        kept = {key for key in told if key in cache}
        everyone = [ExpertKey(layer, e) for layer in range(layers) for e in range(experts)]
        before = len(cache)
        missing = [key for key in told if key not in cache]
        others = [key for key in everyone if key not in told and key not in cache]
        for key in [*missing, *rng.sample(others, min(3, len(others)))]:
            refused += not loader.load(key, Priority.PREFETCH)
        assert all(key in cache for key in kept)
        evicted += before - len(cache)
    assert min(evicted, refused) > 100


def test_with_nothing_to_come_a_prefetch_evicts_only_who_is_needed_last() -> None:
    policy = LookaheadPolicy(3, 1, 6)
    for expert in (0, 1, 2):
        policy.touch(ExpertKey(0, expert))
    policy.visit(0, [0, 1])
    policy.visit(0, [1])
    assert list(policy.candidates(0, ahead=True)) == [ExpertKey(0, 2)]
    policy.hint_next_use(0, [2])
    # 2 would be needed last, and is wanted: nobody else goes in its stead.
    assert list(policy.candidates(0, ahead=True)) == []
    policy.hint_next_use(0, [5])
    # One comes: ceil(1.75) and one, of 5, 2, 0 and 1, that are needed last in this order.
    assert list(policy.candidates(0, ahead=True)) == [ExpertKey(0, 0)]


@pytest.mark.parametrize("slots", [3, 6])
def test_shares_do_not_bind_a_layer(slots: int) -> None:
    policy = LookaheadPolicy(slots, 3, 9)
    loader = ExpertLoader(ExpertCache(slots, policy), FakeTransfer(), Recorder())
    list(loader.serve(0, list(range(slots))))
    assert all(ExpertKey(0, expert) in loader.cache for expert in range(slots))


def test_many_tokens_say_more_than_one() -> None:
    """Expert 0 is chosen by a visit of eight tokens, and 1 by the four visits of one before it."""
    ids = np.zeros((8, 1), dtype=np.int64)
    policy = LookaheadPolicy(2, 1, 4)
    for expert in (0, 1):
        policy.touch(ExpertKey(0, expert))
    for _ in range(4):
        policy.observe(0, ids[:1] + 1, ids[:1] + 1.0)
        policy.visit(0, [1])
    assert order(policy) == [(0, 0), (0, 1)]
    policy.observe(0, ids, ids + 1.0)
    policy.visit(0, [0])
    # 1 - 0.97^4 is 0.11, less a fifth for the eight tokens since, and 1 - 0.97^8 is 0.22.
    assert order(policy) == [(0, 1), (0, 0)]


def test_a_prompt_counts_by_the_rows_that_chose() -> None:
    """All four are chosen by a prompt; the decode steps behind it want what most rows chose."""
    chosen = np.array([[0, 1], [0, 2], [0, 1], [0, 3], [1, 0], [0, 2], [1, 2], [0, 1]])
    policy = LookaheadPolicy(4, 1, 4)
    for expert in range(4):
        policy.touch(ExpertKey(0, expert))
    policy.observe(0, chosen, np.ones(chosen.shape, np.float32))
    policy.expect(1)
    policy.visit(0, [0, 1, 2, 3])
    assert order(policy) == [(0, 3), (0, 2), (0, 1), (0, 0)]


def test_a_prompt_keeps_what_its_later_layers_will_want() -> None:
    """Residents that one token seldom wants, and nearly every chunk does."""
    chosen = np.array([[0, 1]] * 50 + [[2, 3]] * 50)
    policy = LookaheadPolicy(8, 2, 4)
    for layer in range(2):
        policy.touch(ExpertKey(layer, 0))
        policy.touch(ExpertKey(layer, 3))
    policy.observe(0, chosen, np.ones(chosen.shape, np.float32))
    policy.expect(1)
    policy.visit(0, [0, 1, 2, 3])
    # Layer 1 is still to come in this pass; layer 0 has only single tokens before it.
    assert [layer for layer, _ in order(policy)] == [0, 0, 1, 1]
