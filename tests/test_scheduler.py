"""Slots, eviction and fetching, on transfers and a clock that move when told to."""

import random
from collections.abc import Callable, Iterable

import pytest
import torch

from speq.routing import Route
from speq.scheduler.expert_cache import ExpertCache, ExpertKey, LruPolicy
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.prefetch import OnDemand
from speq.scheduler.transfer import Priority, SynchronousTransfer, Ticket
from speq.stats import Event, Recorder

# (slots, layers, experts): roomy, tight, exactly one each, and fewer slots than layers.
SIZES = [(12, 3, 8), (7, 3, 5), (4, 4, 3), (3, 5, 4), (1, 4, 3), (40, 2, 6)]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ModelCache:
    """The same cache as a list, the least recently used expert first."""

    def __init__(self, slots: int, layers: int) -> None:
        self.slots = slots
        self.quotas = [max(1, len(range(layer, slots, layers))) for layer in range(layers)]
        self.order: list[ExpertKey] = []

    def of_layer(self, layer: int) -> list[ExpertKey]:
        return [key for key in self.order if key.layer == layer]

    def victim(self, layer: int, pinned: set[ExpertKey]) -> ExpertKey | None:
        """Who must go for an expert of `layer`; None while there is room."""
        own = self.of_layer(layer)
        if len(own) < self.quotas[layer]:
            if len(self.order) < self.slots:
                return None
            own = self.order
        return next(key for key in own if key not in pinned)

    def use(self, key: ExpertKey) -> None:
        if key in self.order:
            self.order.remove(key)
        self.order.append(key)


def fill(cache: ExpertCache, key: ExpertKey) -> int:
    slot = cache.claim(key.layer)
    cache.publish(key, slot)
    return slot


@pytest.mark.parametrize(("slots", "layers"), [(12, 3), (7, 3), (4, 4), (3, 5), (1, 4), (9, 2)])
def test_quotas_share_the_slots(slots: int, layers: int) -> None:
    policy = LruPolicy(slots, layers)
    quotas = [policy.quota(layer) for layer in range(layers)]
    assert max(quotas) - min(quotas) <= 1
    assert sum(quotas) == max(slots, layers)


@pytest.mark.parametrize(("slots", "layers", "experts"), SIZES)
def test_cache_matches_a_list(slots: int, layers: int, experts: int) -> None:
    """Random requests, failed fetches and pins: the same residents as the plain model, always."""
    for seed in range(8):
        rng = random.Random(seed)
        cache, model = ExpertCache(slots, LruPolicy(slots, layers)), ModelCache(slots, layers)
        everyone = [ExpertKey(layer, e) for layer in range(layers) for e in range(experts)]
        where: dict[ExpertKey, int] = {}
        for _ in range(400):
            key = rng.choice(everyone)
            # Enough others stay free to go, in every layer.
            spare = model.quotas[key.layer] - 1
            own = model.of_layer(key.layer)
            pinned = set(rng.sample(own, rng.randint(0, min(spare, len(own)))))
            with cache.pinned(pinned):
                slot = cache.lookup(key)
                assert slot == where.get(key)
                if slot is None:
                    victim = model.victim(key.layer, pinned)
                    slot = cache.claim(key.layer)
                    if victim is not None:
                        model.order.remove(victim)
                        assert where.pop(victim) == slot
                    assert slot not in where.values()
                    assert 0 <= slot < slots
                    if rng.random() < 0.1:
                        cache.release(key.layer, slot)
                        continue
                    cache.publish(key, slot)
                    where[key] = slot
                model.use(key)
            assert len(cache) == len(where) == len(model.order)
            assert cache.free_slots == slots - len(where)
            if slots >= layers:
                assert all(
                    len(model.of_layer(layer)) <= model.quotas[layer] for layer in range(layers)
                )
        for key in everyone:
            assert cache.lookup(key) == where.get(key)


def test_claimed_slots_are_all_different() -> None:
    cache = ExpertCache(5, LruPolicy(5, 2))
    claimed = [cache.claim(layer) for layer in (0, 1, 0, 1, 0)]
    assert sorted(claimed) == [0, 1, 2, 3, 4]
    assert cache.free_slots == 0
    with pytest.raises(AssertionError, match="every slot is pinned or being filled"):
        cache.claim(0)
    cache.release(0, claimed[2])
    assert cache.claim(0) == claimed[2]


def test_pins_are_counted() -> None:
    cache = ExpertCache(1, LruPolicy(1, 1))
    key = ExpertKey(0, 0)
    fill(cache, key)
    with cache.pinned([key]):
        with cache.pinned([key]):
            pass
        with pytest.raises(AssertionError, match="every slot is pinned or being filled"):
            cache.claim(0)
    assert cache.claim(0) == 0
    assert cache.lookup(key) is None


