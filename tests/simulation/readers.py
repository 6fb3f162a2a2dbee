"""Transfers that begin and end when a schedule says so, in place of threads that read."""

import random
from collections.abc import Collection

from torch import Tensor

from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.transfer import Fetch, MovedBytes, Priority, State, TransferTicket, record
from speq.stats import Recorder

# Fills parts of a slot whose read has begun: nobody may read it yet.
GARBAGE = 0xA5


class Chance:
    """What is up to chance in a schedule.

    interrupt_in  calls of transfers until one is interrupted; None: none is
    interrupts    so far
    """

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.interrupt_in: int | None = None
        self.interrupts = 0

    def pass_by(self) -> None:
        if self.interrupt_in is not None:
            self.interrupt_in -= 1
            if self.interrupt_in < 0:
                self.interrupt_in = None
                self.interrupts += 1
                raise KeyboardInterrupt


class SimulatedReaders:
    """A TransferEngine that carries `readers` transfers at a time, which end in any order.

    It is made as `ReaderThreads` is. Its reads are real; a slot holds garbage until one ends.
    """

    chance = Chance()

    def __init__(
        self,
        fetch: Fetch,
        slots: Tensor,
        moved_bytes: MovedBytes,
        recorder: Recorder,
        readers: int,
    ) -> None:
        self._fetch, self._slots, self._moved_bytes = fetch, slots, moved_bytes
        self._recorder, self._readers = recorder, readers
        self._queued: list[TransferTicket] = []
        self._running: list[TransferTicket] = []
        self._done: list[TransferTicket] = []
        self._closed = False

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> TransferTicket:
        assert not self._closed, f"{key} was requested after the end"
        assert 0 <= slot < len(self._slots)
        for other in (*self._queued, *self._running):
            assert slot != other.slot, f"{other} writes to the slot of {key}"
        self.chance.pass_by()
        ticket = TransferTicket(key, slot, priority)
        self._queued.append(ticket)
        self._advance()
        self.chance.pass_by()
        return ticket

    def hasten(self, ticket: TransferTicket) -> None:
        ticket.priority = Priority.DEMAND

    def wait(self, ticket: TransferTicket) -> None:
        assert ticket.state is not State.CANCELLED
        self.hasten(ticket)
        while not ticket.ended:
            self.chance.pass_by()
            if ticket in self._queued and len(self._running) < self._readers:
                self._begin(ticket)
            self._end(self.chance.rng.choice(self._running))
        if ticket.error is not None:
            raise ticket.error

    def cancel(self, ticket: TransferTicket) -> bool:
        self._advance()
        if ticket.state is not State.QUEUED:
            return False
        self._withdraw(ticket)
        return True

    def launched(self, slots: Collection[int]) -> None:
        under_way = {ticket.slot for ticket in self._running}
        assert not under_way & set(slots), "a slot that is written to was read"

    def report(self) -> list[TransferTicket]:
        self._advance()
        done, self._done = self._done, []
        return done

    def held_below(self) -> list[ExpertKey] | None:
        return None

    def drain(self) -> None:
        for ticket in [*self._queued]:
            self._withdraw(ticket)
        while self._running:
            self._end(self.chance.rng.choice(self._running))

    def close(self) -> None:
        self.drain()
        self._closed = True

    def _advance(self) -> None:
        rng = self.chance.rng
        while self._queued and len(self._running) < self._readers and rng.random() < 0.6:
            self._begin(min(self._queued, key=lambda ticket: ticket.priority))
        while self._running and rng.random() < 0.3:
            self._end(rng.choice(self._running))

    def _begin(self, ticket: TransferTicket) -> None:
        self._queued.remove(ticket)
        self._running.append(ticket)
        ticket.state, ticket.start_s = State.RUNNING, self._recorder.clock()
        slot = self._slots[ticket.slot]
        slot[: self.chance.rng.randrange(1, len(slot) + 1)] = GARBAGE

    def _end(self, ticket: TransferTicket) -> None:
        try:
            ticket.read_bytes = self._fetch(ticket.key, self._slots[ticket.slot])
        except Exception as error:
            ticket.error = error
        self._running.remove(ticket)
        ticket.end_s = self._recorder.clock()
        ticket.state = State.DONE if ticket.error is None else State.FAILED
        ticket.finished.release()
        if ticket.error is None:
            record(self._recorder, ticket, self._moved_bytes(ticket.key))
            self._done.append(ticket)

    def _withdraw(self, ticket: TransferTicket) -> None:
        self._queued.remove(ticket)
        ticket.state = State.CANCELLED
