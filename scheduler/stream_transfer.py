"""The transfer engine of a device with streams: copies from pinned memory that overlap its work.

No thread runs the copies, since it would compete with the one that launches kernels. The engine
advances whenever it is called or the host waits for the device. At most two copies are under way,
since a copy that a stream was given can be neither cancelled nor overtaken. Threads read experts
from disk into host records, from which they are copied.
"""

import heapq
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from speq.devices.device import Accelerator, Stream, StreamEvent
from speq.errors import Broken, present
from speq.scheduler.device_clock import DeviceClock
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.host_records import HostRecords, Tier
from speq.scheduler.read_queue import Reader, ReadQueue, dismiss, until_finished
from speq.scheduler.transfer import Priority, State, TransferTicket, record

MOST_COPIES = 2


class StreamTicket(TransferTicket):
    """A transfer through a stream.

    at             host record to copy from; None: none holds the expert yet
    read           the read from disk, while it is under way
    began, copied  events before and after the copy, once it was given to the stream
    """

    __slots__ = ("at", "began", "copied", "read")

    def __init__(self, key: ExpertKey, slot: int, priority: Priority) -> None:
        super().__init__(key, slot, priority)
        self.at: int | None = None
        self.read: TransferTicket | None = None
        self.began: StreamEvent | None = None
        self.copied: StreamEvent | None = None


def own(ticket: TransferTicket) -> StreamTicket:
    if not isinstance(ticket, StreamTicket):
        raise Broken(f"{ticket} belongs to another transfer engine")
    return ticket


@dataclass(slots=True)
class Queue:
    """Tickets in the order of their turn. A place counts while the ticket has its priority."""

    places: list[tuple[Priority, int, StreamTicket]] = field(default_factory=list)
    order: "itertools.count[int]" = field(default_factory=itertools.count)

    def put(self, ticket: StreamTicket) -> None:
        heapq.heappush(self.places, (ticket.priority, next(self.order), ticket))

    def first(self) -> StreamTicket | None:
        """Return the ticket whose turn it is, or None."""
        while self.places:
            priority, _, ticket = self.places[0]
            if ticket.state is State.QUEUED and ticket.priority is priority:
                return ticket
            heapq.heappop(self.places)
        return None

    def pop(self) -> None:
        heapq.heappop(self.places)


