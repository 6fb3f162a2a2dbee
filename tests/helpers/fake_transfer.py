"""Slow tiers that do as a test says: transfers without bytes, reads behind gates, and a clock."""

import random
import threading
from collections.abc import Callable, Collection

from torch import Tensor

from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.transfer import Fetch, Priority, State, TransferTicket

# Of waiting for another thread. Only a test that fails takes so long.
LIMIT_S = 60.0


class Clock:
    """Seconds as a test sets them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeTransfer:
    """A TransferEngine whose transfers end when they are waited for, or when the test says so.

    Like readers or a GPU's copy engine it carries `depth` at a time, demand before prefetch, each
    in the order asked for; they end in any order.

    rng         ends some at random at every call
    contents    of each slot: its expert, or None where that is undefined
    failing     what the transfers of some experts raise
    interrupts  names of calls that are interrupted, once each
    asked       all that was submitted, as it was; `begun` in the order of its beginning
    calls       other calls, in their order
    """

    def __init__(self, rng: random.Random | None = None, depth: int = 2) -> None:
        self.rng = rng
        self.depth = depth
        self.contents: dict[int, ExpertKey | None] = {}
        self.failing: dict[ExpertKey, BaseException] = {}
        self.interrupts: set[str] = set()
        self.asked: list[tuple[ExpertKey, Priority]] = []
        self.begun: list[ExpertKey] = []
        self.calls: list[str] = []
        self._open: list[TransferTicket] = []
        self._done: list[TransferTicket] = []

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> TransferTicket:
        assert "close" not in self.calls
        for other in self._open:
            assert slot != other.slot, f"{other} is still written to"
            assert key != other.key, f"{other} was asked for twice"
        ticket = TransferTicket(key, slot, priority)
        self.asked.append((key, priority))
        self.contents[slot] = None
        self._open.append(ticket)
        self._advance()
        return ticket

    def hasten(self, ticket: TransferTicket) -> None:
        ticket.priority = Priority.DEMAND
        self._advance()

    def wait(self, ticket: TransferTicket) -> None:
        self.calls.append("wait")
        assert ticket.state is not State.CANCELLED
        ticket.priority = Priority.DEMAND
        self._interrupt("wait")
        if ticket.state is State.QUEUED:
            if len(self.running) == self.depth:
                self._end(self._choose(self.running))
            if ticket.state is State.QUEUED:
                self._begin(ticket)
        if not ticket.ended:
            self._end(ticket)
        self._advance()
        if ticket.error is not None:
            raise ticket.error

    def cancel(self, ticket: TransferTicket) -> bool:
        self.calls.append("cancel")
        self._advance()
        if ticket.state is not State.QUEUED:
            return False
        self._withdraw(ticket)
        return True

    def launched(self, slots: Collection[int]) -> None:
        assert not self.open_slots & set(slots), "a slot that is written to was read"

    def report(self) -> list[TransferTicket]:
        done, self._done = self._done, []
        return done

    def held_below(self) -> list[ExpertKey] | None:
        return None

    def drain(self) -> None:
        self.calls.append("quiesce")
        for ticket in self._in(State.QUEUED):
            self._withdraw(ticket)
        self._interrupt("quiesce")
        self.end_all()

    def close(self) -> None:
        self.drain()
        self.calls.append("close")

    @property
    def running(self) -> list[TransferTicket]:
        return self._in(State.RUNNING)

    @property
    def open_slots(self) -> set[int]:
        """Slots that may still be written to."""
        return {ticket.slot for ticket in self._open}

    @property
    def open_keys(self) -> list[ExpertKey]:
        return [ticket.key for ticket in self._open]

    def end(self, key: ExpertKey) -> None:
        """Let a transfer that is running end."""
        (ticket,) = [ticket for ticket in self.running if ticket.key == key]
        self._end(ticket)

    def end_some(self) -> None:
        """Let a random part of what is under way end, in random order."""
        assert self.rng is not None
        while self.running and self.rng.random() < 0.5:
            self._end(self._choose(self.running))

    def end_all(self) -> None:
        while self.running:
            self._end(self._choose(self.running))

    def _in(self, state: State) -> list[TransferTicket]:
        return [ticket for ticket in self._open if ticket.state is state]

    def _choose(self, tickets: list[TransferTicket]) -> TransferTicket:
        return tickets[0] if self.rng is None else self.rng.choice(tickets)

    def _interrupt(self, call: str) -> None:
        if call in self.interrupts:
            self.interrupts.remove(call)
            raise KeyboardInterrupt

    def _advance(self) -> None:
        self._fill_up()
        if self.rng is not None:
            self.end_some()

    def _fill_up(self) -> None:
        while len(self.running) < self.depth and (queued := self._in(State.QUEUED)):
            self._begin(min(queued, key=lambda ticket: ticket.priority))

    def _begin(self, ticket: TransferTicket) -> None:
        assert len(self.running) < self.depth
        ticket.state = State.RUNNING
        self.begun.append(ticket.key)

    def _end(self, ticket: TransferTicket) -> None:
        self._open.remove(ticket)
        ticket.error = self.failing.get(ticket.key)
        if ticket.error is None:
            self.contents[ticket.slot] = ticket.key
        ticket.state = State.DONE if ticket.error is None else State.FAILED
        if ticket.error is None:
            self._done.append(ticket)
        ticket.finished.release()
        self._fill_up()

    def _withdraw(self, ticket: TransferTicket) -> None:
        self._open.remove(ticket)
        ticket.state = State.CANCELLED


class Gates:
    """A fetch whose reads end when the test opens them, each for itself.

    begun, ended  keys in that order; `most` reads were under way at a time, and `most_of` a layer
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._changed = threading.Condition()
        self._open: set[ExpertKey] = set()
        self.begun: list[ExpertKey] = []
        self.ended: list[ExpertKey] = []
        self.most = 0
        self.most_of: dict[int, int] = {}

    def __call__(self, key: ExpertKey, record: Tensor) -> int:
        with self._changed:
            self.begun.append(key)
            running = self._running()
            of_layer = sum(other.layer == key.layer for other in running)
            self.most = max(self.most, len(running))
            self.most_of[key.layer] = max(self.most_of.get(key.layer, 0), of_layer)
            self._changed.notify_all()
            self._until(lambda: key in self._open, f"{key} was never opened")
        try:
            return self._fetch(key, record)
        finally:
            with self._changed:
                self.ended.append(key)
                self._changed.notify_all()

    def open(self, *keys: ExpertKey) -> None:
        with self._changed:
            self._open.update(keys)
            self._changed.notify_all()

    def await_running(self, keys: set[ExpertKey]) -> None:
        """Return when just these reads are under way."""
        with self._changed:
            self._until(lambda: self._running() == keys, f"never just {keys} under way")

    def _running(self) -> set[ExpertKey]:
        return set(self.begun) - set(self.ended)

    def _until(self, condition: Callable[[], bool], failure: str) -> None:
        if not self._changed.wait_for(condition, LIMIT_S):
            raise TimeoutError(failure)


class Reordering:
    """A fetch that holds some reads back until another one that is under way has ended.

    Where all that are under way are held, the one held longest goes: no number of readers, and no
    end of what is asked for, can make it wait for ever.
    """

    def __init__(self, fetch: Fetch, seed: int) -> None:
        self._fetch = fetch
        self._rng = random.Random(seed)
        self._changed = threading.Condition()
        self._under_way = 0
        self._held: list[object] = []

    def __call__(self, key: ExpertKey, record: Tensor) -> int:
        turn = object()
        with self._changed:
            self._under_way += 1
            if self._rng.random() < 0.5:
                self._held.append(turn)
                if len(self._held) == self._under_way:
                    self._held.pop(0)
                    self._changed.notify_all()
                let_go = self._changed.wait_for(lambda: turn not in self._held, LIMIT_S)
                assert let_go, f"{key} was held for ever"
        try:
            return self._fetch(key, record)
        finally:
            with self._changed:
                self._under_way -= 1
                self._held.clear()
                self._changed.notify_all()
