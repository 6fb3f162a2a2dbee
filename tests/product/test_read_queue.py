"""Reader threads: what is read, in which order, how much at a time, and how they end."""

import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import pytest
import torch
from torch import Tensor

from speq.errors import Broken
from speq.scheduler import read_queue
from speq.scheduler.eviction import LruPolicy
from speq.scheduler.expert_cache import ExpertCache
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.read_queue import ReaderThreads
from speq.scheduler.transfer import Fetch, Priority, State, TransferTicket
from speq.stats import Recorder, TimeSpan
from tests.helpers.fake_transfer import LIMIT_S, Clock, Gates, Reordering
from tests.helpers.held_collections import held_collections
from tests.helpers.paths import ROOT

READERS = [1, 2, 3, 8]
SLOT_BYTES = 16


def slot_bytes(key: ExpertKey) -> int:
    return SLOT_BYTES


def bytes_of(key: ExpertKey) -> list[int]:
    """Different in every byte from those of other experts."""
    return [(31 * key.layer + 7 * key.expert + n) % 256 for n in range(SLOT_BYTES)]


def read(key: ExpertKey, record: Tensor) -> int:
    record.copy_(torch.tensor(bytes_of(key), dtype=torch.uint8))
    return 1000 + key.expert


class Rig:
    """An engine, its slots and its record. Closed by the fixture below."""

    def __init__(
        self, fetch: Fetch, readers: int, slots: int = 40, clock: Callable[[], float] | None = None
    ) -> None:
        self.slots = torch.zeros(slots, SLOT_BYTES, dtype=torch.uint8)
        self.recorder = Recorder(clock or Clock())
        self.step = self.recorder.begin("decode")
        self.engine = ReaderThreads(fetch, self.slots, slot_bytes, self.recorder, readers)

    def submit(
        self, *keys: ExpertKey, priority: Priority = Priority.DEMAND
    ) -> dict[ExpertKey, TransferTicket]:
        """Each into a slot that tells its layer and its number."""
        return {k: self.engine.submit(k, 10 * k.layer + k.expert, priority) for k in keys}

    def bytes_at(self, ticket: TransferTicket) -> list[int]:
        return self.slots[ticket.slot].tolist()

    def events(self, kind: str) -> list[TimeSpan]:
        return [event for event in self.step.events if event.kind == kind]


MakeRig = Callable[..., Rig]


@pytest.fixture
def rig() -> Iterator[MakeRig]:
    made: list[Rig] = []
    gates: list[Gates] = []

    def make(fetch: Fetch, *args: object, **kwargs: object) -> Rig:
        if isinstance(fetch, Gates):
            gates.append(fetch)
        made.append(Rig(fetch, *args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for gate in gates:  # those of a test that failed
        gate.open(*ALL)
    for each in made:
        each.engine.close()


def layer_keys(layer: int, count: int) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for expert in range(count)]


ALL = [key for layer in range(4) for key in layer_keys(layer, 10)]


def reader_names() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("speq-reader")]


class Model:
    """What is to be under way: demands in their order, then prefetches, as far as they may."""

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self.waiting: list[ExpertKey] = []
        self.running: set[ExpertKey] = set()
        self.prefetches: set[ExpertKey] = set()

    def fill_up(self) -> None:
        while len(self.running) < self.readers and (key := self.next()) is not None:
            self.waiting.remove(key)
            self.running.add(key)

    def next(self) -> ExpertKey | None:
        demands = [key for key in self.waiting if key not in self.prefetches]
        if demands:
            return demands[0]
        may_prefetch = len(self.running & self.prefetches) < max(1, self.readers - 1)
        return self.waiting[0] if self.waiting and may_prefetch else None