def test_pins_end_with_a_failure() -> None:
    cache = ExpertCache(1, LruPolicy(1, 1))
    key = ExpertKey(0, 0)
    fill(cache, key)
    with pytest.raises(KeyError), cache.pinned([key]):
        raise KeyError
    assert cache.claim(0) == 0


def test_lookup_is_a_use() -> None:
    cache = ExpertCache(2, LruPolicy(2, 1))
    first, second = fill(cache, ExpertKey(0, 1)), fill(cache, ExpertKey(0, 2))
    cache.lookup(ExpertKey(0, 1))
    assert cache.claim(0) == second != first


class FakeTransfer:
    """Notes what was asked for, and fails where it is told to."""

    def __init__(self) -> None:
        self.submitted: list[ExpertKey] = []
        self.contents: dict[int, ExpertKey] = {}
        self.fails_at: dict[int, BaseException] = {}
        self.waited: list[Ticket] = []
        self.priorities: set[Priority] = set()
        self.closed = False

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> Ticket:
        self.submitted.append(key)
        self.priorities.add(priority)
        self.contents.pop(slot, None)
        return Ticket(key, slot)

    def wait(self, ticket: Ticket) -> None:
        if len(self.submitted) in self.fails_at:
            raise self.fails_at[len(self.submitted)]
        self.contents[ticket.slot] = ticket.key
        self.waited.append(ticket)

    def close(self) -> None:
        self.closed = True


class Served:
    """An on-demand prefetcher over fakes."""

    def __init__(
        self, slots: int, layers: int, policy: Callable[[int, int], LruPolicy] = LruPolicy
    ) -> None:
        self.clock = Clock()
        self.recorder = Recorder(self.clock)
        self.transfer = FakeTransfer()
        self.cache = ExpertCache(slots, policy(slots, layers))
        self.server = OnDemand(self.cache, self.transfer, LookaheadBuffer(layers), self.recorder)
        self.slots, self.layers = slots, layers

    def resident(self, layer: int, expert: int) -> bool:
        return ExpertKey(layer, expert) in self.transfer.contents.values()

    def assert_nothing_is_lost(self) -> None:
        """Every slot can be claimed anew: none is lost, none is pinned, none counted wrongly."""
        assert self.cache.free_slots + len(self.cache) == self.slots
        quota = self.cache.policy.quota
        wanted = [layer for layer in range(self.layers) for _ in range(quota(layer))]
        claimed = [self.cache.claim(layer) for layer in wanted[: self.slots]]
        assert sorted(claimed) == list(range(self.slots))


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

    def candidates(self, layer: int) -> Iterable[ExpertKey]:
        return reversed(list(super().candidates(layer)))


@pytest.mark.parametrize("policy", [LruPolicy, NewestFirst])
@pytest.mark.parametrize(("slots", "layers", "experts"), SIZES)
def test_waves_name_each_expert_once(
    policy: type[LruPolicy], slots: int, layers: int, experts: int
) -> None:
    rng = random.Random(51)
    served = Served(slots, layers, policy)
    for turn in range(300):
        layer = turn % layers
        asked = sorted(rng.sample(range(experts), rng.randint(1, experts)))
        held = {expert for expert in asked if served.resident(layer, expert)}
        step = served.recorder.begin("decode")
        before = len(served.transfer.submitted)
        waves = drain(served, layer, asked)

        assert sorted(expert for wave in waves for expert in wave) == asked
        fetched = served.transfer.submitted[before:]
        assert sorted(key.expert for key in fetched) == sorted(set(asked) - held)
        assert held <= set(waves[0])
        quota = served.cache.policy.quota(layer)
        assert all(len(wave) <= quota for wave in waves)
        if len(asked) <= quota:
            assert len(waves) == 1
        assert (step.requests, step.hits, step.layers) == (len(asked), len(held), 1)
        assert step.covered == len(held) / len(asked)
    assert served.transfer.priorities == {Priority.DEMAND}
    assert len(served.transfer.waited) == len(served.transfer.submitted)
    served.assert_nothing_is_lost()


def test_all_experts_stay_with_slots_for_all() -> None:
    served = Served(12, 3)
    for _ in range(3):
        for layer in range(3):
            drain(served, layer, [0, 1, 2, 3])
    assert len(served.transfer.submitted) == 12


def test_hits_come_before_a_miss_can_evict_them() -> None:
    served = Served(2, 1)
    drain(served, 0, [4, 5])
    # Three experts for two slots: the two that are there first, then the third.
    assert [set(wave) for wave in drain(served, 0, [3, 4, 5])] == [{4, 5}, {3}]
    assert [key.expert for key in served.transfer.submitted] == [4, 5, 3]


