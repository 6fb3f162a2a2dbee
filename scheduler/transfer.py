"""The protocol of engines that move exact experts from the slow tier into slots."""

import threading
from collections.abc import Callable, Collection
from enum import Enum, IntEnum
from typing import Protocol

from torch import Tensor

from speq.scheduler.expert_key import ExpertKey
from speq.stats import Event, Recorder

# Brings one expert's record into the given slot, [slot_bytes] uint8 on the device, from any thread.
# Returns the bytes read from the disk. It keeps no reference that leads to the engine.
Fetch = Callable[[ExpertKey, Tensor], int]
# Gives the bytes that bringing an expert into a slot moves.
MovedBytes = Callable[[ExpertKey], int]


class Priority(IntEnum):
    """Smaller goes first."""

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

    ahead           whether it was requested as a prefetch, even if it became a demand later
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
        # Held until the transfer ends. An Event would not do: it is written in Python, so an
        # interrupt can strike inside it and leave it locked.
        self.finished = threading.Lock()
        self.finished.acquire()

    def __repr__(self) -> str:
        return f"Ticket({self.key}, slot={self.slot}, {self.state.value})"

    @property
    def ended(self) -> bool:
        """Tell whether the transfer will no longer write to its slot, as far as whoever asks the
        device to read the slot from now on can see.
        """
        return self.state not in (State.QUEUED, State.RUNNING)


class TransferEngine(Protocol):
    """Carries experts into slots. One thread calls it.

    A slot's contents are undefined until its ticket is DONE. The slot belongs to the transfer until
    the ticket has ended. On a device with streams DONE is meant in the order of its work: kernels
    that are launched from then on find the expert, though its copy may still be under way.
    """

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> TransferTicket:
        """Request `key` in `slot`. Demands go before prefetches, each in the order of requests."""

    def hasten(self, ticket: TransferTicket) -> None:
        """Turn a prefetch into a demand."""

    def wait(self, ticket: TransferTicket) -> None:
        """Hasten the ticket and return when it is DONE. Raises the transfer's error."""

    def cancel(self, ticket: TransferTicket) -> bool:
        """Withdraw a ticket that has not begun; False if it has, and its slot is not free yet."""

    def launched(self, slots: Collection[int]) -> None:
        """Kernels that read these slots were launched: nothing is written there before they end."""

    def report(self) -> list[TransferTicket]:
        """Tell the recorder which transfers ended since the last call; those that are done, with
        their times.
        """

    def held_below(self) -> list[ExpertKey] | None:
        """Experts in memory that transfers copy from, in no order; None where no such memory lies
        between the disk and the slots.
        """

    def drain(self) -> None:
        """Withdraw all tickets that have not begun and return when nothing is under way."""

    def close(self) -> None:
        """Quiesce and release all resources."""


def record(recorder: Recorder, ticket: TransferTicket, moved_bytes: int) -> None:
    """Tell the recorder of a transfer that is done."""
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
