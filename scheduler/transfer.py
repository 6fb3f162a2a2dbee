"""The protocol of engines that move experts from the slow tier into slots."""

import threading
from collections.abc import Callable, Collection
from enum import Enum, IntEnum
from typing import Protocol

from torch import Tensor

from speq.scheduler.expert_key import ExpertKey
from speq.stats import Recorder, TimeSpan

# Loads an expert's record into the given slot, [slot_bytes] uint8 on the device, from any thread.
# Returns the bytes read from disk. It keeps no reference that leads to the engine.
Fetch = Callable[[ExpertKey, Tensor], int]
# Returns the bytes that loading an expert into a slot moves.
MovedBytes = Callable[[ExpertKey], int]


class Priority(IntEnum):
    """Order of transfers; smaller goes first."""

    DEMAND = 0
    PREFETCH = 1


class State(Enum):
    """The state of a transfer. The last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TransferTicket:
    """A requested transfer: `key` into `slot`.

    ahead           True if it was requested as a prefetch, even if it became a demand later
    error           the exception of a failed transfer
    start_s, end_s  when the transfer itself began and ended, by the recorder's clock
    reader          the number of the reader that carried it out
    read_bytes      bytes read from the disk for it
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
        # Locked until the transfer ends. threading.Event is written in Python, so an interrupt
        # could strike inside it and leave it locked.
        self.finished = threading.Lock()
        self.finished.acquire()

    def __repr__(self) -> str:
        return f"Ticket({self.key}, slot={self.slot}, {self.state.value})"

    @property
    def ended(self) -> bool:
        """True if the transfer no longer writes to its slot, seen by work launched from now on."""
        return self.state not in (State.QUEUED, State.RUNNING)


class TransferEngine(Protocol):
    """Loads experts into slots. One thread calls it.

    A slot's contents are undefined until its ticket is DONE. The slot belongs to the transfer until
    the ticket has ended. On a device with streams, kernels launched after DONE find the expert,
    though its copy may still be under way.
    """

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> TransferTicket:
        """Request `key` in `slot`. Demands precede prefetches, each in the order of requests."""

    def hasten(self, ticket: TransferTicket) -> None:
        """Turn a prefetch into a demand."""

    def wait(self, ticket: TransferTicket) -> None:
        """Hasten the ticket and return when it is DONE. Raises the transfer's error."""

    def cancel(self, ticket: TransferTicket) -> bool:
        """Cancel a ticket; False if it has begun, so that its slot is not free yet."""

    def launched(self, slots: Collection[int]) -> None:
        """Keep these slots unwritten until the kernels just launched on them have ended."""

    def report(self) -> list[TransferTicket]:
        """Record the transfers that ended since the last call; return those that are done."""

    def held_below(self) -> list[ExpertKey] | None:
        """List the experts in host memory, in no order; None if transfers read from disk alone."""

    def drain(self) -> None:
        """Cancel all tickets that have not begun and wait for the others."""

    def close(self) -> None:
        """Drain and release all resources."""


def record(recorder: Recorder, ticket: TransferTicket, moved_bytes: int) -> None:
    """Record a finished transfer."""
    recorder.add(
        TimeSpan(
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
