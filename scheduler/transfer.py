"""Moves exact experts from the slow tier into slots: what is asked of every engine that does."""

import threading
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Protocol

from torch import Tensor

from speq.scheduler.expert_key import ExpertKey
from speq.stats import Event, Recorder

# Brings one expert's record into the slot given, [slot_bytes] uint8 on the device, from any thread;
# returns bytes read from the disk. It holds on to nothing that holds on to the engine.
Fetch = Callable[[ExpertKey, Tensor], int]
# What has to be moved to bring an expert into a slot.
MovedBytes = Callable[[ExpertKey], int]


class Priority(IntEnum):
    """Smaller goes first."""

    DEMAND = 0
    PREFETCH = 1


class State(Enum):
    """Of a transfer. The last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Ticket:
    """A transfer that was asked for: `key` into `slot`.

    ahead           whether it was asked for as a prefetch, whatever became of that
    error           what it raised, once it has failed
    start_s, end_s  of the transfer itself, by the recorder's clock
    reader          which of several at a time carried it out
    read_bytes      read from the disk for it
    """

    __slots__ = (
        "ahead",
        "end_s",
        "error",
        "finished",
        "key",
        "priority",
        "read_bytes",
        "reader",
        "slot",
        "start_s",
        "state",
    )

    def __init__(self, key: ExpertKey, slot: int, priority: Priority) -> None:
        self.key = key
        self.slot = slot
        self.priority = priority
        self.ahead = priority is Priority.PREFETCH
        self.state = State.QUEUED
        self.error: BaseException | None = None
        self.start_s = self.end_s = 0.0
        self.read_bytes = 0
        self.reader = 0
        # Held until the transfer ends. A lock and not an Event: those are written in Python, where
        # an interrupt can strike inside and leave them locked.
        self.finished = threading.Lock()
        self.finished.acquire()

    def __repr__(self) -> str:
        return f"Ticket({self.key}, slot={self.slot}, {self.state.value})"

    @property
    def ended(self) -> bool:
        """Whether nothing will be written to the slot any more."""
        return self.state not in (State.QUEUED, State.RUNNING)


class TransferEngine(Protocol):
    """Carries experts into slots. A slot's contents are undefined until its ticket is DONE, and
    its own until the ticket has ended. Called from one thread.
    """

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> Ticket:
        """Ask for `key` in `slot`. Demand goes before prefetch, each in the order asked for."""

    def hasten(self, ticket: Ticket) -> None:
        """Take a prefetch for a demand from now on."""

    def wait(self, ticket: Ticket) -> None:
        """Return when the slot is filled, which now comes first; raise what the transfer raised."""

    def cancel(self, ticket: Ticket) -> bool:
        """Withdraw what has not begun; False where it has, whose slot then is not free yet."""

    def report(self) -> None:
        """Enter in the recorder what ended since it was last asked."""

    def quiesce(self) -> None:
        """Withdraw all that has not begun and return when nothing is under way."""

    def close(self) -> None:
        """Quiesce and release all resources."""


def record(recorder: Recorder, ticket: Ticket, moved_bytes: int) -> None:
    """Enter a transfer that is done."""
    recorder.add(
        Event(
            "transfer",
            ticket.start_s,
            ticket.end_s,
            ticket.key.layer,
            ticket.key.expert,
            moved_bytes=moved_bytes,
            read_bytes=ticket.read_bytes,
            ahead=ticket.ahead,
            reader=ticket.reader,
        )
    )


class SynchronousTransfer:
    """Moves each expert when it is asked for, while the caller waits: all of it is stall.

    slots        [S, slot_bytes] uint8, the arena
    moved_bytes  of each expert
    """

    def __init__(
        self, fetch: Fetch, slots: Tensor, moved_bytes: MovedBytes, recorder: Recorder
    ) -> None:
        self._fetch = fetch
        self._slots = slots
        self._moved_bytes = moved_bytes
        self._recorder = recorder

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> Ticket:
        ticket = Ticket(key, slot, priority)
        ticket.start_s = self._recorder.clock()
        ticket.read_bytes = self._fetch(key, self._slots[slot])
        ticket.end_s = self._recorder.clock()
        ticket.state = State.DONE
        record(self._recorder, ticket, self._moved_bytes(key))
        self._recorder.add(Event("stall", ticket.start_s, ticket.end_s, key.layer, key.expert))
        return ticket

    def hasten(self, ticket: Ticket) -> None:
        pass

    def wait(self, ticket: Ticket) -> None:
        pass

    def cancel(self, ticket: Ticket) -> bool:
        return False

    def report(self) -> None:
        pass

    def quiesce(self) -> None:
        pass

    def close(self) -> None:
        pass