def interrupt(kind: str, served: Served) -> None:
    """End a request for layer 1 halfway, in one of the ways it can end."""
    waves = served.server.serve(1, list(range(6)))
    if kind == "closed before it began":
        waves.close()  # type: ignore[attr-defined]
        return
    next(waves)
    if kind == "closed":
        waves.close()  # type: ignore[attr-defined]
    elif kind == "thrown into":
        with pytest.raises(RuntimeError, match="kernel failed"):
            waves.throw(RuntimeError("kernel failed"))  # type: ignore[attr-defined]
    else:
        del waves


@pytest.mark.parametrize("size", [(8, 2), (5, 2), (2, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("kind", ["closed before it began", "closed", "thrown into", "dropped"])
def test_abandoned_requests_lose_nothing(kind: str, size: tuple[int, int]) -> None:
    served = Served(*size)
    drain(served, 0, [0, 1, 2])
    interrupt(kind, served)
    drain(served, 1, [1, 4])
    drain(served, 0, [0, 5])
    served.assert_nothing_is_lost()


@pytest.mark.parametrize("error", [OSError("disk is gone"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("size", [(8, 2), (5, 2), (2, 2), (2, 3)], ids=str)
@pytest.mark.parametrize("fails_at", [1, 2, 4])
def test_failed_transfers_lose_nothing(
    error: BaseException, size: tuple[int, int], fails_at: int
) -> None:
    served = Served(*size)
    drain(served, 0, [0, 1, 2])
    served.transfer.fails_at = {3 + fails_at: error}
    with pytest.raises(type(error)):
        drain(served, 1, [0, 1, 2, 3, 4, 5])
    served.transfer.fails_at = {}
    # What failed is not taken for resident.
    assert not served.resident(1, fails_at - 1)
    assert served.cache.lookup(ExpertKey(1, fails_at - 1)) is None
    waves = drain(served, 1, [0, 1, 2, 3, 4, 5])
    assert sorted(expert for wave in waves for expert in wave) == [0, 1, 2, 3, 4, 5]
    served.assert_nothing_is_lost()


def test_draft_routes_are_recorded_and_nothing_is_fetched() -> None:
    served = Served(4, 2)
    served.server.request(0, 1, route([[3, 1]]))
    assert served.server.lookahead.expert_ids(0, 1) == [3, 1]
    assert served.transfer.submitted == []
    served.server.close()
    assert served.transfer.closed


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
        for layer, ids in used.items():
            buffer.observe(layer, route(ids))

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


def slow_tier() -> tuple[Clock, Callable[[ExpertKey, torch.Tensor], None]]:
    """A clock, and fetches that take as many seconds as the expert's number plus one."""
    clock = Clock()

    def fetch(key: ExpertKey, record: torch.Tensor) -> None:
        clock.now += key.expert + 1
        if key.expert == 9:
            raise OSError("disk is gone")
        record.fill_(10 * key.layer + key.expert)

    return clock, fetch


def test_synchronous_transfer() -> None:
    clock, fetch = slow_tier()
    recorder = Recorder(clock)
    slots = torch.zeros(3, 64, dtype=torch.uint8)
    transfer = SynchronousTransfer(fetch, slots, recorder)
    step = recorder.begin("decode")
    for key, slot in [(ExpertKey(1, 2), 2), (ExpertKey(0, 4), 0)]:
        ticket = transfer.submit(key, slot, Priority.DEMAND)
        assert ticket == Ticket(key, slot)
        transfer.wait(ticket)
    assert slots[:, 0].tolist() == [4, 0, 12]
    assert (slots == slots[:, :1]).all()
    assert step.events == [
        Event("transfer", 0.0, 3.0, 1, 2, moved_bytes=64),
        Event("stall", 0.0, 3.0, 1, 2),
        Event("transfer", 3.0, 8.0, 0, 4, moved_bytes=64),
        Event("stall", 3.0, 8.0, 0, 4),
    ]
    assert (step.moved_bytes, step.transfer_s, step.stall_s) == (128, 8.0, 8.0)
    transfer.close()


def test_synchronous_transfer_that_fails_moves_nothing() -> None:
    clock, fetch = slow_tier()
    recorder = Recorder(clock)
    transfer = SynchronousTransfer(fetch, torch.zeros(1, 8, dtype=torch.uint8), recorder)
    step = recorder.begin("decode")
    with pytest.raises(OSError, match="disk is gone"):
        transfer.submit(ExpertKey(0, 9), 0, Priority.DEMAND)
    assert (step.moved_bytes, step.events) == (0, [])
