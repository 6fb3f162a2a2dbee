"""Slots, eviction and fetching, on transfers and a clock that move when told to."""

import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable

import pytest
import torch

from speq.routing import Route
from speq.scheduler.eviction import LruPolicy
from speq.scheduler.expert_cache import ExpertCache
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.prefetch import OnDemand
from speq.scheduler.transfer import Fetch, Priority
from speq.stats import Recorder
from tests.helpers.fake_transfer import Clock, FakeTransfer

# (slots, layers, experts): roomy, tight, exactly one each, and fewer slots than layers.
SIZES = [(12, 3, 8), (7, 3, 5), (4, 4, 3), (3, 5, 4), (1, 4, 3), (40, 2, 6)]


class ModelCache:
    """The same cache as a list, the least recently used expert first, and those under way."""

    def __init__(self, slots: int, layers: int) -> None:
        self.slots, self.layers = slots, layers
        self.order: list[ExpertKey] = []
        self.claimed: Counter[int] = Counter()
        self.reserve(0)

    def reserve(self, spare: int) -> None:
        self.spare = spare
        shared = self.slots - spare
        self.quotas = [
            max(1, len(range(layer, shared, self.layers))) for layer in range(self.layers)
        ]

    def of_layer(self, layer: int) -> list[ExpertKey]:
        return [key for key in self.order if key.layer == layer]

    def filled(self, layer: int) -> int:
        return len(self.of_layer(layer)) + self.claimed[layer]

    def free(self) -> int:
        return self.slots - len(self.order) - self.claimed.total()

    def candidates(self, layer: int, from_others: bool) -> list[ExpertKey] | None:
        """Who might go for an expert of `layer`, soonest first; None while there is room."""
        full = self.filled(layer) >= self.quotas[layer]
        if self.free() and (self.spare or not full):
            return None
        if full:
            return self.of_layer(layer)
        return self.order if from_others else []

    def trim(self, layer: int, pinned: set[ExpertKey]) -> None:
        for key in self.of_layer(layer):
            if self.filled(layer) > self.quotas[layer] and key not in pinned:
                self.order.remove(key)

    def use(self, key: ExpertKey) -> None:
        if key in self.order:
            self.order.remove(key)
        self.order.append(key)


def fill(cache: ExpertCache, key: ExpertKey) -> int:
    slot = cache.claim(key.layer)
    assert slot is not None
    cache.publish(key, slot)
    return slot


def resident(cache: ExpertCache, layers: int, experts: int) -> set[ExpertKey]:
    everyone = [ExpertKey(layer, e) for layer in range(layers) for e in range(experts)]
    return {key for key in everyone if key in cache}


@pytest.mark.parametrize(("slots", "layers"), [(12, 3), (7, 3), (4, 4), (3, 5), (1, 4), (9, 2)])
def test_quotas_share_the_slots(slots: int, layers: int) -> None:
    policy = LruPolicy(slots, layers, 8)
    for shared in range(slots, -1, -1):
        policy.divide(shared)
        quotas = [policy.quota(layer) for layer in range(layers)]
        assert max(quotas) - min(quotas) <= 1
        assert sum(quotas) == max(shared, layers)


