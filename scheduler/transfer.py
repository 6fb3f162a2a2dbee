"""Moves exact experts from the slow tier into slots."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from torch import Tensor

from speq.scheduler.expert_cache import ExpertKey
from speq.stats import Event, Recorder

# Brings one expert's record into the slot given, a [record_bytes] uint8 tensor on the device.
Fetch = Callable[[ExpertKey, Tensor], None]


class Priority(IntEnum):
    """Smaller goes first."""

    DEMAND = 0
    PREFETCH = 1


@dataclass(frozen=True, slots=True)
class Ticket:
    """A transfer that was asked for."""

    key: ExpertKey
    slot: int


class TransferEngine(Protocol):
    """Carries experts into slots; the slot's contents are undefined until `wait` returns."""

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> Ticket:
        """Ask for `key` in `slot`."""

    def wait(self, ticket: Ticket) -> None:
        """Return when the slot is filled; raise what the transfer raised."""

    def close(self) -> None:
        """Finish or drop what is under way and release all resources."""


class SynchronousTransfer:
    """Moves each expert when it is asked for, while the caller waits: all of it is stall.

    slots [S, record_bytes] uint8 is the arena.
    """

    def __init__(self, fetch: Fetch, slots: Tensor, recorder: Recorder) -> None:
        self._fetch = fetch
        self._slots = slots
        self._recorder = recorder

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> Ticket:
        start_s = self._recorder.clock()
        record = self._slots[slot]
        self._fetch(key, record)
        end_s = self._recorder.clock()
        self._recorder.add(
            Event("transfer", start_s, end_s, key.layer, key.expert, moved_bytes=record.numel())
        )
        self._recorder.add(Event("stall", start_s, end_s, key.layer, key.expert))
        return Ticket(key, slot)

    def wait(self, ticket: Ticket) -> None:
        pass

    def close(self) -> None:
        pass
