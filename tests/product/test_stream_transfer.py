"""Copies beside the computation, on a device whose streams go on in any order events allow."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from speq.scheduler import host_records
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.host_records import HostRecords
from speq.scheduler.stream_transfer import MOST_COPIES
from speq.scheduler.transfer import Priority, State
from tests.helpers.host_device import HostDevice, Race
from tests.helpers.host_tensors import host_tensors
from tests.helpers.stream_rig import (
    EXPERTS,
    LAYERS,
    SLOTS,
    FakeTier,
    Rig,
    any_calls,
    record_bytes,
    words,
)


class HostRig(Rig):
    device: HostDevice


@contextmanager
def rig_of(
    num_records: int = LAYERS * EXPERTS,
    seed: int = 0,
    may_pin: Callable[[], bool] = lambda: True,
) -> Iterator[HostRig]:
    device = HostDevice(seed, may_pin=may_pin)
    with host_tensors(device):
        made = HostRig(device, num_records)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[HostRig]:
    with rig_of(**getattr(request, "param", {})) as made:
        yield made


def test_a_kernel_behind_a_wait_finds_the_expert(rig: HostRig) -> None:
    ticket = rig.demand(1, 3, slot=2)
    rig.engine.wait(ticket)
    assert ticket.state is State.DONE
    rig.check(ticket)


def test_the_host_does_not_wait_for_a_copy(rig: HostRig) -> None:
    waits = len(rig.device.waits)
    for slot in range(SLOTS):
        rig.engine.wait(rig.demand(0, slot, slot))
    assert len(rig.device.waits) == waits
    assert rig.device.reads == []


def test_two_copies_at_most_are_given_to_the_stream(
    rig: HostRig, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize("rig", [{"num_records": 4}], indirect=True)
def test_lent_records_are_read_again_where_others_took_their_place(rig: HostRig) -> None:
    """As when an expert was chosen, and then others of its layer came through host memory."""
    assert rig.engine.holds(ExpertKey(0, 0))
    for expert in (3, 4, 5, 6):
        rig.engine.wait(rig.demand(1, expert, slot=expert - 3))
    assert not rig.engine.holds(ExpertKey(0, 0))
    read_bytes = rig.step.read_bytes
    with rig.engine.lend_records(0, [0, 1]) as records:
        for expert, record in records.items():
            assert record.tolist() == words(ExpertKey(0, expert))
    assert rig.tier.reads.count(ExpertKey(0, 0)) == 1
    assert rig.step.read_bytes - read_bytes in (512, 1024)
    # What cannot be read keeps no record.
    rig.tier.failing.add(ExpertKey(2, 0))
    for _ in range(5):
        with pytest.raises(OSError, match="cannot be read"), rig.engine.lend_records(2, [0]):
            pass
    with rig.engine.lend_records(2, [1, 2, 3, 4]) as records:
        assert [record.tolist() for record in records.values()] == [
            words(ExpertKey(2, expert)) for expert in (1, 2, 3, 4)
        ]


def test_demands_go_first(rig: HostRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.device, "progress", lambda: None)
    first = [rig.ahead(0, 0, 0), rig.ahead(0, 1, 1)]
    ahead, demand = rig.ahead(0, 2, 2), rig.demand(0, 3, 3)
    assert (demand.state, ahead.state) == (State.QUEUED, State.QUEUED)
    rig.engine.wait(first[0])  # forces the first copy, and no more
    rig.engine.report()
    assert (demand.state, ahead.state) == (State.RUNNING, State.QUEUED)


def test_what_ended_is_reported_once_with_its_times(rig: HostRig) -> None:
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
def test_experts_on_the_disk_pass_through_host_records(rig: HostRig) -> None:
    wanted = [ExpertKey(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
    for at, key in enumerate(wanted):
        ticket = rig.engine.submit(key, at % SLOTS, Priority.DEMAND)
        rig.engine.wait(ticket)
        rig.check(ticket)
    assert set(rig.tier.reads) == set(wanted) - {ExpertKey(0, 0), ExpertKey(0, 1)}
    assert rig.step.read_bytes <= 512 * len(rig.tier.reads)


@pytest.mark.parametrize("rig", [{"num_records": 6}], indirect=True)
def test_what_is_asked_for_most_stays_in_host_memory(rig: HostRig) -> None:
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
def test_a_read_that_fails_raises_where_it_is_waited_for(rig: HostRig) -> None:
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
    with rig_of(num_records, seed) as rig:
        any_calls(rig, seed, 150)


def test_a_slot_overwritten_under_a_kernel_is_a_race(rig: HostRig) -> None:
    rig.engine.launched = lambda slots: None  # type: ignore[method-assign]
    rig.engine.wait(rig.demand(0, 0, slot=1))
    rig.kernel(1, 8)
    with pytest.raises(Race, match="copy"):
        rig.demand(0, 1, slot=1)


def test_a_slot_read_before_its_copy_is_a_race(
    rig: HostRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = rig.demand(0, 0, slot=1)
    monkeypatch.setattr(type(rig.device.compute), "after", lambda stream, event: None)
    rig.engine.wait(ticket)
    with pytest.raises(Race, match="add"):
        rig.kernel(1, 8)
    monkeypatch.undo()


def test_the_arena_is_not_copied_to_before_it_was_made(rig: HostRig) -> None:
    rig.slots.zero_()  # behind the engine, which no stream was told of
    with pytest.raises(Race, match="copy"):
        rig.demand(0, 0, slot=1)


@pytest.mark.parametrize("at", range(1, 12))
def test_an_interrupt_leaves_an_engine_that_goes_on(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It strikes the calling thread where streams are asked for something."""
    with rig_of(num_records=4, seed=at) as rig:
        calls, progress = 0, rig.device.progress

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
        rig.engine.drain()
        for expert in range(EXPERTS):
            ticket = rig.demand(1, expert, expert % SLOTS)
            rig.engine.wait(ticket)
            rig.check(ticket)


def test_memory_that_could_not_be_locked_is_copied_all_the_same() -> None:
    with rig_of(may_pin=lambda: False) as rig:
        assert rig.device.pinned == {}
        rig.engine.wait(ticket := rig.demand(1, 1, slot=0))
        rig.check(ticket)


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
