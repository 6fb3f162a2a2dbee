"""Experts on their way: the supply over transfers that end in any order, fail, or are cut short."""

import random
from collections.abc import Callable

import pytest
import torch

from speq.scheduler.eviction import LruPolicy
from speq.scheduler.expert_cache import ExpertCache
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.link_pace import FEWEST
from speq.scheduler.read_queue import ReaderThreads
from speq.scheduler.transfer import Priority
from speq.stats import Recorder
from tests.helpers.fake_transfer import Clock, FakeTransfer

# (slots, layers, experts): roomy, tight, one each, fewer slots than layers, and all of them.
SIZES = [(12, 3, 8), (7, 3, 5), (4, 4, 3), (3, 5, 4), (1, 4, 3), (18, 3, 6)]


class Supplied:
    """A supply over fakes, and what is true of it whatever happens."""

    def __init__(
        self, slots: int, layers: int, rng: random.Random | None = None, depth: int = 2
    ) -> None:
        self.slots, self.layers = slots, layers
        self.transfer = FakeTransfer(rng, depth)
        self.cache = ExpertCache(slots, LruPolicy(slots, layers, 8))
        self.recorder = Recorder(Clock())
        self.loader = ExpertLoader(self.cache, self.transfer, self.recorder)

    @property
    def filled(self) -> set[ExpertKey]:
        """Experts whose bytes lie in some slot."""
        return {key for key in self.transfer.contents.values() if key is not None}

    @property
    def asked(self) -> list[ExpertKey]:
        return [key for key, _ in self.transfer.asked]

    def prefetch(self, *keys: ExpertKey) -> list[bool]:
        return [self.loader.load(key, Priority.PREFETCH) for key in keys]

    def looking_ahead(self, *keys: ExpertKey) -> Callable[[], None]:
        def look() -> None:
            self.prefetch(*keys)

        return look

    def drain(
        self,
        layer: int,
        experts: list[int],
        meanwhile: Callable[[], None] = lambda: None,
        wave: int | None = None,
    ) -> list[dict[int, int]]:
        """All waves, each checked from when it comes until the next one is asked for."""
        waves = []
        for slots in self.loader.serve(layer, experts, meanwhile, wave):
            self.assert_wave_holds(layer, slots)
            if self.transfer.rng is not None:
                self.transfer.end_some()
            self.assert_wave_holds(layer, slots)
            waves.append(slots)
        assert sorted(expert for slots in waves for expert in slots) == sorted(experts)
        return waves

    def assert_wave_holds(self, layer: int, slots: dict[int, int]) -> None:
        assert slots
        for expert, slot in slots.items():
            assert self.transfer.contents[slot] == ExpertKey(layer, expert)
            assert slot not in self.transfer.open_slots

    def assert_shares_are_kept(self) -> None:
        """Of slots with something in them or on its way."""
        keys = [*self.filled, *self.transfer.open_keys]
        for layer in range(self.layers):
            share = max(1, len(range(layer, self.slots, self.layers)))
            assert sum(key.layer == layer for key in keys) <= share

    def assert_nothing_is_lost(self) -> None:
        """Once all has arrived, residents are what slots hold, and every slot can be had."""
        while self.transfer.open_keys:
            self.transfer.end_all()
        self.loader.collect_finished()
        assert len(self.cache) == len(self.filled)
        for key in self.filled:
            slot = self.cache.lookup(key)
            assert slot is not None
            assert self.transfer.contents[slot] == key
        assert self.cache.free_slots + len(self.cache) == self.slots
        quota = self.cache.policy.quota
        wanted = [layer for layer in range(self.layers) for _ in range(quota(layer))]
        claimed = [self.cache.claim(layer) for layer in wanted[: self.slots]]
        assert {*claimed} == {*range(self.slots)}


def keys_of(layer: int, *experts: int) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for expert in experts]