@pytest.mark.parametrize(("slots", "layers", "experts"), SIZES)
def test_cache_matches_a_list(slots: int, layers: int, experts: int) -> None:
    """Random claims, some open for long, failures, pins and reserves: always the same residents."""
    for seed in range(8):
        rng = random.Random(seed)
        cache = ExpertCache(slots, LruPolicy(slots, layers, experts))
        model = ModelCache(slots, layers)
        everyone = [ExpertKey(layer, e) for layer in range(layers) for e in range(experts)]
        where: dict[ExpertKey, int] = {}
        under_way: dict[ExpertKey, int] = {}
        for _ in range(400):
            key = rng.choice(everyone)
            pinned = set(rng.sample(model.order, rng.randint(0, len(model.order))))
            cache.pin(pinned)
            if rng.random() < 0.05:
                spare = rng.choice([0, 0, slots // 4, slots // 2])
                cache.reserve(spare)
                model.reserve(spare)
                for layer in range(layers):
                    model.trim(layer, pinned)
            elif rng.random() < 0.1:
                cache.trim(key.layer)
                model.trim(key.layer, pinned)
            elif key in under_way:
                slot = under_way.pop(key)
                model.claimed[key.layer] -= 1
                if rng.random() < 0.2:
                    cache.release(key.layer, slot)
                else:
                    cache.publish(key, slot)
                    where[key] = slot
                    model.use(key)
            else:
                found = cache.lookup(key)
                assert found == where.get(key)
                if found is not None:
                    model.use(key)
                else:
                    from_others = rng.random() < 0.7
                    candidates = model.candidates(key.layer, from_others)
                    claimed = cache.claim(key.layer, ahead=not from_others)
                    if candidates is not None:
                        victim = next((k for k in candidates if k not in pinned), None)
                        assert (claimed is None) == (victim is None)
                        if victim is not None:
                            model.order.remove(victim)
                            assert where.pop(victim) == claimed
                    if claimed is not None:
                        assert claimed not in where.values()
                        assert claimed not in under_way.values()
                        assert 0 <= claimed < slots
                        under_way[key] = claimed
                        model.claimed[key.layer] += 1
            cache.unpin(pinned)
            where = {key: slot for key, slot in where.items() if key in model.order}
            assert resident(cache, layers, experts) == set(where) == set(model.order)
            assert (len(cache), cache.free_slots) == (len(where), model.free())
            assert [cache.policy.quota(layer) for layer in range(layers)] == model.quotas
        for key in everyone:
            assert cache.lookup(key) == where.get(key)


@pytest.mark.parametrize(("slots", "layers", "experts"), SIZES)
def test_no_layer_is_pushed_beyond_its_share(slots: int, layers: int, experts: int) -> None:
    """Slots under way count, however many claims are open and whoever holds the others."""
    for seed in range(8):
        rng = random.Random(seed)
        cache = ExpertCache(slots, LruPolicy(slots, layers, 8))
        everyone = [ExpertKey(layer, e) for layer in range(layers) for e in range(experts)]
        under_way: dict[ExpertKey, int] = {}
        for _ in range(400):
            key = rng.choice(everyone)
            if key in under_way:
                cache.publish(key, under_way.pop(key))
            elif key not in cache:
                slot = cache.claim(key.layer, ahead=rng.random() < 0.3)
                if slot is not None:
                    under_way[key] = slot
            filled = Counter(k.layer for k in [*resident(cache, layers, experts), *under_way])
            for layer in range(layers):
                assert filled[layer] <= max(1, len(range(layer, slots, layers)))


def test_claimed_slots_are_all_different() -> None:
    cache = ExpertCache(5, LruPolicy(5, 2, 8))
    claimed = [cache.claim(layer) for layer in (0, 1, 0, 1, 0)]
    assert {*claimed} == {0, 1, 2, 3, 4}
    assert cache.free_slots == 0
    assert cache.claim(0) is None
    assert claimed[2] is not None
    cache.release(0, claimed[2])
    assert cache.claim(0) == claimed[2]


def test_nothing_is_claimed_where_all_is_in_flight_or_pinned() -> None:
    cache = ExpertCache(4, LruPolicy(4, 2, 8))
    held = ExpertKey(0, 0)
    fill(cache, held)
    cache.pin([held])
    slot = cache.claim(0)
    assert slot is not None
    # The layer has its share, one pinned and one in flight: free slots are not for it.
    assert cache.free_slots == 2
    assert cache.claim(0) is None
    assert cache.claim(1) is not None
    assert cache.claim(1) is not None
    assert cache.claim(1) is None
    cache.publish(ExpertKey(0, 1), slot)
    assert cache.claim(0) == slot
    assert held in cache


def test_slots_of_other_layers_are_taken_only_where_that_is_allowed() -> None:
    cache = ExpertCache(2, LruPolicy(2, 3, 8))
    older, newer = ExpertKey(0, 0), ExpertKey(1, 0)
    slots = {key: fill(cache, key) for key in (older, newer)}
    assert cache.claim(2, ahead=True) is None
    assert older in cache
    assert newer in cache
    assert cache.claim(2) == slots[older]
    assert older not in cache
    # With its share in flight a layer takes none of another's, even where it may.
    assert cache.claim(2) is None
    assert newer in cache
    # Its own it may always take.
    assert cache.claim(1, ahead=True) == slots[newer]


def test_used_and_wasted_are_counted_once_by_layer() -> None:
    cache = ExpertCache(3, LruPolicy(3, 1, 8))

    def bring(expert: int, ahead: bool) -> None:
        slot = cache.claim(0)
        assert slot is not None
        cache.publish(ExpertKey(0, expert), slot, ahead)

    for expert, ahead in ((0, True), (1, True), (2, False)):
        bring(expert, ahead)
    assert (cache.used, cache.wasted) == ({}, {})
    for _ in range(3):  # a second use of it is nothing new, nor is one of what was demanded
        cache.lookup(ExpertKey(0, 0))
        cache.lookup(ExpertKey(0, 2))
    assert (cache.used, cache.wasted) == ({0: 1}, {})
    bring(3, False)
    assert ExpertKey(0, 1) not in cache
    assert (cache.used, cache.wasted) == ({0: 1}, {0: 1})
    bring(4, False)  # in place of one that was used, which is no waste
    assert ExpertKey(0, 0) not in cache
    assert (cache.used, cache.wasted) == ({0: 1}, {0: 1})
    # Once more ahead of its need: it counts anew. What is emptied at once is nobody's waste.
    bring(1, True)
    cache.lookup(ExpertKey(0, 1))
    bring(5, True)
    cache.clear()
    assert (cache.used, cache.wasted) == ({0: 2}, {0: 1})


def test_pins_are_counted() -> None:
    cache = ExpertCache(1, LruPolicy(1, 1, 8))
    key = ExpertKey(0, 0)
    fill(cache, key)
    cache.pin([key])
    cache.pin([key])
    cache.unpin([key])
    assert cache.claim(0) is None
    cache.unpin([key])
    assert cache.claim(0) == 0
    assert cache.lookup(key) is None


def test_what_is_not_there_yet_can_be_pinned() -> None:
    cache = ExpertCache(1, LruPolicy(1, 1, 8))
    key = ExpertKey(0, 0)
    cache.pin([key])
    fill(cache, key)
    assert cache.claim(0) is None
    cache.unpin([key])
    assert cache.claim(0) == 0


def test_pins_end_when_the_cache_is_cleared() -> None:
    cache = ExpertCache(1, LruPolicy(1, 1, 8))
    key = ExpertKey(0, 0)
    fill(cache, key)
    cache.pin([key])
    cache.clear()
    assert len(cache) == 0
    fill(cache, key)
    cache.unpin([key])  # late, of a pin that is gone
    assert cache.claim(0) == 0


def test_lookup_is_a_use() -> None:
    cache = ExpertCache(2, LruPolicy(2, 1, 8))
    first, second = fill(cache, ExpertKey(0, 1)), fill(cache, ExpertKey(0, 2))
    cache.lookup(ExpertKey(0, 1))
    assert cache.claim(0) == second != first


def test_asking_whether_it_is_there_is_no_use() -> None:
    cache = ExpertCache(2, LruPolicy(2, 1, 8))
    first, second = fill(cache, ExpertKey(0, 1)), fill(cache, ExpertKey(0, 2))
    assert ExpertKey(0, 1) in cache
    assert cache.claim(0) == first != second
    assert ExpertKey(0, 1) not in cache


def test_reserve_shrinks_shares_and_leaves_slots_to_whoever_comes() -> None:
    cache = ExpertCache(12, LruPolicy(12, 3, 8))
    for layer in range(3):
        for expert in range(4):
            fill(cache, ExpertKey(layer, expert))
    assert cache.free_slots == 0

    cache.reserve(3)
    # Three slots to each layer: the expert that each used longest ago went.
    assert cache.free_slots == 3
    assert resident(cache, 3, 4) == {ExpertKey(n, e) for n in range(3) for e in (1, 2, 3)}
    # One layer may have all that are free, and then only its own.
    for expert in (4, 5, 6):
        fill(cache, ExpertKey(1, expert))
    assert resident(cache, 3, 7) == {
        *(ExpertKey(n, e) for n in range(3) for e in (1, 2, 3)),
        *(ExpertKey(1, e) for e in (4, 5, 6)),
    }
    cache.pin([ExpertKey(1, 1)])
    fill(cache, ExpertKey(1, 7))
    assert ExpertKey(1, 2) not in cache
    assert cache.free_slots == 0

    # Six of layer 1 are three too many; those in use stay.
    cache.trim(1)
    assert cache.free_slots == 3
    assert {key.expert for key in resident(cache, 3, 8) if key.layer == 1} == {1, 6, 7}
    cache.unpin([ExpertKey(1, 1)])


def test_a_reserve_of_nothing_restores_the_shares() -> None:
    cache = ExpertCache(8, LruPolicy(8, 2, 8))
    cache.reserve(4)
    for expert in range(6):
        fill(cache, ExpertKey(0, expert))
    cache.reserve(0)
    assert resident(cache, 2, 6) == {ExpertKey(0, expert) for expert in (2, 3, 4, 5)}
    assert [cache.policy.quota(layer) for layer in range(2)] == [4, 4]
    # Free slots are again for those that have not got their share.
    fill(cache, ExpertKey(0, 6))
    assert ExpertKey(0, 2) not in cache
    assert cache.free_slots == 4
    for expert in range(4):
        fill(cache, ExpertKey(1, expert))
    assert len(cache) == 8


class Served:
    """On demand, over fakes."""

    def __init__(
        self,
        slots: int,
        layers: int,
        policy: type[LruPolicy] = LruPolicy,
        rng: random.Random | None = None,
    ) -> None:
        self.recorder = Recorder(Clock())
        self.transfer = FakeTransfer(rng)
        self.cache = ExpertCache(slots, policy(slots, layers, 8))
        self.loader = ExpertLoader(self.cache, self.transfer, self.recorder)
        self.server = OnDemand(self.loader, LookaheadBuffer(layers))
        self.slots, self.layers = slots, layers

    def resident(self, layer: int, expert: int) -> bool:
        return ExpertKey(layer, expert) in self.transfer.contents.values()

    def settle(self) -> None:
        """Let all that is under way arrive."""
        self.transfer.end_all()
        self.loader.collect_finished()

    def assert_nothing_is_lost(self) -> None:
        """Every slot can be claimed anew: none is lost, none is pinned, none counted wrongly."""
        self.settle()
        assert self.cache.free_slots + len(self.cache) == self.slots
        quota = self.cache.policy.quota
        wanted = [layer for layer in range(self.layers) for _ in range(quota(layer))]
        claimed = [self.cache.claim(layer) for layer in wanted[: self.slots]]
        assert {*claimed} == {*range(self.slots)}


def drain(served: Served, layer: int, experts: list[int]) -> list[dict[int, int]]:
    """All waves, each checked while it is valid."""
    waves = []
    for wave in served.server.serve(layer, experts):
        assert len(set(wave.values())) == len(wave)
        for expert, slot in wave.items():
            assert served.transfer.contents[slot] == ExpertKey(layer, expert)
        waves.append(wave)
    return waves


class NewestFirst(LruPolicy):
    """Would let go of what was just fetched, were it not pinned."""

    def candidates(self, layer: int | None, ahead: bool = False) -> Iterable[ExpertKey]:
        return reversed(list(super().candidates(layer, ahead)))


@pytest.mark.parametrize("policy", [LruPolicy, NewestFirst])
@pytest.mark.parametrize(("slots", "layers", "experts"), SIZES)
def test_waves_name_each_expert_once(
    policy: type[LruPolicy], slots: int, layers: int, experts: int
) -> None:
    rng = random.Random(51)
    served = Served(slots, layers, policy, rng)
    for turn in range(300):
        layer = turn % layers
        asked = sorted(rng.sample(range(experts), rng.randint(1, experts)))
        held = {expert for expert in asked if served.resident(layer, expert)}
        step = served.recorder.begin("decode")
        before = len(served.transfer.asked)
        waves = drain(served, layer, asked)

        assert sorted(expert for wave in waves for expert in wave) == asked
        fetched = served.transfer.asked[before:]
        assert {priority for _, priority in fetched} <= {Priority.DEMAND}
        assert sorted(key.expert for key, _ in fetched) == sorted(set(asked) - held)
        if held:
            assert set(waves[0]) == held
        assert all(len(wave) <= served.cache.policy.quota(layer) for wave in waves)
        assert (step.requests, step.hits, step.layers) == (len(asked), len(held), 1)
        assert step.covered == len(held) / len(asked)
    assert served.transfer.open_keys == []
    served.assert_nothing_is_lost()


def test_all_experts_stay_with_slots_for_all() -> None:
    served = Served(12, 3)
    for _ in range(3):
        for layer in range(3):
            drain(served, layer, [0, 1, 2, 3])
    assert len(served.transfer.asked) == 12


def test_hits_come_before_a_miss_can_evict_them() -> None:
    served = Served(2, 1)
    drain(served, 0, [4, 5])
    # Three experts for two slots: the two that are there first, then the third.
    assert [set(wave) for wave in drain(served, 0, [3, 4, 5])] == [{4, 5}, {3}]
    assert [key.expert for key, _ in served.transfer.asked] == [4, 5, 3]


Waves = Generator[dict[int, int], None, None]


def fail_within(waves: Waves) -> None:
    next(waves)
    with pytest.raises(RuntimeError, match="kernel failed"):
        waves.throw(RuntimeError("kernel failed"))


def close_within(waves: Waves) -> None:
    next(waves)
    waves.close()


# Ways in which a request for several waves can end early. A generator that is dropped closes.
ABANDONED: dict[str, Callable[[Waves], object]] = {
    "closed before it began": lambda waves: waves.close(),
    "closed": close_within,
    "thrown into": fail_within,
    "dropped": next,
}


@pytest.mark.parametrize("size", [(8, 2), (5, 2), (2, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("abandon", ABANDONED.values(), ids=list(ABANDONED))
def test_abandoned_requests_lose_nothing(
    abandon: Callable[[Waves], object], size: tuple[int, int]
) -> None:
    served = Served(*size)
    drain(served, 0, [0, 1, 2])
    abandon(served.server.serve(1, list(range(6))))
    drain(served, 1, [1, 4])
    drain(served, 0, [0, 5])
    served.assert_nothing_is_lost()


@pytest.mark.parametrize("size", [(8, 2), (5, 2), (2, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("fails", [0, 1, 3])
def test_failed_transfers_lose_nothing(size: tuple[int, int], fails: int) -> None:
    served = Served(*size)
    drain(served, 0, [0, 1, 2])
    served.transfer.failing = {ExpertKey(1, fails): OSError("disk is gone")}
    with pytest.raises(OSError, match="disk is gone"):
        drain(served, 1, [0, 1, 2, 3, 4, 5])
    served.transfer.failing = {}
    # What failed is not taken for resident.
    assert not served.resident(1, fails)
    assert ExpertKey(1, fails) not in served.cache
    waves = drain(served, 1, [0, 1, 2, 3, 4, 5])
    assert sorted(expert for wave in waves for expert in wave) == [0, 1, 2, 3, 4, 5]
    served.assert_nothing_is_lost()


@pytest.mark.parametrize("size", [(8, 2), (5, 2), (2, 2), (2, 3)], ids=str)
def test_interrupts_lose_nothing(size: tuple[int, int]) -> None:
    served = Served(*size)
    drain(served, 0, [0, 1, 2])
    served.transfer.interrupts = {"wait"}
    with pytest.raises(KeyboardInterrupt):
        drain(served, 1, [0, 1, 2, 3, 4, 5])
    waves = drain(served, 1, [0, 1, 2, 3, 4, 5])
    assert sorted(expert for wave in waves for expert in wave) == [0, 1, 2, 3, 4, 5]
    served.assert_nothing_is_lost()


def test_draft_routes_are_recorded_and_nothing_is_fetched() -> None:
    served = Served(4, 2)
    served.server.request(0, 1, route([[3, 1]]))
    assert served.server.lookahead.expert_ids(0, 1) == [3, 1]
    assert served.transfer.asked == []


def route(ids: list[list[int]]) -> Route:
    """A route of some tokens, weights and all."""
    topk_ids = torch.tensor(ids)
    return Route(topk_ids, torch.ones(topk_ids.shape), None)


def test_lookahead_matches_sets() -> None:
    rng = random.Random(52)
    layers, experts, top_k = 3, 9, 3
    buffer = LookaheadBuffer(layers)
    for _ in range(40):
        buffer.clear()
        drafted = rng.randint(0, 4)
        verified = drafted + 1
        named = {
            (token, layer): rng.sample(range(experts), top_k)
            for token in range(drafted)
            for layer in range(layers)
        }
        used = {
            layer: [rng.sample(range(experts), top_k) for _ in range(verified)]
            for layer in range(layers)
        }
        for (token, layer), ids in named.items():
            buffer.record(token, layer, route([ids]))
        for layer, by_row in used.items():
            buffer.observe(layer, route(by_row))

        for layer in range(layers):
            by_token = [set(named[token, layer]) for token in range(drafted)]
            assert buffer.union(layer) == set().union(*by_token)
        assert buffer.expert_ids(drafted, 0) == []
        for (token, layer), ids in named.items():
            assert buffer.expert_ids(token, layer) == ids

        path = [0, *sorted(rng.sample(range(1, verified), rng.randint(0, drafted)))]
        choices = hits = 0
        for node in path:
            for layer in range(layers):
                for expert in used[layer][node]:
                    if (node, layer) in named:
                        choices += 1
                        hits += expert in named[node, layer]
        assert buffer.recall(path) == (hits, choices)
    buffer.clear()
    assert buffer.union(0) == set()
    assert buffer.recall([0]) == (0, 0)


def test_what_only_rejected_tokens_wanted() -> None:
    """Against sets, on trees: a path need not be the first nodes."""
    rng = random.Random(53)
    seen = 0
    for _ in range(60):
        buffer = LookaheadBuffer(2)
        nodes = rng.randint(1, 6)
        used = {layer: [rng.sample(range(9), 3) for _ in range(nodes)] for layer in range(2)}
        for layer, by_row in used.items():
            buffer.observe(layer, route(by_row))
        path = [0, *sorted(rng.sample(range(1, nodes), rng.randint(0, nodes - 1)))]
        expected = {
            (layer, expert)
            for layer in range(2)
            for expert in range(9)
            if any(expert in used[layer][node] for node in range(nodes))
            and not any(expert in used[layer][node] for node in path)
        }
        assert buffer.rejected(path) == expected
        seen += bool(expected)
    assert seen > 20
    buffer.clear()
    assert buffer.rejected([0]) == set()


def test_lookahead_is_known_layer_by_layer() -> None:
    buffer = LookaheadBuffer(2)
    buffer.record(0, 0, route([[4, 2]]))
    assert (buffer.union(0), buffer.union(1)) == ({2, 4}, set())
    buffer.record(1, 0, route([[2, 7]]))
    buffer.record(0, 1, route([[5, 6]]))
    assert (buffer.union(0), buffer.union(1)) == ({2, 4, 7}, {5, 6})
    # An earlier route of the same token and layer is replaced.
    buffer.record(1, 0, route([[1, 0]]))
    assert buffer.union(0) == {0, 1, 2, 4}


def slow_tier() -> tuple[Clock, Fetch]:
    """A clock, and fetches that take as many seconds as the expert's number plus one."""
    clock = Clock()

    def fetch(key: ExpertKey, record: torch.Tensor) -> int:
        clock.now += key.expert + 1
        if key.expert == 9:
            raise OSError("disk is gone")
        record.fill_(10 * key.layer + key.expert)
        return 100 + key.expert

    return clock, fetch
