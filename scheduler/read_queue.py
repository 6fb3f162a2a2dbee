"""The CPU's transfer engine: threads that read experts from disk into slots.

Reads release Python's lock, so they overlap the computation. An interrupt can strike only the
calling thread, between any two of its lines. That thread shares only a lock and a queue with the
readers. Both are written in C, so an interrupt finds them either taken or not.
"""

import heapq
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from queue import SimpleQueue

from torch import Tensor

from speq.errors import Broken
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.transfer import Fetch, MovedBytes, Priority, State, TransferTicket, record
from speq.stats import Recorder, TimeSpan


@dataclass(slots=True)
class ReadQueue:
    """Tickets that wait and tickets under way, shared by the readers and the engine.

    place  returns the memory of a slot

    A prefetch under way cannot be cancelled, so `prefetch_limit` keeps a reader free for demands.
    `calls` wakes a reader for each ticket put in line. A reader that finds no work waits again.
    """

    fetch: Fetch
    place: Callable[[int], Tensor]
    clock: Callable[[], float]
    prefetch_limit: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: SimpleQueue[None] = field(default_factory=SimpleQueue)
    waiting: list[tuple[Priority, int, TransferTicket]] = field(default_factory=list)
    order: "itertools.count[int]" = field(default_factory=itertools.count)
    running: dict[int, TransferTicket] = field(default_factory=dict)
    ended: deque[TransferTicket] = field(default_factory=deque)
    closed: bool = False

    def put(self, ticket: TransferTicket, priority: Priority) -> None:
        """Put a ticket in line, or move it ahead; its old place then no longer counts.

        An interrupt can leave one call or one place too many. The ticket stays where it was.
        """
        with self.lock:
            if ticket.state is State.QUEUED:
                self.calls.put(None)  # the reader that it wakes waits for the lock
                heapq.heappush(self.waiting, (priority, next(self.order), ticket))
            ticket.priority = priority

    def take(self) -> TransferTicket | None:
        """Take the ticket to read now, or None if none may begin."""
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

    def cancel_prefetch(self, ticket: TransferTicket) -> bool:
        """Cancel a ticket that has not begun."""
        with self.lock:
            if ticket.state is not State.QUEUED:
                return False
            ticket.state = State.CANCELLED
            return True

    def cancel_all(self) -> list[TransferTicket]:
        """Cancel all tickets that have not begun; return those that have not ended."""
        with self.lock:
            for _, _, ticket in self.waiting:
                if ticket.state is State.QUEUED:
                    ticket.state = State.CANCELLED
            self.waiting.clear()
            return list(self.running.values())

    def read(self, ticket: TransferTicket, reader: int) -> None:
        """Carry a ticket out, in a reader's thread."""
        ticket.reader = reader
        ticket.start_s = self.clock()
        try:
            ticket.read_bytes = self.fetch(ticket.key, self.place(ticket.slot))
        except BaseException as error:
            ticket.error = error
        ticket.end_s = self.clock()
        self.ended.append(ticket)  # first, or another thread could see the state and miss it here
        with self.lock:
            del self.running[id(ticket)]
            ticket.state = State.DONE if ticket.error is None else State.FAILED
        ticket.finished.release()


class Reader(threading.Thread):
    """Reads tickets from the line, one after the other."""

    def __init__(self, queue: ReadQueue, number: int) -> None:
        super().__init__(name=f"speq-reader-{number}", daemon=True)
        self._queue = queue
        self._number = number
        # Locked while the thread lives: an interrupted `join` can take a living thread for ended.
        self._alive = threading.Lock()
        self._alive.acquire()
        self._ended = False

    def run(self) -> None:
        try:
            while not self._queue.closed:
                self._queue.calls.get()
                while (ticket := self._queue.take()) is not None:
                    self._queue.read(ticket, self._number)
        finally:
            self._ended = True
            self._alive.release()

    def await_end(self) -> None:
        """Wait until the thread has ended; return at once if it never began or is the caller."""
        if self.ident is None or self is threading.current_thread():
            return
        if not self._ended:
            self._alive.acquire()
            self._alive.release()
        self.join()


def dismiss(queue: ReadQueue, readers: list[Reader]) -> None:
    """End the readers and wait for their reads, since memory under a read cannot be freed."""
    queue.closed = True
    queue.cancel_all()
    for _ in readers:
        queue.calls.put(None)
    for reader in readers:
        reader.await_end()


class ReaderThreads:
    """A TransferEngine of `readers` threads. Each thread carries out one transfer at a time.

    slots        [S, slot_bytes] uint8, the arena
    moved_bytes  returns the bytes that loading an expert moves

    Readers end with `close`, with the last reference to the engine, or with the process.
    """

    def __init__(
        self,
        fetch: Fetch,
        slots: Tensor,
        moved_bytes: MovedBytes,
        recorder: Recorder,
        readers: int,
    ) -> None:
        if readers < 1:
            raise Broken(f"{readers} reader threads were asked for; at least 1 is needed")
        self._moved_bytes = moved_bytes
        self._recorder = recorder
        self._queue = ReadQueue(
            fetch, slots.__getitem__, recorder.clock, prefetch_limit=max(1, readers - 1)
        )
        self._readers = [Reader(self._queue, number) for number in range(readers)]
        self._done: list[TransferTicket] = []
        self._dismiss = weakref.finalize(self, dismiss, self._queue, self._readers)
        for reader in self._readers:
            reader.start()

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> TransferTicket:
        if self._queue.closed:
            raise Broken(f"{key} was requested after its readers were closed")
        ticket = TransferTicket(key, slot, priority)
        self._queue.put(ticket, priority)
        self._report()
        return ticket

    def hasten(self, ticket: TransferTicket) -> None:
        if ticket.priority is not Priority.DEMAND:
            self._queue.put(ticket, Priority.DEMAND)

    def wait(self, ticket: TransferTicket) -> None:
        if ticket.state is State.CANCELLED:
            raise Broken(f"{ticket} was cancelled and cannot be waited for")
        if not ticket.ended:
            self.hasten(ticket)
            start_s = self._recorder.clock()
            until_finished(ticket)
            end_s = self._recorder.clock()
            self._recorder.add(TimeSpan("stall", start_s, end_s, *ticket.key, ahead=ticket.ahead))
        self._report()
        if ticket.error is not None:
            raise ticket.error

    def cancel(self, ticket: TransferTicket) -> bool:
        return self._queue.cancel_prefetch(ticket)

    def launched(self, slots: Collection[int]) -> None:
        pass  # kernels have ended when they return

    def report(self) -> list[TransferTicket]:
        self._report()
        done, self._done = self._done, []
        return done

    def _report(self) -> None:
        # Only the calling thread records transfers.
        while self._queue.ended:
            ticket = self._queue.ended.popleft()
            if ticket.error is None:
                record(self._recorder, ticket, self._moved_bytes(ticket.key))
                self._done.append(ticket)

    def held_below(self) -> list[ExpertKey] | None:
        return None

    def drain(self) -> None:
        for ticket in self._queue.cancel_all():
            until_finished(ticket)
        self._report()

    def close(self) -> None:
        dismiss(self._queue, self._readers)
        self._dismiss.detach()  # only now: an interrupt may have cut that short
        self._report()


def until_finished(ticket: TransferTicket) -> None:
    """Wait for a transfer to end. Calling it again, or after an interrupt, is allowed."""
    if not ticket.ended:
        ticket.finished.acquire()
        ticket.finished.release()