@pytest.mark.parametrize(("slots", "layers", "experts"), SIZES)
@pytest.mark.parametrize("depth", [1, 3])
def test_random_serves(slots: int, layers: int, experts: int, depth: int) -> None:
    """Prefetches of any layer, failures, interrupts and abandoned requests among them."""
    rng = random.Random(slots * 10 + depth)
    supplied = Supplied(slots, layers, rng, depth)
    transfer, loader = supplied.transfer, supplied.loader
    everyone = [ExpertKey(layer, e) for layer in range(layers) for e in range(experts)]
    for _ in range(400):
        layer = rng.randrange(layers)
        asked = rng.sample(range(experts), rng.randint(1, experts))
        wave = rng.choice([None, 1, 2, 4])
        held = supplied.filled & {ExpertKey(layer, expert) for expert in asked}
        look_ahead = supplied.looking_ahead(*rng.sample(everyone, rng.randint(0, 4)))
        end = rng.random()
        if end < 0.8:
            step = supplied.recorder.begin("decode")
            waves = supplied.drain(layer, asked, look_ahead, wave)
            assert (step.requests, step.hits) == (len(asked), len(held))
            assert all(len(slots) <= (wave or experts) for slots in waves)
            if held and wave is None:
                assert set(waves[0]) == {key.expert for key in held}
        elif end < 0.9:
            begun = loader.serve(layer, asked, look_ahead, wave)
            supplied.assert_wave_holds(layer, next(begun))
            begun.close()
        elif end < 0.95:
            bad = ExpertKey(layer, rng.choice(asked))
            if bad not in supplied.filled:
                transfer.failing = {bad: OSError(f"cannot read {bad}")}
                with pytest.raises(OSError, match="cannot read"):
                    supplied.drain(layer, asked, look_ahead, wave)
                transfer.failing = {}
        else:
            transfer.interrupts = {"wait"}
            try:
                supplied.drain(layer, asked, look_ahead, wave)
            except KeyboardInterrupt:
                assert transfer.interrupts == set()
            transfer.interrupts = set()
        supplied.assert_shares_are_kept()
    supplied.assert_nothing_is_lost()


@pytest.mark.parametrize("wave", [1, 2, 5])
def test_waves_are_as_small_as_asked(wave: int) -> None:
    supplied = Supplied(6, 1)
    supplied.drain(0, [0, 1, 2, 3, 4, 5])
    waves = supplied.drain(0, [0, 1, 2, 3, 4, 5], wave=wave)
    # All lie there: every wave but the last is full.
    assert [len(slots) for slots in waves] == [min(wave, 6 - n) for n in range(0, 6, wave)]


def test_more_experts_than_slots() -> None:
    supplied = Supplied(3, 1)
    supplied.drain(0, list(range(11)))
    assert sorted(supplied.asked) == keys_of(0, *range(11))
    supplied.assert_nothing_is_lost()


def test_fewer_slots_than_layers() -> None:
    supplied = Supplied(2, 5)
    for layer in [*range(5), *range(5)]:
        supplied.drain(layer, [0, 1, 2])
    supplied.assert_nothing_is_lost()


def test_what_is_there_comes_before_what_is_not() -> None:
    supplied = Supplied(4, 1)
    supplied.drain(0, [2, 3])
    served = supplied.loader.serve(0, [0, 1, 2, 3])
    assert set(next(served)) == {2, 3}
    # The others are on their way meanwhile.
    assert supplied.transfer.open_keys == keys_of(0, 0, 1)
    supplied.transfer.end(ExpertKey(0, 1))
    assert set(next(served)) == {1}
    assert set(next(served)) == {0}
    assert list(served) == []


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_demands_wait_for_prefetches_that_hold_every_slot(layer: int, depth: int) -> None:
    supplied = Supplied(4, 3, depth=depth)
    assert supplied.prefetch(*keys_of(0, 0, 1), ExpertKey(1, 0), ExpertKey(2, 0)) == [True] * 4
    assert supplied.cache.free_slots == 0
    supplied.drain(layer, [5, 6, 7])
    supplied.assert_nothing_is_lost()


def test_a_demand_waits_for_its_own_and_not_for_prefetches_before_it() -> None:
    supplied = Supplied(4, 2)
    supplied.prefetch(ExpertKey(1, 0))
    supplied.drain(0, [0, 1])
    assert supplied.transfer.open_keys == keys_of(1, 0)
    supplied.assert_nothing_is_lost()