@pytest.mark.parametrize("readers", READERS)
def test_reads_under_way_are_those_of_a_model(rig: MakeRig, readers: int) -> None:
    """Whatever is asked for, withdrawn and ends, in random order; nothing goes on by itself."""
    for seed in range(6):
        rng = random.Random(100 * readers + seed)
        gates, model = Gates(read), Model(readers)
        made = rig(gates, readers)
        unasked, tickets = rng.sample(ALL, len(ALL)), dict[ExpertKey, TransferTicket]()
        withdrawn: set[ExpertKey] = set()
        while unasked or model.running:
            turn = rng.random()
            if unasked and turn < 0.5:
                key = unasked.pop()
                priority = rng.choice(list(Priority))
                if priority is Priority.PREFETCH:
                    model.prefetches.add(key)
                model.waiting.append(key)
                tickets |= made.submit(key, priority=priority)
            elif model.waiting and turn < 0.6:
                key = rng.choice(model.waiting)
                assert made.engine.cancel(tickets[key])
                model.waiting.remove(key)
                withdrawn.add(key)
            elif model.running:
                key = rng.choice(sorted(model.running))
                assert not made.engine.cancel(tickets[key])
                gates.open(key)
                model.running.remove(key)
            model.fill_up()
            gates.await_running(model.running)
        made.engine.drain()
        for key, ticket in tickets.items():
            assert ticket.state is (State.CANCELLED if key in withdrawn else State.DONE)
            assert made.bytes_at(ticket) == ([0] * 16 if key in withdrawn else bytes_of(key))
        assert set(gates.begun) == set(ALL) - withdrawn
        assert gates.most <= readers
        made.engine.close()


@pytest.mark.parametrize("readers", READERS)
def test_contents_are_right_in_whatever_order_reads_end(rig: MakeRig, readers: int) -> None:
    for seed in range(5):
        rng = random.Random(seed)
        made = rig(Reordering(read, seed), readers)
        tickets: dict[ExpertKey, TransferTicket] = {}
        for key in rng.sample(ALL, len(ALL)):
            tickets |= made.submit(key, priority=rng.choice(list(Priority)))
        for key in rng.sample(ALL, len(ALL)):
            made.engine.wait(tickets[key])
            assert tickets[key].state is State.DONE
            assert made.bytes_at(tickets[key]) == bytes_of(key)
            assert not made.engine.cancel(tickets[key])
        made.engine.close()


@pytest.mark.parametrize("readers", READERS)
def test_a_supply_over_threads(rig: MakeRig, readers: int) -> None:
    """Waves hold what they say while readers write to other slots."""
    rng = random.Random(readers)
    made = rig(Reordering(read, readers), readers, slots=9)
    loader = ExpertLoader(ExpertCache(9, LruPolicy(9, 3, 8)), made.engine, made.recorder)

    def look_ahead() -> None:
        for key in rng.sample(ALL[:30], 2):
            loader.load(key, Priority.PREFETCH)

    for _ in range(150):
        layer, asked = rng.randrange(3), sorted(rng.sample(range(10), rng.randint(1, 10)))
        served: list[int] = []
        for wave in loader.serve(layer, asked, look_ahead, rng.choice([None, 2])):
            for expert, slot in wave.items():
                assert made.slots[slot].tolist() == bytes_of(ExpertKey(layer, expert))
            served += wave
        assert sorted(served) == asked
        if rng.random() < 0.05:
            loader.forget()


@pytest.mark.parametrize("readers", READERS)
def test_prefetches_leave_a_reader_to_demands(rig: MakeRig, readers: int) -> None:
    gates = Gates(read)
    made = rig(gates, readers)
    prefetches, demands = layer_keys(1, 10), layer_keys(0, 3)
    made.submit(*prefetches, priority=Priority.PREFETCH)
    limit = max(1, readers - 1)
    gates.await_running(set(prefetches[:limit]))
    tickets = made.submit(*demands)
    gates.open(*demands)
    if readers > 1:
        # They go past the prefetches that wait, while all those that began are still under way.
        for ticket in tickets.values():
            made.engine.wait(ticket)
        assert set(gates.begun) == {*prefetches[:limit], *demands}
    gates.open(*prefetches)
    for ticket in tickets.values():
        made.engine.wait(ticket)
    assert [key for key in gates.begun if key.layer == 0] == demands
    made.engine.drain()
    assert gates.most_of[1] <= limit
    assert gates.most <= readers


