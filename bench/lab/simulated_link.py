"""A link of given speed on a clock that moves when told to: a TransferEngine without bytes."""

import heapq
from collections.abc import Collection
from dataclasses import dataclass

from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.transfer import Priority, State, TransferTicket, record
from speq.stats import Recorder, TimeSpan


@dataclass(slots=True)
class SimulatedClock:
    """Seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedLink:
    """Carries one record at a time, each in transfer_s seconds, demand before prefetch.

    begun      how many may have begun at a time: those cannot be called back. As with readers, one
               of several is kept for demands.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        recorder: Recorder,
        transfer_s: float,
        moved_bytes: int,
        begun: int,
    ) -> None:
        self._clock = clock
        self._recorder = recorder
        self._transfer_s = transfer_s
        self._moved_bytes = moved_bytes
        self._begun = begun
        self._queue: list[tuple[Priority, int, TransferTicket]] = []
        self._order = 0
        # Begun, in that order; their ends are known.
        self._running: list[TransferTicket] = []
        self._ended: list[TransferTicket] = []
        self._done: list[TransferTicket] = []

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> TransferTicket:
        self._advance()  # what ended before it was asked for made room for others
        ticket = TransferTicket(key, slot, priority)
        self._put(ticket)
        self._begin(self._clock.now)
        return ticket

    def hasten(self, ticket: TransferTicket) -> None:
        self._advance()
        if ticket.priority is not Priority.DEMAND:
            ticket.priority = Priority.DEMAND
            if ticket.state is State.QUEUED:
                self._put(ticket)
            self._begin(self._clock.now)

    def wait(self, ticket: TransferTicket) -> None:
        start_s = self._clock.now
        self.hasten(ticket)
        while not ticket.ended:
            self._clock.now = self._running[0].end_s
            self._advance()
        if self._clock.now > start_s:
            stall = TimeSpan("stall", start_s, self._clock.now, *ticket.key, ahead=ticket.ahead)
            self._recorder.add(stall)
        self._report()

    def cancel(self, ticket: TransferTicket) -> bool:
        self._advance()
        if ticket.state is not State.QUEUED:
            return False
        ticket.state = State.CANCELLED
        return True

    def launched(self, slots: Collection[int]) -> None:
        pass

    def report(self) -> list[TransferTicket]:
        self._report()
        done, self._done = self._done, []
        return done

    def _report(self) -> None:
        self._advance()
        for ticket in self._ended:
            record(self._recorder, ticket, self._moved_bytes)
        self._done += self._ended
        self._ended.clear()

    def held_below(self) -> list[ExpertKey] | None:
        return None

    def drain(self) -> None:
        self._advance()
        for _, _, ticket in self._queue:
            if ticket.state is State.QUEUED:
                ticket.state = State.CANCELLED
        self._queue.clear()
        if self._running:
            self._clock.now = max(self._clock.now, self._running[-1].end_s)
        self._report()

    def close(self) -> None:
        self.drain()

    def _put(self, ticket: TransferTicket) -> None:
        heapq.heappush(self._queue, (ticket.priority, self._order, ticket))
        self._order += 1

    def _advance(self) -> None:
        """Carry on up to now."""
        while self._running and self._running[0].end_s <= self._clock.now:
            ticket = self._running.pop(0)
            ticket.state = State.DONE
            ticket.finished.release()
            self._ended.append(ticket)
            self._begin(ticket.end_s)
        self._begin(self._clock.now)

    def _begin(self, free_s: float) -> None:
        """Let begin what waits, as far as it may; free_s: when the link can, if it is idle."""
        while self._queue and len(self._running) < self._begun:
            priority, _, ticket = self._queue[0]
            current = ticket.state is State.QUEUED and ticket.priority is priority
            if current and priority is Priority.PREFETCH:
                ahead = sum(other.priority is Priority.PREFETCH for other in self._running)
                if ahead >= max(1, self._begun - 1):
                    return
            heapq.heappop(self._queue)
            if current:
                ticket.state = State.RUNNING
                ticket.start_s = self._running[-1].end_s if self._running else free_s
                ticket.end_s = ticket.start_s + self._transfer_s
                ticket.read_bytes = self._moved_bytes
                self._running.append(ticket)