def test_a_prefetch_takes_no_slot_of_another_layer() -> None:
    supplied = Supplied(2, 3)
    supplied.drain(0, [0])
    supplied.drain(1, [0])
    assert supplied.prefetch(ExpertKey(2, 0)) == [False]
    assert supplied.filled == {ExpertKey(0, 0), ExpertKey(1, 0)}
    # Of its own it takes the one that was used longest ago.
    assert supplied.prefetch(ExpertKey(1, 1)) == [True]
    assert supplied.filled == {ExpertKey(0, 0)}


def test_what_is_there_or_under_way_is_not_asked_for_again() -> None:
    supplied = Supplied(4, 2)
    supplied.drain(0, [0])
    assert supplied.prefetch(ExpertKey(0, 0), ExpertKey(0, 1), ExpertKey(0, 1)) == [True] * 3
    supplied.drain(0, [0, 1])
    assert supplied.transfer.asked == [
        (ExpertKey(0, 0), Priority.DEMAND),
        (ExpertKey(0, 1), Priority.PREFETCH),
    ]


def test_a_failed_demand_raises_its_own_error_once() -> None:
    supplied = Supplied(6, 2)
    supplied.prefetch(*keys_of(1, 0, 1))
    supplied.transfer.failing = {
        ExpertKey(0, 1): OSError("the demand"),
        ExpertKey(1, 0): OSError("a prefetch"),
    }
    with pytest.raises(OSError, match="the demand"):
        supplied.drain(0, [0, 1, 2])
    supplied.transfer.failing = {}
    supplied.drain(0, [0, 1, 2])
    assert supplied.asked.count(ExpertKey(0, 1)) == 2
    supplied.drain(1, [1, 2])
    supplied.assert_nothing_is_lost()


def test_a_failed_prefetch_is_asked_for_again_when_it_is_needed() -> None:
    supplied = Supplied(6, 2)
    bad = ExpertKey(1, 0)
    supplied.transfer.failing = {bad: OSError("cannot be read")}
    supplied.prefetch(bad)
    supplied.transfer.end(bad)
    supplied.drain(0, [0, 1])
    supplied.transfer.failing = {}
    supplied.drain(1, [0, 1])
    assert supplied.asked.count(bad) == 2
    supplied.assert_nothing_is_lost()


def test_a_prefetch_that_fails_while_it_is_waited_for() -> None:
    supplied = Supplied(6, 2)
    bad = ExpertKey(1, 0)
    supplied.transfer.failing = {bad: OSError("cannot be read")}
    supplied.prefetch(bad)
    with pytest.raises(OSError, match="cannot be read"):
        supplied.drain(1, [0, 1])
    supplied.transfer.failing = {}
    supplied.drain(1, [0, 1])
    assert supplied.asked.count(bad) == 2
    supplied.assert_nothing_is_lost()


def test_the_engine_may_raise_when_it_is_asked() -> None:
    """Where transfers are synchronous: nothing was begun, and no slot is lost."""
    bad = ExpertKey(0, 1)
    failing = {bad}

    def fetch(key: ExpertKey, record: torch.Tensor) -> int:
        if key in failing:
            raise OSError("disk is gone")
        record.fill_(key.expert)
        return 0

    slots = torch.zeros(2, 4, dtype=torch.uint8)
    transfer = ReaderThreads(fetch, slots, lambda key: 4, Recorder(Clock()), readers=1)
    loader = ExpertLoader(ExpertCache(2, LruPolicy(2, 1, 8)), transfer, Recorder(Clock()))
    for _ in range(3):
        with pytest.raises(OSError, match="disk is gone"):
            list(loader.serve(0, [0, 1, 2]))
    failing.clear()
    seen: dict[int, list[int]] = {}
    for wave in loader.serve(0, [0, 1, 2]):
        seen |= {expert: slots[slot].tolist() for expert, slot in wave.items()}
    assert seen == {expert: [expert] * 4 for expert in range(3)}
    transfer.close()


@pytest.mark.parametrize("end", ["closed", "thrown into", "dropped"])
def test_what_an_abandoned_request_began_still_arrives(end: str) -> None:
    supplied = Supplied(6, 2, depth=6)
    served = supplied.loader.serve(0, [0, 1, 2], wave=1)
    next(served)
    under_way = supplied.transfer.open_keys
    assert under_way
    if end == "closed":
        served.close()
    elif end == "thrown into":
        with pytest.raises(RuntimeError, match="kernel failed"):
            served.throw(RuntimeError("kernel failed"))
    else:
        del served
    assert supplied.transfer.open_keys == under_way
    supplied.transfer.end_all()
    step = supplied.recorder.begin("decode")
    supplied.drain(0, [0, 1, 2])
    assert step.hits == 3
    assert len(supplied.asked) == 3
    supplied.assert_nothing_is_lost()


