"""A GPU that is none: streams, events and copies on the host, in any order that events allow.

Kernels run when they are launched. Copies beside them wait in their stream until something behind
them is waited for, or chance has them go on, and an event of the compute stream is told to be done
no sooner. Whether the order of all this is forced, torch's own race detector says: it compares
accesses to slots by the streams and events between them, not by what happened to come first.
"""

import random
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.cuda._sanitizer import EventHandler
from torch.utils._pytree import tree_leaves

from speq.devices.card import Card
from speq.devices.device import Cut, Graph, StreamEvent
from speq.kernels import library
from tests.helpers.host_graph import HostGraph, capture
from tests.helpers.host_tensors import DEVICE, HostTensor, Machine, caller, host_tensors

COMPUTE = 0  # the race detector's name for torch's own stream
POISON = 0xA5
# The arguments that hold experts in slots, and route and table before them.
IDS, TABLE, ARENAS = 1, 2, {"moe_grouped_out": (3, 4)}
FIRST_ARENA = (3,)


def whole(tensor: Tensor) -> tuple[int, int]:
    """Where the memory lies that a tensor is part of, and how large it is."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


class Race(AssertionError):
    """Two accesses that nothing keeps in order, or a slot that nothing was copied to."""


@dataclass(eq=False)
class HostEvent:
    device: "HostDevice"
    stream: int
    number: int
    at_s: float | None = None
    # Copies to the host that are there when the event is.
    arriving: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def done(self) -> bool:
        self.device.progress()
        if self.at_s is None:
            return False
        self.device.known(self)
        return True

    def wait(self) -> None:
        self.device.waits.append(caller())
        while self.device.meanwhile is not None and self.device.rng.random() < 0.7:
            self.device.meanwhile()
            self.device.progress()
        self.device.reach(self)
        self.device.known(self)


@dataclass(eq=False)
class HostStream:
    """A stream of copies: work that has not been done waits in `queue`."""

    device: "HostDevice"
    number: int
    queue: deque[Callable[[], object] | HostEvent] = field(default_factory=deque)

    def copy(self, target: Tensor, source: Tensor) -> None:
        device = self.device
        into, out_of = device.locked(target), device.locked(source)
        device.access(self.number, "copy", reads=device.base(target), writes=device.slot(target))
        self.queue.append(partial(into.copy_, out_of))
        device.progress()

    def record(self) -> HostEvent:
        event = self.device.event(self.number)
        self.queue.append(event)
        return event

    def after(self, event: StreamEvent) -> None:
        assert isinstance(event, HostEvent)
        self.device.races._handle_event_wait(event.number, self.number)
        self.queue.append(lambda: self.device.reach(event))

    def step(self) -> None:
        """Do the piece of work that is first."""
        first = self.queue.popleft()
        if isinstance(first, HostEvent):
            first.at_s = self.device.clock()
        else:
            first()


@dataclass(eq=False)
class ComputeStream:
    """torch's own stream: kernels have run when they are launched."""

    device: "HostDevice"

    def copy(self, target: Tensor, source: Tensor) -> None:
        into, out_of = self.device.locked(target), self.device.locked(source)
        if isinstance(target, HostTensor):
            into.copy_(out_of)
            if not isinstance(source, HostTensor):
                self.device.read_from.append((out_of, out_of.clone()))
        else:
            # It is there when an event behind it is waited for, and not before.
            self.device.arriving.append((into, out_of.clone()))
            into.view(torch.uint8).fill_(POISON)

    def record(self) -> HostEvent:
        event = self.device.event(COMPUTE)
        event.arriving, self.device.arriving = self.device.arriving, []
        self.device.running.append(event)
        return event

    def after(self, event: StreamEvent) -> None:
        assert isinstance(event, HostEvent)
        self.device.races._handle_event_wait(event.number, COMPUTE)
        self.device.reach(event)