class StreamTransfer:
    """A TransferEngine of one copy stream.

    slots    [S, slot_bytes] uint8, the arena, on the device
    clock    of the device; its recorder gets transfers and stalls
    tier     records in host memory, and the disk behind them
    readers  threads that read from disk, if not all experts are in host memory
    """

    def __init__(
        self, device: Accelerator, tier: Tier, slots: Tensor, clock: DeviceClock, readers: int
    ) -> None:
        self._device, self._tier, self._slots = device, tier, slots
        self._clock, self._recorder = clock, clock.recorder
        self._stream: Stream = device.stream()
        # The compute stream made the slots, so all copies come after its work on them.
        self._stream.after(device.compute.record())
        self._records = HostRecords(tier)
        # By slot: the event after the last kernels that read it.
        self._readers: dict[int, StreamEvent] = {}
        self._to_copy, self._to_read = Queue(), Queue()
        self._copies: deque[StreamTicket] = deque()
        self._reads: dict[TransferTicket, StreamTicket] = {}
        self._done: list[TransferTicket] = []
        self._line = ReadQueue(
            lambda key, into: tier.read(*key, into),
            tier.record,
            clock.recorder.clock,
            prefetch_limit=max(1, readers - 1),
        )
        threads = [Reader(self._line, at) for at in range(0 if tier.resident else readers)]
        self._threads = threads
        self._dismiss = weakref.finalize(self, dismiss, self._line, threads)
        for thread in threads:
            thread.start()
        self._quiet = False
        device.while_waiting(_weakly(self._advance))

    def submit(self, key: ExpertKey, slot: int, priority: Priority) -> TransferTicket:
        ticket = StreamTicket(key, slot, priority)
        ticket.at = self._records.take(key)
        self._put(ticket)
        self._advance()
        return ticket

    def hasten(self, ticket: TransferTicket) -> None:
        ticket = own(ticket)
        if ticket.priority is not Priority.DEMAND:
            ticket.priority = Priority.DEMAND
            if ticket.read is not None:
                self._line.put(ticket.read, Priority.DEMAND)
            elif ticket.state is State.QUEUED:
                self._put(ticket)

    def wait(self, ticket: TransferTicket) -> None:
        ticket = own(ticket)
        if ticket.state is State.CANCELLED:
            raise Broken(f"{ticket} was cancelled and cannot be waited for")
        if not ticket.ended:
            # The device is idle until the copy has ended.
            with self._clock.timed("stall", *ticket.key, ahead=ticket.ahead):
                self.hasten(ticket)
                while ticket.copied is None and ticket.error is None:
                    self._bring_on(ticket)
                if ticket.copied is not None:
                    self._device.compute.after(ticket.copied)
                    ticket.state = State.DONE
        if ticket.error is not None:
            raise ticket.error

    def cancel(self, ticket: TransferTicket) -> bool:
        ticket = own(ticket)
        if ticket.read is not None and self._line.cancel_prefetch(ticket.read):
            del self._reads[ticket.read]
            ticket.read, ticket.state = None, State.QUEUED
        if ticket.state is not State.QUEUED:
            return False
        self._end(ticket, State.CANCELLED)
        return True

    def launched(self, slots: Collection[int]) -> None:
        event = self._device.compute.record()
        self._readers.update(dict.fromkeys(slots, event))

    def report(self) -> list[TransferTicket]:
        self._advance()
        if not self._copies and self._clock.is_old:
            self._clock.anchor()
        done, self._done = self._done, []
        return done

    def held_below(self) -> list[ExpertKey] | None:
        return None if self._tier.resident else self._records.residents()

    def holds(self, key: ExpertKey) -> bool:
        """Tell whether host memory holds an expert."""
        return self._tier.resident or self._records.holds(key)

    @contextmanager
    def lend_records(self, layer: int, experts: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Yield the records of experts that host memory held when they were chosen, [record_bytes]
        uint8 each, and keep them there inside the block.
        """
        lent: dict[int, int] = {}
        try:
            for expert in experts:
                lent[expert] = self._held(ExpertKey(layer, expert))
            yield {
                expert: self._tier.record(at)[: self._tier.record_bytes(layer, expert)]
                for expert, at in lent.items()
            }
        finally:
            for at in lent.values():
                self._records.give_back(at)

    def _held(self, key: ExpertKey) -> int:
        """Pin the record of an expert. It is read again if others that came through host memory
        since it was chosen took its place.
        """
        while (at := self._records.take(key)) is None:
            if (at := self._records.claim()) is not None:
                self._read_into(at, key)
                return at
            self._bring_any()  # until a copy or a read gives a record back
        return at

    def _read_into(self, at: int, key: ExpertKey) -> None:
        """Read an expert into a claimed record and publish it; given back if the read fails."""
        try:
            read_bytes = self._tier.read(*key, self._tier.record(at))
        except BaseException:
            self._records.give_back(at)
            raise
        self._recorder.step.read_bytes += read_bytes
        self._records.publish(at, key)

    def drain(self) -> None:
        self._quiet = True
        for read in self._line.cancel_all():
            until_finished(read)
        # Wait for the stream, not for the tickets: an interrupt may have separated them.
        self._stream.record().wait()
        self._land()
        for ticket in {*self._queued(), *self._reads.values(), *self._copies}:
            self._end(ticket, State.CANCELLED)
        self._to_copy, self._to_read = Queue(), Queue()
        self._copies.clear()
        self._reads.clear()
        self._line.ended.clear()
        self._records.give_back_all()
        self._clock.anchor()
        self._quiet = False

    def close(self) -> None:
        self._device.while_waiting(None)
        self.drain()
        dismiss(self._line, self._threads)
        self._dismiss.detach()  # only now: an interrupt may have cut that short

    def _put(self, ticket: StreamTicket) -> None:
        """Put a ticket in line for the stream, or for the disk."""
        (self._to_read if ticket.at is None else self._to_copy).put(ticket)

    def _advance(self) -> None:
        """Collect what has ended, and begin what may."""
        if self._quiet:
            return
        self._land()
        while (ticket := self._to_read.first()) is not None:
            at = self._records.claim()
            if at is None:
                break
            self._to_read.pop()
            self._read(ticket, at)
        while len(self._copies) < MOST_COPIES and (ticket := self._to_copy.first()) is not None:
            self._to_copy.pop()
            self._copy(ticket)

    def _bring_on(self, ticket: StreamTicket) -> None:
        """Advance a ticket that the computation waits for, and wait for that part."""
        self._advance()
        if ticket.copied is not None or ticket.error is not None:
            return
        if ticket.at is not None and ticket.read is None:
            self._copy(ticket)  # right after those under way, however many
        elif ticket.read is not None:
            until_finished(ticket.read)
        else:  # all records are in use
            self._bring_any()

    def _bring_any(self) -> None:
        """Wait for a part of what is under way, and collect it."""
        if self._copies:  # each keeps its record until it has ended
            present(self._copies[0].copied, "a copy is under way that never began").wait()
        else:
            until_finished(next(iter(self._reads)))
        self._land()

    def _read(self, ticket: StreamTicket, at: int) -> None:
        ticket.at, ticket.state = at, State.RUNNING
        ticket.read = TransferTicket(ticket.key, at, ticket.priority)
        self._reads[ticket.read] = ticket
        self._line.put(ticket.read, ticket.priority)

    def _copy(self, ticket: StreamTicket) -> None:
        at = present(ticket.at, "an expert in no host record cannot be copied")
        ticket.state = State.RUNNING
        # Kernels may still read what the slot held before.
        if (last := self._readers.pop(ticket.slot, None)) is not None:
            self._stream.after(last)
        nbytes = self._tier.record_bytes(*ticket.key)
        ticket.began = self._stream.record()
        self._stream.copy(self._slots[ticket.slot, :nbytes], self._tier.record(at)[:nbytes])
        ticket.copied = self._stream.record()
        self._copies.append(ticket)

    def _land(self) -> None:
        while self._line.ended:
            read = self._line.ended.popleft()
            ticket = self._reads.pop(read, None)
            if ticket is not None:
                self._landed(ticket, read)
        while self._copies and (copied := self._copies[0].copied) is not None and copied.done():
            self._complete(self._copies.popleft())
        self._clock.tell()

    def _landed(self, ticket: StreamTicket, read: TransferTicket) -> None:
        """Queue the copy of an expert that was read, or fail its ticket."""
        at = present(ticket.at, "an expert was read into no host record")
        ticket.read = None
        if read.error is not None:
            ticket.error = read.error
            self._end(ticket, State.FAILED)
            return
        ticket.start_s, ticket.reader, ticket.read_bytes = (
            read.start_s,
            read.reader,
            read.read_bytes,
        )
        self._records.publish(at, ticket.key)
        ticket.state = State.QUEUED
        self._put(ticket)

    def _complete(self, ticket: StreamTicket) -> None:
        """Record and end a ticket whose copy has ended."""
        never = "a copy has ended that never began"
        began, copied = present(ticket.began, never), present(ticket.copied, never)
        if not ticket.start_s:
            ticket.start_s = self._clock.seconds(began)
        ticket.end_s = self._clock.seconds(copied)
        record(self._recorder, ticket, self._tier.record_bytes(*ticket.key))
        self._end(ticket, State.DONE)
        self._done.append(ticket)

    def _end(self, ticket: StreamTicket, state: State) -> None:
        if ticket.at is not None:
            self._records.give_back(ticket.at)
            ticket.at = None
        ticket.state = state

    def _queued(self) -> list[StreamTicket]:
        places = (*self._to_copy.places, *self._to_read.places)
        return [ticket for _, _, ticket in places if ticket.state is State.QUEUED]


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Wrap a method in a call that does not keep its object, its slots and threads alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call