class Witness(ExpertCache):
    """Notes when it is emptied, among the calls to the transfers."""

    def __init__(self, num_slots: int, policy: LruPolicy, calls: list[str]) -> None:
        self._calls = calls
        super().__init__(num_slots, policy)

    def clear(self) -> None:
        self._calls.append("clear")
        super().clear()


def test_slots_are_forgotten_once_nothing_is_written_to_them() -> None:
    transfer = FakeTransfer()
    cache = Witness(4, LruPolicy(4, 1, 8), transfer.calls)
    loader = ExpertLoader(cache, transfer, Recorder(Clock()))
    for expert in range(4):
        assert loader.load(ExpertKey(0, expert), Priority.PREFETCH)
    transfer.calls.clear()
    loader.forget()
    assert transfer.calls == ["quiesce", "clear"]
    assert transfer.open_keys == []
    assert (len(cache), cache.free_slots) == (0, 4)


@pytest.mark.parametrize("call", ["wait", "quiesce"])
def test_after_an_interrupt_no_slot_is_used_that_may_be_written_to(call: str) -> None:
    """FakeTransfer.submit refuses one that is."""
    supplied = Supplied(3, 1, depth=1)
    supplied.transfer.interrupts = {"wait", call}
    with pytest.raises(KeyboardInterrupt):
        supplied.drain(0, [0, 1, 2])
    assert supplied.transfer.running
    if call == "quiesce":
        with pytest.raises(KeyboardInterrupt):
            supplied.loader.forget()
        assert supplied.transfer.running
    supplied.transfer.calls.clear()
    supplied.drain(0, [3, 4, 5, 0])
    assert ("quiesce" in supplied.transfer.calls) == (call == "quiesce")
    # That was it: what is there now stays.
    supplied.transfer.calls.clear()
    supplied.drain(0, [3])
    assert "quiesce" not in supplied.transfer.calls
    supplied.assert_nothing_is_lost()


def test_forgetting_is_tried_again_until_it_is_done() -> None:
    supplied = Supplied(2, 1)
    supplied.prefetch(*keys_of(0, 0, 1))
    for _ in range(2):
        supplied.transfer.interrupts = {"quiesce"}
        with pytest.raises(KeyboardInterrupt):
            supplied.loader.forget()
    supplied.transfer.interrupts = {"quiesce"}
    with pytest.raises(KeyboardInterrupt):
        supplied.drain(0, [0])
    supplied.drain(0, [0, 1, 2])
    supplied.assert_nothing_is_lost()


def test_requests_and_hits_are_counted() -> None:
    supplied = Supplied(4, 2)
    step = supplied.recorder.begin("decode")
    supplied.drain(0, [0, 1])
    supplied.prefetch(ExpertKey(1, 0), ExpertKey(1, 1))
    supplied.transfer.end(ExpertKey(1, 0))
    # One has arrived, one is under way: that is no hit yet.
    supplied.drain(1, [0, 1, 2])
    supplied.drain(0, [1])
    assert (step.requests, step.hits, step.layers) == (6, 2, 3)
    assert step.covered == pytest.approx(0 / 2 + 1 / 3 + 1 / 1)


def test_looking_ahead_comes_after_the_layer_asked_for_what_it_can() -> None:
    supplied = Supplied(8, 2)
    seen = []

    def look() -> None:
        seen.append(supplied.asked)
        supplied.prefetch(*keys_of(1, 0, 1, 2, 3, 4))

    supplied.drain(0, [0, 1, 2], look)
    assert seen[0] == keys_of(0, 0, 1, 2)
    assert supplied.transfer.asked == [
        *((key, Priority.DEMAND) for key in keys_of(0, 0, 1, 2)),
        # No more than the other layer's share.
        *((key, Priority.PREFETCH) for key in keys_of(1, 0, 1, 2, 3)),
    ]
    # It is called where all is there as well.
    seen.clear()
    supplied.drain(0, [0, 1, 2], look)
    assert seen


