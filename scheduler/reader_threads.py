"""The CPU backend's transfer engine: threads that read experts from disk into slots.

Reads release Python's lock, so that they run beside the computation. Only the calling thread can be
interrupted, between any two of its lines: what it shares with the readers are a lock and a queue
written in C, which an interrupt finds either taken or not.
"""

import heapq
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from torch import Tensor

from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.transfer import Fetch, MovedBytes, Priority, State, Ticket, record
from speq.stats import Event, Recorder


@dataclass(slots=True)
class Line:
    """What waits to be read, and is: shared by the readers and the engine.

    A prefetch under way cannot be called back: `prefetch_limit` keeps a reader free for demands.
    `calls` wakes a reader for each ticket put in line; one that finds nothing to do waits again.
    """

    fetch: Fetch
    slots: Tensor
    clock: Callable[[], float]
    prefetch_limit: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: SimpleQueue[None] = field(default_factory=SimpleQueue)
    waiting: list[tuple[Priority, int, Ticket]] = field(default_factory=list)
    order: "itertools.count[int]" = field(default_factory=itertools.count)
    running: dict[int, Ticket] = field(default_factory=dict)
    ended: deque[Ticket] = field(default_factory=deque)
    closed: bool = False

    def put(self, ticket: Ticket, priority: Priority) -> None:
        """Put a ticket in line, or further ahead: its old place is then passed over.

        An interrupt on the way leaves a call too many, or a place too many, and the ticket where it
        was.
        """
        with self.lock:
            if ticket.state is State.QUEUED:
                self.calls.put(None)  # whoever hears it waits for the lock
                heapq.heappush(self.waiting, (priority, next(self.order), ticket))
            ticket.priority = priority

    def take(self) -> Ticket | None:
        """The ticket to read now, or None where there is none that may begin."""
        with self.lock:
            while self.waiting:
                priority, _, ticket = self.waiting[0]
                current = ticket.state is State.QUEUED and ticket.priority is priority
                if current and priority is Priority.PREFETCH and self._prefetching_enough():
                    return None
                heapq.heappop(self.waiting)
                if current:
                    ticket.state = State.RUNNING
                    self.running[id(ticket)] = ticket
                    return ticket
            return None

    def _prefetching_enough(self) -> bool:
        prefetches = sum(t.priority is Priority.PREFETCH for t in self.running.values())
        return prefetches >= self.prefetch_limit

    def withdraw(self, ticket: Ticket) -> bool:
        """Cancel a ticket that has not begun."""
        with self.lock:
            if ticket.state is not State.QUEUED:
                return False
            ticket.state = State.CANCELLED
            return True

    def withdraw_all(self) -> list[Ticket]:
        """Cancel all that has not begun; return what has not ended."""
        with self.lock:
            for _, _, ticket in self.waiting:
                if ticket.state is State.QUEUED:
                    ticket.state = State.CANCELLED
            self.waiting.clear()
            return list(self.running.values())

    def read(self, ticket: Ticket, reader: int) -> None:
        """Carry one out, in a reader's thread."""
        ticket.reader = reader
        ticket.start_s = self.clock()
        try:
            ticket.read_bytes = self.fetch(ticket.key, self.slots[ticket.slot])
        except BaseException as error:
            ticket.error = error
        ticket.end_s = self.clock()
        self.ended.append(ticket)  # before anybody takes it for ended
        with self.lock:
            del self.running[id(ticket)]
            ticket.state = State.DONE if ticket.error is None else State.FAILED
        ticket.finished.release()


class Reader(threading.Thread):
    """Reads what is in line, one ticket after the other."""

    def __init__(self, line: Line, number: int) -> None:
        super().__init__(name=f"speq-reader-{number}", daemon=True)
        self._line = line
        self._number = number
        # Held while it lives. An interrupted `join` takes a thread for ended that is not.
        self._alive = threading.Lock()
        self._alive.acquire()
        self._ended = False

    def run(self) -> None:
        try:
            while not self._line.closed:
                self._line.calls.get()
                while (ticket := self._line.take()) is not None:
                    self._line.read(ticket, self._number)
        finally:
            self._ended = True
            self._alive.release()

    def await_end(self) -> None:
        """Return when it has ended, unless it never began or is the caller."""
        if self.ident is None or self is threading.current_thread():
            return
        if not self._ended:
            self._alive.acquire()
            self._alive.release()
        self.join()


def dismiss(line: Line, readers: list[Reader]) -> None:
    """Let readers end, and wait for what they read: memory under a read cannot be given back."""
    line.closed = True
    line.withdraw_all()
    for _ in readers:
        line.calls.put(None)
    for reader in readers:
        reader.await_end()


class ReaderThreads:
    """A TransferEngine of `readers` threads, which is also how many transfers are under way.

    slots        [S, slot_bytes] uint8, the arena
    moved_bytes  of each expert

    Readers end with `close`, or once nobody holds the engine any more, or with the process.
    """

    def __init__(
        self,
        fetch: Fetch,
        slots: Tensor,
        moved_bytes: MovedBytes,
        recorder: Recorder,
        readers: int,
    ) -> None:
        assert readers > 0
        self._moved_bytes = moved_bytes
        self._recorder = recorder
        self._line = Line(fetch, slots, recorder.clock, prefetch_limit=max(1, readers - 1))
        self._readers = [Reader(self._line, number) for number in range(readers)]
        self._dismiss = weakref.finalize(self, dismiss, self._line, self._readers)
        for reader in self._readers:
            reader.start()

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> Ticket:
        assert not self._line.closed, "the engine was closed"
        ticket = Ticket(key, slot, priority)
        self._line.put(ticket, priority)
        self.report()
        return ticket

    def hasten(self, ticket: Ticket) -> None:
        if ticket.priority is not Priority.DEMAND:
            self._line.put(ticket, Priority.DEMAND)

    def wait(self, ticket: Ticket) -> None:
        assert ticket.state is not State.CANCELLED, f"nobody will carry out {ticket}"
        if not ticket.ended:
            self.hasten(ticket)
            start_s = self._recorder.clock()
            until_finished(ticket)
            end_s = self._recorder.clock()
            self._recorder.add(Event("stall", start_s, end_s, *ticket.key, ahead=ticket.ahead))
        self.report()
        if ticket.error is not None:
            raise ticket.error

    def cancel(self, ticket: Ticket) -> bool:
        return self._line.withdraw(ticket)

    def report(self) -> None:
        # The recorder hears of transfers in the caller's thread only.
        while self._line.ended:
            ticket = self._line.ended.popleft()
            if ticket.error is None:
                record(self._recorder, ticket, self._moved_bytes(ticket.key))

    def quiesce(self) -> None:
        for ticket in self._line.withdraw_all():
            until_finished(ticket)
        self.report()

    def close(self) -> None:
        dismiss(self._line, self._readers)
        self._dismiss.detach()  # only now: an interrupt may have cut that short
        self.report()


def until_finished(ticket: Ticket) -> None:
    """Wait for a transfer to end. It may be asked for again, and after an interrupt."""
    if not ticket.ended:
        ticket.finished.acquire()
        ticket.finished.release()
