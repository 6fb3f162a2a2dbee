"""Copies beside the computation, on a device whose streams go on in any order events allow."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from speq.scheduler import host_records
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.host_records import HostRecords
from speq.scheduler.stream_transfer import MOST_COPIES, StreamTransfer
from speq.scheduler.transfer import Priority, State, Ticket
from speq.stats import Recorder
from tests.helpers.host_device import HostDevice, Race
from tests.helpers.host_tensors import DEVICE, host_tensors

LAYERS, EXPERTS, SLOTS, RECORD_BYTES = 3, 8, 5, 48


def words(key: ExpertKey) -> list[int]:
    return [16 * key.layer + key.expert] * record_bytes(*key)


def record_bytes(layer: int, expert: int) -> int:
    return RECORD_BYTES - 4 * expert


class FakeTier:
    """Records that hold the first of LAYERS x EXPERTS; the others come from a disk.

    failing  experts that cannot be read
    """

    def __init__(self, device: HostDevice, num_records: int) -> None:
        self._memory = torch.full((num_records, RECORD_BYTES), 255, dtype=torch.uint8)
        device.pin(self._memory)
        self.num_records = num_records
        self.resident = num_records >= LAYERS * EXPERTS
        held = num_records if self.resident else num_records // 2
        self.contents = [divmod(at, EXPERTS) for at in range(min(held, LAYERS * EXPERTS))]
        self.failing: set[ExpertKey] = set()
        self.reads: list[ExpertKey] = []
        for at, (layer, expert) in enumerate(self.contents):
            self.fill(layer, expert, self._memory[at])

    def record(self, at: int) -> Tensor:
        return self._memory[at]

    def fill(self, layer: int, expert: int, record: Tensor) -> None:
        record[: record_bytes(layer, expert)] = 16 * layer + expert

    def read(self, layer: int, expert: int, record: Tensor) -> int:
        key = ExpertKey(layer, expert)
        self.reads.append(key)
        if key in self.failing:
            raise OSError(f"{key} cannot be read")
        self.fill(layer, expert, record)
        return 512

    def record_bytes(self, layer: int, expert: int) -> int:
        return record_bytes(layer, expert)


class Rig:
    """An engine over a fake tier and slots on the device."""

    def __init__(
        self,
        num_records: int = LAYERS * EXPERTS,
        seed: int = 0,
        readers: int = 2,
        may_pin: Callable[[], bool] = lambda: True,
    ) -> None:
        self.device = HostDevice(seed, may_pin=may_pin)
        self.tier = FakeTier(self.device, num_records)
        self.recorder = Recorder()
        self.step = self.recorder.begin("decode")
        self._mode = host_tensors(self.device)
        self._mode.__enter__()
        self.slots = torch.empty(SLOTS, RECORD_BYTES, dtype=torch.uint8, device=DEVICE)
        self.slots.zero_()
        self.engine = StreamTransfer(self.device, self.tier, self.slots, self.recorder, readers)

    def close(self) -> None:
        try:
            self.engine.close()
        finally:
            self._mode.__exit__(None, None, None)

    def demand(self, layer: int, expert: int, slot: int) -> Ticket:
        return self.engine.submit(ExpertKey(layer, expert), slot, Priority.DEMAND)

    def ahead(self, layer: int, expert: int, slot: int) -> Ticket:
        return self.engine.submit(ExpertKey(layer, expert), slot, Priority.PREFETCH)

    def kernel(self, slot: int, nbytes: int) -> Tensor:
        """What a kernel that is launched now finds in a slot."""
        found = self.slots[slot, :nbytes] + 0
        self.engine.launched([slot])
        return found

    def check(self, ticket: Ticket) -> None:
        wanted = words(ticket.key)
        assert self.kernel(ticket.slot, len(wanted)).inner.tolist() == wanted


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(**getattr(request, "param", {}))
    yield made
    made.close()


def test_a_kernel_behind_a_wait_finds_the_expert(rig: Rig) -> None:
    ticket = rig.demand(1, 3, slot=2)
    rig.engine.wait(ticket)
    assert ticket.state is State.DONE
    rig.check(ticket)


def test_the_host_does_not_wait_for_a_copy(rig: Rig) -> None:
    waits = len(rig.device.waits)
    for slot in range(SLOTS):
        rig.engine.wait(rig.demand(0, slot, slot))
    assert len(rig.device.waits) == waits
    assert rig.device.reads == []


def test_two_copies_at_most_are_given_to_the_stream(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.device, "progress", lambda: None)  # nothing goes on by itself
    tickets = [rig.ahead(0, slot, slot) for slot in range(SLOTS)]
    assert [ticket.state for ticket in tickets[:MOST_COPIES]] == [State.RUNNING] * MOST_COPIES
    assert {ticket.state for ticket in tickets[MOST_COPIES:]} == {State.QUEUED}
    rig.engine.wait(tickets[-1])  # overtakes those that no stream was given
    assert tickets[-1].state is State.DONE
    assert [ticket.state for ticket in tickets[2:4]] == [State.QUEUED] * 2
    assert not rig.engine.cancel(tickets[0])
    assert rig.engine.cancel(tickets[2])
    assert tickets[2].state is State.CANCELLED


def test_demands_go_first(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.device, "progress", lambda: None)
    first = [rig.ahead(0, 0, 0), rig.ahead(0, 1, 1)]
    ahead, demand = rig.ahead(0, 2, 2), rig.demand(0, 3, 3)
    assert (demand.state, ahead.state) == (State.QUEUED, State.QUEUED)
    rig.engine.wait(first[0])  # forces the first copy, and no more
    rig.engine.report()
    assert (demand.state, ahead.state) == (State.RUNNING, State.QUEUED)


def test_what_ended_is_reported_once_with_its_times(rig: Rig) -> None:
    ticket = rig.demand(1, 2, slot=0)
    rig.engine.wait(ticket)
    rig.device.synchronize()
    (done,) = rig.engine.report()
    assert done is ticket
    assert rig.engine.report() == []
    spans = {event.kind: event for event in rig.step.events}
    moved = spans["transfer"]
    assert (moved.layer, moved.expert, moved.moved_bytes) == (1, 2, record_bytes(1, 2))
    assert moved.start_s <= moved.end_s <= rig.recorder.clock()
    stall = spans["stall"]
    assert (stall.layer, stall.expert) == (1, 2)
    assert stall.start_s <= stall.end_s
    assert rig.step.moved_bytes == record_bytes(1, 2)


@pytest.mark.parametrize("rig", [{"num_records": 4}], indirect=True)
def test_experts_on_the_disk_pass_through_host_records(rig: Rig) -> None:
    wanted = [ExpertKey(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
    for at, key in enumerate(wanted):
        ticket = rig.engine.submit(key, at % SLOTS, Priority.DEMAND)
        rig.engine.wait(ticket)
        rig.check(ticket)
    assert set(rig.tier.reads) == set(wanted) - {ExpertKey(0, 0), ExpertKey(0, 1)}
    assert rig.step.read_bytes <= 512 * len(rig.tier.reads)


@pytest.mark.parametrize("rig", [{"num_records": 6}], indirect=True)
def test_what_is_asked_for_most_stays_in_host_memory(rig: Rig) -> None:
    hot = [ExpertKey(0, 0), ExpertKey(1, 5)]
    for turn in range(20):
        for key in (*hot, ExpertKey(2, turn % EXPERTS)):
            ticket = rig.engine.submit(key, turn % SLOTS, Priority.DEMAND)
            rig.engine.wait(ticket)
            rig.check(ticket)
        rig.device.synchronize()
        rig.engine.report()
    assert rig.tier.reads.count(hot[0]) == 0
    assert rig.tier.reads.count(hot[1]) == 1


@pytest.mark.parametrize("rig", [{"num_records": 4}], indirect=True)
def test_a_read_that_fails_raises_where_it_is_waited_for(rig: Rig) -> None:
    key = ExpertKey(2, 6)
    rig.tier.failing.add(key)
    for _ in range(6):  # more often than there are records: none is lost
        ticket = rig.engine.submit(key, 0, Priority.DEMAND)
        with pytest.raises(OSError, match="cannot be read"):
            rig.engine.wait(ticket)
        assert ticket.state is State.FAILED
    rig.tier.failing.clear()
    ticket = rig.engine.submit(key, 0, Priority.DEMAND)
    rig.engine.wait(ticket)
    rig.check(ticket)


@pytest.mark.parametrize("num_records", [3, 6, LAYERS * EXPERTS])
@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_calls_and_of_streams(num_records: int, seed: int) -> None:
    """Slots hold what was asked for, whoever is waited for, withdrawn or overwritten."""
    rig, rng = Rig(num_records, seed), random.Random(seed)
    held: dict[int, Ticket] = {}  # by slot
    try:
        for _ in range(150):
            choice = rng.random()
            free = [slot for slot in range(SLOTS) if slot not in held or held[slot].ended]
            key = ExpertKey(rng.randrange(LAYERS), rng.randrange(EXPERTS))
            asked = any(ticket.key == key and not ticket.ended for ticket in held.values())
            if choice < 0.5 and free and not asked:
                priority = rng.choice(list(Priority))
                slot = rng.choice(free)
                held[slot] = rig.engine.submit(key, slot, priority)
            elif choice < 0.8 and held:
                ticket = held[rng.choice(list(held))]
                if ticket.state is not State.CANCELLED:
                    rig.engine.wait(ticket)
                    rig.check(ticket)
            elif choice < 0.9 and held:
                slot = rng.choice(list(held))
                if not held[slot].ended and rig.engine.cancel(held[slot]):
                    del held[slot]
            elif choice < 0.95:
                rig.engine.report()
            else:
                rig.engine.quiesce()
                assert all(ticket.ended for ticket in held.values())
                held = {s: t for s, t in held.items() if t.state is State.DONE}
        for ticket in held.values():
            rig.engine.wait(ticket)
            rig.check(ticket)
    finally:
        rig.close()


def test_a_slot_overwritten_under_a_kernel_is_a_race() -> None:
    rig = Rig()
    rig.engine.launched = lambda slots: None  # type: ignore[method-assign]
    rig.engine.wait(rig.demand(0, 0, slot=1))
    rig.kernel(1, 8)
    with pytest.raises(Race, match="copy"):
        rig.demand(0, 1, slot=1)
    rig.close()


def test_a_slot_read_before_its_copy_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    ticket = rig.demand(0, 0, slot=1)
    monkeypatch.setattr(type(rig.device.compute), "after", lambda stream, event: None)
    rig.engine.wait(ticket)
    with pytest.raises(Race, match="add"):
        rig.kernel(1, 8)
    monkeypatch.undo()
    rig.close()


def test_the_arena_is_not_copied_to_before_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.slots.zero_()  # behind the engine, which no stream was told of
    with pytest.raises(Race, match="copy"):
        rig.demand(0, 0, slot=1)
    rig.close()


@pytest.mark.parametrize("at", range(1, 12))
def test_an_interrupt_leaves_an_engine_that_goes_on(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It strikes the calling thread where streams are asked for something."""
    rig = Rig(num_records=4, seed=at)
    calls = 0

    progress = rig.device.progress

    def struck() -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        progress()

    monkeypatch.setattr(rig.device, "progress", struck)
    with pytest.raises(KeyboardInterrupt):
        while True:
            for expert in range(EXPERTS):
                rig.engine.wait(rig.demand(2, expert, expert % SLOTS))
    monkeypatch.undo()
    rig.engine.quiesce()
    for expert in range(EXPERTS):
        ticket = rig.demand(1, expert, expert % SLOTS)
        rig.engine.wait(ticket)
        rig.check(ticket)
    rig.close()


def test_memory_that_could_not_be_locked_is_copied_all_the_same() -> None:
    rig = Rig(may_pin=lambda: False)
    assert rig.device.pinned == {}
    rig.engine.wait(ticket := rig.demand(1, 1, slot=0))
    rig.check(ticket)
    rig.close()


def test_counts_of_uses_stay_within_their_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_records, "LARGEST", 1.01)
    records = HostRecords(FakeTier(HostDevice(), LAYERS * EXPERTS))
    hot = ExpertKey(1, 1)
    for _ in range(500):
        at = records.take(hot)
        assert at is not None
        records.give_back(at)
    assert np.isfinite(records._uses).all()
    for _ in range(LAYERS * EXPERTS - 1):
        assert records.claim() != at
    assert records.claim() == at
    assert records.claim() is None