class HostDevice(Machine):
    """An Accelerator (speq.devices.device) of the host.

    reads   device-to-host reads that ops made, by kind and place; waits: events waited for
    races   torch's race detector
    """

    def __init__(
        self,
        seed: int = 0,
        free_bytes: int = 1 << 40,
        may_pin: Callable[[], bool] = lambda: True,
        on: torch.device = DEVICE,
    ) -> None:
        self.torch = on
        self.rng = random.Random(seed)
        self.clock = time.perf_counter
        self.races = EventHandler()
        self.reads: list[tuple[str, str]] = []
        self.waits: list[str] = []
        self.compute = ComputeStream(self)
        self.streams: list[HostStream] = []
        self.running: deque[HostEvent] = deque()
        self.arriving: list[tuple[Tensor, Tensor]] = []
        self.read_from: list[tuple[Tensor, Tensor]] = []
        self.pinned: dict[int, int] = {}
        self.meanwhile: Callable[[], None] | None = None
        self.told: Card | None = None
        self._free_bytes, self._may_pin = free_bytes, may_pin
        # By its address: most copies begin where the memory does.
        self._staged: dict[int, Tensor] = {}
        self._events = 0
        self._starts: list[int] = []
        self._arenas: set[tuple[int, int]] = set()  # as `whole` has them
        self._ends: dict[int, int] = {}

    # What the runtime asks of a device.

    def free_bytes(self) -> int:
        return self._free_bytes

    def release_cached(self) -> None:
        pass

    def overhead_bytes(self, sizes: Iterable[int], recorded: bool) -> int:
        return 0  # budgets of tests are small

    def synchronize(self) -> None:
        for stream in self.streams:
            while stream.queue:
                stream.step()
        while self.running:
            self.reach(self.running[-1])
        self.races._handle_device_synchronization()

    def stream(self) -> HostStream:
        made = HostStream(self, len(self.streams) + 1)
        self.races._handle_stream_creation(made.number)
        self.streams.append(made)
        return made

    def while_waiting(self, work: Callable[[], None] | None) -> None:
        self.meanwhile = work

    def elapsed_s(self, start: StreamEvent, end: StreamEvent) -> float:
        assert isinstance(start, HostEvent) and isinstance(end, HostEvent)
        assert start.at_s is not None and end.at_s is not None, "an event that is not done"
        return end.at_s - start.at_s

    def card(self) -> Card | None:
        return self.told

    def pin(self, memory: Tensor) -> bool:
        if self._may_pin():
            self.pinned[memory.data_ptr()] = memory.nbytes
            return True
        self._staged[memory.data_ptr()] = memory  # copied all the same, while the host waits
        return False

    def unpin(self, memory: Tensor) -> None:
        del self.pinned[memory.data_ptr()]

    def staging(self, size: int, dtype: torch.dtype) -> Tensor:
        made = torch.empty(size, dtype=dtype, device="cpu")
        self._staged[made.data_ptr()] = made
        return made

    def capture(self, run: Callable[[Cut], None], beside: Graph | None = None) -> Graph:
        assert beside is None or isinstance(beside, HostGraph)
        return capture(run, self.torch, beside)

    # What streams and events ask of it.

    def event(self, stream: int) -> HostEvent:
        self._events += 1
        self.races._handle_event_creation(self._events)
        self.races._handle_event_record(self._events, stream)
        return HostEvent(self, stream, self._events)

    def progress(self) -> None:
        """Let streams go on, or not."""
        for stream in self.streams:
            while stream.queue and self.rng.random() < 0.5:
                stream.step()
        while self.running and self.rng.random() < 0.5:
            self.reach(self.running[0])

    def reach(self, event: HostEvent) -> None:
        """Do what has to be done before an event is."""
        if event.at_s is not None:
            return
        if event.stream != COMPUTE:
            stream = self.streams[event.stream - 1]
            while event.at_s is None:
                stream.step()
            return
        while event.at_s is None:
            first = self.running.popleft()
            first.at_s = self.clock()
            for target, words in first.arriving:
                target.copy_(words)

    def known(self, event: HostEvent) -> None:
        """The host knows that an event is done: so does whatever it asks for from now on."""
        self.races._handle_event_synchronization(event.number)
        if event.stream == COMPUTE:
            self.settle()

    def settle(self) -> None:
        """Copies from pinned memory have ended: it must have been left alone so long."""
        pending, self.read_from = self.read_from, []
        for source, words in pending:
            if not torch.equal(source.view(torch.uint8), words.view(torch.uint8)):
                raise Race("pinned memory was written to while a copy may have read it")

    def locked(self, tensor: Tensor) -> Tensor:
        """The words of a copy's operand."""
        if isinstance(tensor, HostTensor):
            return tensor.inner
        at, nbytes = tensor.data_ptr(), tensor.nbytes
        whole = self._staged.get(at)
        if whole is not None and nbytes <= whole.nbytes:
            return tensor
        staged = ((start, memory.nbytes) for start, memory in self._staged.items())
        for start, size in (*self.pinned.items(), *staged):
            if start <= at and at + nbytes <= start + size:
                return tensor
        raise AssertionError("a copy beside the host needs pinned memory")

    # What the race detector is told.

    def access(self, stream: int, what: str, reads: set[int], writes: set[int]) -> None:
        aliases = {pointer: [what] for pointer in (*reads, *writes)}
        found = self.races._handle_kernel_launch(stream, reads, writes, set(), what, aliases)
        if found:
            raise Race(f"{what} ({caller()}): {found[0]}")

    def base(self, tensor: Tensor) -> set[int]:
        """The memory as a whole that a slot is part of."""
        return (
            {tensor.inner.untyped_storage().data_ptr()} if isinstance(tensor, HostTensor) else set()
        )

    def slot(self, tensor: Tensor) -> set[int]:
        """A slot that is copied to, noticed from now on."""
        if not isinstance(tensor, HostTensor):
            return set()
        start = tensor.data_ptr()
        self._arenas.add(whole(tensor.inner))
        if start not in self._ends:
            self._starts.insert(bisect_right(self._starts, start), start)
        self._ends[start] = max(self._ends.get(start, 0), start + tensor.nbytes)
        return {start}

    def slot_at(self, pointer: int) -> int | None:
        at = bisect_right(self._starts, pointer) - 1
        if at >= 0 and pointer < self._ends[self._starts[at]]:
            return self._starts[at]
        return None

    def read(self, what: str) -> None:
        self.reads.append((what, caller()))
        self.races._handle_stream_synchronization(COMPUTE)
        while self.running:
            self.reach(self.running[-1])
        self.settle()

    def launch(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "speq" and name.startswith("moe_grouped"):
            self.access(COMPUTE, name, self._experts(name, args), set())
            return
        writes = {
            pointer
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(value)
            if isinstance(leaf, HostTensor)
            for pointer in self.base(leaf)
        }
        touched = {
            start
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, HostTensor) and self._starts and not result_is_view(func)
            for start in [self.slot_at(leaf.data_ptr())]
            if start is not None
        }
        if writes or touched:
            self.access(COMPUTE, name, touched, writes)

    def _experts(self, name: str, args: Any) -> set[int]:
        """The slots that a grouped kernel reads, by its table."""
        table, ids = args[TABLE].inner, args[IDS].inner
        found = set()
        for at in ARENAS.get(name, FIRST_ARENA):
            arena = args[at].inner
            stride = arena.stride(0) * arena.element_size()
            if whole(arena) not in self._arenas:
                continue  # of experts that are held for good
            for slot in set(table[ids.flatten()].tolist()):
                if slot >= 0:
                    start = self.slot_at(arena.data_ptr() + slot * stride)
                    if start is None:
                        raise Race(f"{name} ({caller()}): nothing was copied to slot {slot}")
                    found.add(start)
        return found


def result_is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


@contextmanager
def host_device(device: HostDevice | None = None, *peers: HostDevice) -> Iterator[HostDevice]:
    """Runs ask for the device cuda in the block, and compute on this one.

    peers  what they find where they ask for further ones: cuda:1 and so on
    """
    made = HostDevice() if device is None else device
    machines = [made, *peers]
    assert [peer.torch.index for peer in peers] == [*range(1, len(machines))]
    on_host = library.Backend("cuda", "the CUDA kernels, on the host")
    with pytest.MonkeyPatch.context() as patch, host_tensors(*machines):
        patch.setattr("speq.load.find_device", lambda name: made)
        if peers:
            patch.setattr("speq.load.find_peers", lambda device, count: [*peers[:count]])
        patch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU on the host")
        patch.setattr(library, "backend_of", lambda op, device: on_host)
        yield made