def test_looking_ahead_evicts_nothing_that_the_layer_waits_for() -> None:
    """Though it looks ahead in the very layer that is served."""
    for seed in range(50):
        supplied = Supplied(3, 1, random.Random(seed))
        supplied.drain(0, [0, 1])
        asked = len(supplied.asked)
        look = supplied.looking_ahead(ExpertKey(0, 7))
        supplied.drain(0, [0, 1, 2], look, wave=1)
        # Each that lay there was used before the other came in its place.
        assert set(keys_of(0, 0, 1)).isdisjoint(supplied.asked[asked:])


def test_loading_ahead_evicts_none_of_its_own() -> None:
    supplied = Supplied(4, 2)
    supplied.drain(1, [0, 1])
    # The one that was used longest ago is wanted again: the other goes.
    assert supplied.loader.load_ahead(keys_of(1, 2, 0, 3), 8) == 1
    assert ExpertKey(1, 0) in supplied.filled
    assert ExpertKey(1, 1) not in supplied.filled
    assert supplied.asked[2:] == keys_of(1, 2)
    # That was for the call alone.
    supplied.drain(1, [2])
    assert supplied.loader.load_ahead(keys_of(1, 3), 8) == 1
    assert ExpertKey(1, 0) not in supplied.filled
    supplied.assert_nothing_is_lost()


def test_loading_ahead_keeps_to_its_room() -> None:
    supplied = Supplied(12, 2)
    supplied.drain(0, [1])
    supplied.prefetch(ExpertKey(0, 2))
    # What is there or on its way takes no room.
    assert supplied.loader.load_ahead(keys_of(0, 0, 1, 2, 3, 4, 5), 2) == 2
    assert supplied.asked[2:] == keys_of(0, 0, 3)
    assert [supplied.loader.has(key) for key in keys_of(0, 0, 1, 2, 3, 4)] == [True] * 4 + [False]
    assert supplied.loader.load_ahead(keys_of(0, 4), 0) == 0
    assert supplied.loader.load_ahead(keys_of(0, 0, 3), 2) == 0
    assert len(supplied.asked) == 4


def test_room_ahead_is_what_the_pace_says_less_what_is_under_way() -> None:
    supplied = Supplied(12, 1)
    assert supplied.loader.room_ahead() == FEWEST
    supplied.prefetch(*keys_of(0, 0, 1, 2))
    assert supplied.loader.room_ahead() == FEWEST - 3
    supplied.transfer.end_all()
    supplied.loader.collect_finished()
    assert supplied.loader.room_ahead() == FEWEST


def test_what_became_of_prefetches_is_reported_by_layer() -> None:
    supplied = Supplied(4, 2)
    step = supplied.recorder.begin("decode")
    supplied.prefetch(*keys_of(0, 0, 1), *keys_of(1, 0, 1))
    supplied.transfer.end_all()
    supplied.drain(0, [0, 1])
    assert (step.used, step.wasted) == (2, 0)
    supplied.drain(0, [2, 3])
    supplied.drain(1, [0, 2])
    assert (step.used, step.wasted) == (3, 1)
    assert {at: (f.used, f.wasted) for at, f in step.by_layer.items()} == {0: (2, 0), 1: (1, 1)}
    # Told once.
    supplied.drain(1, [0, 2])
    assert (step.used, step.wasted) == (3, 1)


def test_requests_that_were_under_way_are_late() -> None:
    supplied = Supplied(8, 2)
    step = supplied.recorder.begin("decode")
    supplied.prefetch(*keys_of(1, 0, 1, 2))
    supplied.transfer.end(ExpertKey(1, 1))
    supplied.drain(1, [0, 1, 2, 3])
    assert (step.requests, step.hits, step.late) == (4, 1, 2)
    # Each is then a demand, and one that is waited for.
    assert [supplied.asked.count(key) for key in keys_of(1, 0, 1, 2, 3)] == [1, 1, 1, 1]


def test_close_closes_the_engine() -> None:
    supplied = Supplied(2, 1)
    supplied.prefetch(*keys_of(0, 0, 1))
    supplied.loader.close()
    assert supplied.transfer.calls[-1] == "close"
    assert supplied.transfer.open_keys == []