class WaitingClock(Clock):
    """Calls `on_wait` when the test's own thread reads it, which it does as it begins to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = threading.current_thread()
        self.on_wait: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        now = self.now
        if threading.current_thread() is self.owner:
            self.on_wait()
        return now


def test_a_prefetch_that_is_waited_for_comes_next(rig: MakeRig) -> None:
    gates, clock = Gates(read), WaitingClock()
    made = rig(gates, 1, clock=clock)
    first, second, third, fourth = layer_keys(0, 4)
    tickets = made.submit(first, second, third, fourth, priority=Priority.PREFETCH)
    gates.await_running({first})
    gates.open(second, third, fourth)
    clock.on_wait = lambda: gates.open(first)
    made.engine.wait(tickets[third])
    made.engine.wait(tickets[fourth])
    made.engine.wait(tickets[second])
    assert gates.begun[:2] == [first, third]
    assert sorted(gates.begun) == [first, second, third, fourth]


def test_a_prefetch_that_is_waited_for_takes_the_reader_kept_for_demands(rig: MakeRig) -> None:
    gates = Gates(read)
    made = rig(gates, 2)
    first, second = layer_keys(0, 2)
    tickets = made.submit(first, second, priority=Priority.PREFETCH)
    gates.await_running({first})
    gates.open(second)
    made.engine.wait(tickets[second])
    assert tickets[first].state is State.RUNNING
    assert made.bytes_at(tickets[second]) == bytes_of(second)
    gates.open(first)


@pytest.mark.parametrize("readers", READERS)
def test_quiesce_returns_when_nothing_is_under_way(rig: MakeRig, readers: int) -> None:
    """Fetches look whether it did, from inside: it may not, as long as one of them is there."""
    gates, returned, seen = Gates(read), threading.Event(), []

    def fetch(key: ExpertKey, record: Tensor) -> int:
        result = gates(key, record)
        seen.append(returned.is_set())
        return result

    made = rig(fetch, readers)
    tickets = made.submit(*layer_keys(0, 10))
    begun = set(layer_keys(0, min(readers, 10)))
    gates.await_running(begun)
    opener = threading.Thread(target=gates.open, args=layer_keys(0, 10))
    opener.start()
    made.engine.drain()
    returned.set()
    opener.join()
    assert begun <= set(gates.begun)
    assert len(seen) == len(gates.begun)
    assert not any(seen)
    for key, ticket in tickets.items():
        assert ticket.state is (State.DONE if key in gates.begun else State.CANCELLED)
    # It may be asked for again, and the engine goes on.
    made.engine.drain()
    gates.open(ExpertKey(1, 0))
    (after,) = made.submit(ExpertKey(1, 0)).values()
    made.engine.wait(after)
    assert made.bytes_at(after) == bytes_of(ExpertKey(1, 0))


@pytest.mark.parametrize("readers", READERS)
def test_errors_are_raised_where_they_are_waited_for(rig: MakeRig, readers: int) -> None:
    bad = {ExpertKey(0, 2), ExpertKey(0, 5)}
    fetched_in = set()

    def fetch(key: ExpertKey, record: Tensor) -> int:
        fetched_in.add(threading.current_thread())
        if key in bad:
            raise OSError(f"cannot read {key.expert}")
        return read(key, record)

    made = rig(fetch, readers)
    tickets = made.submit(*layer_keys(0, 8))
    for key, ticket in tickets.items():
        if key in bad:
            with pytest.raises(OSError, match=f"cannot read {key.expert}"):
                made.engine.wait(ticket)
            assert (ticket.state, ticket.ended) == (State.FAILED, True)
        else:
            made.engine.wait(ticket)
            assert made.bytes_at(ticket) == bytes_of(key)
    assert threading.current_thread() not in fetched_in
    made.engine.drain()
    moved = {(event.layer, event.expert) for event in made.events("transfer")}
    assert moved == {(0, key.expert) for key in tickets} - {(0, 2), (0, 5)}
    # The same ones later, when the disk is back.
    bad.clear()
    for key, ticket in made.submit(*tickets).items():
        made.engine.wait(ticket)
        assert made.bytes_at(ticket) == bytes_of(key)


def test_close_waits_for_reads_under_way(rig: MakeRig) -> None:
    gates, closed, seen = Gates(read), threading.Event(), []

    def fetch(key: ExpertKey, record: Tensor) -> int:
        result = gates(key, record)
        seen.append(closed.is_set())
        return result

    before = reader_names()
    made = rig(fetch, 3)
    assert len(reader_names()) == len(before) + 3
    tickets = made.submit(*layer_keys(0, 10))
    gates.await_running(set(layer_keys(0, 3)))
    opener = threading.Thread(target=gates.open, args=layer_keys(0, 10))
    opener.start()
    made.engine.close()
    closed.set()
    opener.join()
    assert reader_names() == before
    assert len(seen) == len(gates.begun) >= 3
    assert not any(seen)
    done = {key for key, ticket in tickets.items() if ticket.state is State.DONE}
    assert done == set(gates.begun)
    assert len(made.events("transfer")) == len(done)
    made.engine.close()
    assert reader_names() == before
    with pytest.raises(Broken, match="closed"):
        made.submit(ExpertKey(1, 0))


def test_an_engine_that_is_dropped_ends_its_threads() -> None:
    slots = torch.zeros(4, SLOT_BYTES, dtype=torch.uint8)
    before = set(threading.enumerate())
    engine = ReaderThreads(read, slots, slot_bytes, Recorder(), 3)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 3
    engine.wait(engine.submit(ExpertKey(0, 1), 2, Priority.DEMAND))
    del engine
    gc.collect()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_an_engine_that_is_dropped_by_its_own_reader_ends_its_threads() -> None:
    """As where garbage is collected in it: nobody can wait for himself."""
    gates, held = Gates(read), list[ReaderThreads]()
    slots = torch.zeros(4, SLOT_BYTES, dtype=torch.uint8)

    def fetch(key: ExpertKey, record: Tensor) -> int:
        result = gates(key, record)
        held.clear()
        gc.collect()
        return result

    before = set(threading.enumerate())
    held.append(ReaderThreads(fetch, slots, slot_bytes, Recorder(), 2))
    threads = set(threading.enumerate()) - before
    ticket = held[0].submit(ExpertKey(0, 1), 1, Priority.DEMAND)
    gates.open(ExpertKey(0, 1))
    assert ticket.finished.acquire(timeout=LIMIT_S)
    assert ticket.state is State.DONE
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_an_engine_that_is_dropped_within_a_read_ends_its_threads() -> None:
    """Nobody waits for them, then: whoever collects garbage may be a reader."""
    gates = Gates(read)
    slots = torch.zeros(4, SLOT_BYTES, dtype=torch.uint8)
    before = set(threading.enumerate())
    held = [ReaderThreads(gates, slots, slot_bytes, Recorder(), 2)]

    def fetch_last(key: ExpertKey, record: Tensor) -> int:
        held.clear()  # the other one ends in this one's thread
        gc.collect()
        return read(key, record)

    threads = set(threading.enumerate()) - before
    first = held[0].submit(ExpertKey(0, 1), 1, Priority.DEMAND)
    gates.await_running({ExpertKey(0, 1)})
    gates.open(ExpertKey(0, 1))
    outer = ReaderThreads(fetch_last, slots, slot_bytes, Recorder(), 1)
    outer.wait(outer.submit(ExpertKey(0, 2), 2, Priority.DEMAND))
    assert first.state is State.DONE
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert slots[1:3].tolist() == [bytes_of(ExpertKey(0, 1)), bytes_of(ExpertKey(0, 2))]
    outer.close()


@pytest.mark.parametrize("readers", READERS)
def test_each_read_is_entered_once(rig: MakeRig, readers: int) -> None:
    made = rig(Reordering(read, readers), readers)
    for keys in (ALL[:15], ALL[15:]):
        for ticket in made.submit(*keys, priority=Priority.PREFETCH).values():
            made.engine.wait(ticket)
    made.engine.drain()
    transfers = made.events("transfer")
    assert sorted((event.layer, event.expert) for event in transfers) == ALL
    for event in transfers:
        assert event.expert is not None
        assert (event.moved_bytes, event.read_bytes) == (SLOT_BYTES, 1000 + event.expert)
    assert made.step.moved_bytes == SLOT_BYTES * len(ALL)
    assert made.step.read_bytes == sum(1000 + key.expert for key in ALL)


def test_times_of_a_read_and_of_waiting_for_it(rig: MakeRig) -> None:
    gates, clock = Gates(read), WaitingClock()
    key, unwaited = ExpertKey(1, 2), ExpertKey(0, 3)

    def fetch(key: ExpertKey, record: Tensor) -> int:
        result = gates(key, record)
        clock.now += 3.0
        return result

    made = rig(fetch, 1, clock=clock)
    clock.now = 1.0
    (ticket,) = made.submit(key).values()
    gates.await_running({key})
    clock.on_wait = lambda: gates.open(key)
    made.engine.wait(ticket)
    assert made.events("stall") == [TimeSpan("stall", 1.0, 4.0, 1, 2)]
    assert made.events("transfer") == [
        TimeSpan("transfer", 1.0, 4.0, 1, 2, moved_bytes=SLOT_BYTES, read_bytes=1002, reader=0)
    ]

    # One that has arrived before it is waited for stalls nobody, nor does waiting again.
    gates.open(unwaited)
    (early,) = made.submit(unwaited).values()
    assert early.finished.acquire(timeout=LIMIT_S)
    early.finished.release()
    made.engine.wait(early)
    made.engine.wait(early)
    made.engine.wait(ticket)
    assert len(made.events("stall")) == 1
    assert made.events("transfer")[1:] == [
        TimeSpan("transfer", 4.0, 7.0, 0, 3, moved_bytes=SLOT_BYTES, read_bytes=1003, reader=0)
    ]
    assert (made.step.stall_s, made.step.transfer_s) == (3.0, 6.0)


def test_what_was_asked_for_ahead_stays_so(rig: MakeRig) -> None:
    """Also where it was waited for in the end; and each of two readers enters its own reads."""
    gates = Gates(read)
    made = rig(gates, 2)
    ahead, demand = ExpertKey(0, 1), ExpertKey(1, 4)
    (early,) = made.submit(ahead, priority=Priority.PREFETCH).values()
    (late,) = made.submit(demand).values()
    gates.await_running({ahead, demand})
    gates.open(ahead, demand)
    made.engine.wait(late)
    made.engine.hasten(early)
    made.engine.wait(early)
    transfers = made.events("transfer")
    assert {(event.layer, event.expert, event.ahead) for event in transfers} == {
        (*ahead, True),
        (*demand, False),
    }
    assert sorted(event.reader or 0 for event in transfers) == [0, 1]
    assert (made.step.moved_bytes, made.step.ahead_bytes) == (2 * SLOT_BYTES, SLOT_BYTES)
    by_layer = {at: (f.ahead_bytes, f.demand_bytes) for at, f in made.step.by_layer.items()}
    assert by_layer == {0: (SLOT_BYTES, 0), 1: (0, SLOT_BYTES)}


def test_waiting_for_a_prefetch_is_a_late_one(rig: MakeRig) -> None:
    gates, clock = Gates(read), WaitingClock()
    key = ExpertKey(2, 3)

    def fetch(key: ExpertKey, record: Tensor) -> int:
        result = gates(key, record)
        clock.now += 3.0
        return result

    made = rig(fetch, 1, clock=clock)
    (ticket,) = made.submit(key, priority=Priority.PREFETCH).values()
    gates.await_running({key})
    clock.on_wait = lambda: gates.open(key)
    made.engine.wait(ticket)
    assert made.events("stall") == [TimeSpan("stall", 0.0, 3.0, *key, ahead=True)]
    assert (made.step.late_s, made.step.by_layer[2].late_s) == (3.0, 3.0)


class Interrupting:
    """Interrupts the main thread from within the first read, once that is about to wait.

    Again until it is heard: a signal that comes just before a lock is waited for only counts when
    the lock is let go.
    """

    heard = threading.Event()

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._struck = False
        self.heard.clear()
        self.begun, self.waiting = threading.Event(), threading.Event()

    def __call__(self, key: ExpertKey, record: Tensor) -> int:
        if not self._struck:
            self._struck = True
            self.begun.set()
            assert self.waiting.wait(LIMIT_S)
            while not self.heard.is_set():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                self.heard.wait(0.01)
        return self._fetch(key, record)


@pytest.fixture
def heeded_interrupts() -> Iterator[None]:
    """Each interrupt counts once, also where a script runs tests with interrupts ignored."""

    def hear(number: int, frame: FrameType | None) -> None:
        if not Interrupting.heard.is_set():
            Interrupting.heard.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, hear)
    with held_collections():
        yield
    signal.signal(signal.SIGINT, before)


needs_signals = pytest.mark.skipif(os.name != "posix", reason="needs signals as POSIX has them")


@needs_signals
@pytest.mark.usefixtures("heeded_interrupts")
@pytest.mark.parametrize("call", ["wait", "quiesce"])
def test_an_interrupt_leaves_the_engine_usable(rig: MakeRig, call: str) -> None:
    """Struck while it waits for a read, which goes on: one may wait for it again."""
    gates = Gates(read)
    fetch = Interrupting(gates)
    made = rig(fetch, 1)
    first, second = layer_keys(0, 2)
    tickets = made.submit(first, second, priority=Priority.PREFETCH)
    assert fetch.begun.wait(LIMIT_S)
    with pytest.raises(KeyboardInterrupt):
        fetch.waiting.set()
        made.engine.wait(tickets[first]) if call == "wait" else made.engine.drain()
    gates.await_running({first})
    assert tickets[first].state is State.RUNNING
    gates.open(first, second)
    made.engine.wait(tickets[first])
    assert made.bytes_at(tickets[first]) == bytes_of(first)
    made.engine.drain()
    assert made.events("transfer")[0].expert == first.expert
    (again,) = made.submit(ExpertKey(1, 0), priority=Priority.PREFETCH).values()
    gates.open(ExpertKey(1, 0))
    made.engine.wait(again)
    assert made.bytes_at(again) == bytes_of(ExpertKey(1, 0))


@needs_signals
@pytest.mark.usefixtures("heeded_interrupts")
def test_close_that_was_interrupted_waits_when_it_is_called_again(rig: MakeRig) -> None:
    """Thread.join takes a thread for ended once it was interrupted (CPython 3.11 and 3.12)."""
    gates, closed, seen = Gates(read), threading.Event(), []

    def look(key: ExpertKey, record: Tensor) -> int:
        result = gates(key, record)
        seen.append(closed.is_set())
        return result

    fetch = Interrupting(look)
    before = set(threading.enumerate())
    made = rig(fetch, 1)
    (reader,) = set(threading.enumerate()) - before
    key = ExpertKey(0, 0)
    (ticket,) = made.submit(key).values()
    assert fetch.begun.wait(LIMIT_S)
    with pytest.raises(KeyboardInterrupt):
        fetch.waiting.set()
        made.engine.close()
    gates.await_running({key})
    try:
        assert reader.is_alive()
    finally:
        opener = threading.Thread(target=gates.open, args=(key,))
        opener.start()
        made.engine.close()
        closed.set()
        opener.join()
    assert seen == [False]
    assert made.bytes_at(ticket) == bytes_of(key)
    assert reader not in threading.enumerate()


def interrupted_at(point: int, call: Callable[[], object]) -> bool:
    """Interrupt a call where Python looks for signals for the `point`th time in the engine's lines:
    as a function begins, and after a call to C. Returns whether it got so far.
    """
    passed = 0

    def strike(frame: FrameType, event: str, _: object) -> None:
        nonlocal passed
        if frame.f_code.co_filename == read_queue.__file__ and event in ("call", "c_return"):
            passed += 1
            if passed == point:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(strike)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.fixture
def limited() -> Iterator[None]:
    """Fails a test that waits for ever in C."""

    def give_up(*_: object) -> None:
        raise TimeoutError("waited for ever")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(int(LIMIT_S))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@needs_signals
@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("call", ["submit", "wait", "quiesce", "close"])
def test_interrupts_may_strike_anywhere(rig: MakeRig, call: str) -> None:
    """With one read under way and one in line: the engine goes on, and so does what was in line."""
    first, queued, third, last = layer_keys(0, 4)
    for point in itertools.count(1):
        gates, clock = Gates(read), WaitingClock()
        made = rig(gates, 1, clock=clock)
        tickets = made.submit(first, queued, priority=Priority.PREFETCH)
        gates.await_running({first})
        gates.open(queued, third, last)
        calls: dict[str, Callable[[], object]] = {
            "submit": partial(made.submit, third),
            "wait": partial(made.engine.wait, tickets[queued]),
            "quiesce": made.engine.drain,
            "close": made.engine.close,
        }
        if call == "wait":
            clock.on_wait = partial(gates.open, first)
        else:
            gates.open(first)
        struck = interrupted_at(point, calls[call])
        gates.open(first)
        if call in ("submit", "wait"):
            made.engine.wait(tickets[queued])
            assert made.bytes_at(tickets[queued]) == bytes_of(queued)
        made.engine.drain()
        assert all(ticket.ended for ticket in tickets.values())
        if call != "close":
            (ticket,) = made.submit(last).values()
            made.engine.wait(ticket)
            assert made.bytes_at(ticket) == bytes_of(last)
        made.engine.close()
        if not struck:
            assert point > 3  # or else nothing was tried
            break


FALLS_OUT_OF_MAIN = """
import atexit, os, threading
import torch
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler import read_queue
from speq.scheduler.read_queue import ReaderThreads
from speq.scheduler.transfer import Priority
from speq.stats import Recorder

begun, go_on = threading.Event(), threading.Event()

def fetch(key, record):
    begun.set()
    assert go_on.wait(30)
    record.fill_(7)
    os.write(1, b"read")
    return 0

slots = torch.zeros(4, 1 << 20, dtype=torch.uint8)
engine = ReaderThreads(fetch, slots, lambda key: 1 << 20, Recorder(), 2)
engine.submit(ExpertKey(0, 0), 0, Priority.DEMAND)
begun.wait()
atexit.register(go_on.set)  # the process is ending by then
raise RuntimeError("out of main")
"""


def test_a_process_ends_though_a_read_is_under_way() -> None:
    """And only after the read: memory it writes to may not go away."""
    process = subprocess.run(
        [sys.executable, "-c", FALLS_OUT_OF_MAIN],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 1, process.stderr
    assert "RuntimeError: out of main" in process.stderr
    assert process.stdout == "read"
