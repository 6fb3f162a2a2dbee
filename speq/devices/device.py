"""What a run asks of the device that it computes on, and the processor's answers.

A device with memory of its own works through streams beside the host, which only gives it work. All
that the runtime knows of streams goes through these protocols. `speq.devices.cuda` has those of a
GPU; tests have a device on the host whose streams run in any order that events allow.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from speq.devices.card import Card
from speq.machine import available_bytes


class Event(Protocol):
    """A place in the work of a stream."""

    def done(self) -> bool:
        """Whether the stream has got there. Nobody waits."""

    def wait(self) -> None:
        """Return when the stream has got there: the host waits."""


class Stream(Protocol):
    """Work that the device does in the order in which it was given."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between the device and pinned memory, of one shape and dtype.

        Neither may be touched, nor given back, until the stream has got behind it.
        """

    def record(self) -> Event:
        """An event behind all that was queued."""

    def after(self, event: Event) -> None:
        """Whatever is queued from now on begins when `event` is done. The host goes on."""


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Queue all of it on the compute stream, over the memory that it was recorded with, and do
        the host's work in between.
        """


# Has the host do its work at this place of a graph, at each replay and not before.
Cut = Callable[[Callable[[], None]], None]


class Device(Protocol):
    """torch: as torch names it, and the only name that tensors are made with."""

    @property
    def torch(self) -> torch.device: ...

    def free_bytes(self) -> int:
        """Memory that is left for tensors."""

    def release_cached(self) -> None:
        """Give back memory that is kept for tensors to come, and that none holds."""

    def synchronize(self) -> None:
        """Return when all that was asked of the device is done."""


class Accelerator(Device, Protocol):
    """A device with memory of its own.

    compute  torch's own stream, which the kernels of passes are queued on
    """

    @property
    def compute(self) -> Stream: ...

    def overhead_bytes(self, sizes: Iterable[int], recorded: bool) -> int:
        """What is taken of it beyond tensors of so many bytes that are kept, slots and activations:
        by libraries, and by an allocator that rounds up.

        recorded  whether passes are recorded, which takes more of both
        """

    def stream(self) -> Stream:
        """A further one, beside the others."""

    def while_waiting(self, work: Callable[[], None] | None) -> None:
        """Have `work` done, again and again, whenever the host waits for an event. It waits for
        none. None: nothing is to be done.
        """

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Seconds between two events that are done."""

    def card(self) -> Card | None:
        """What tells of the card besides; None where nothing does."""

    def pin(self, memory: Tensor) -> bool:
        """Lock host memory, so that copies run beside the host; whether the system let us.

        Copies of memory that is not locked are right, but the host waits for them.
        """

    def unpin(self, memory: Tensor) -> None:
        """Take one `pin` back, before the memory is given back; nothing where there was none."""

    def staging(self, size: int, dtype: torch.dtype) -> Tensor:
        """[size] of pinned memory for small copies, given back as tensors are."""

    def capture(self, run: Callable[[Cut], None], beside: Graph | None = None) -> Graph:
        """Record what `run` queues on the compute stream. It is run first, outside the graph, with
        none of the host's work done.

        beside  a graph whose memory this one may use as well: a replay of either spoils what the
                other left

        `run` neither reads the device nor copies from memory that is not pinned. Tensors that it
        makes, and that somebody holds, keep their places. Raises RuntimeError where it does what
        cannot be recorded.
        """


class Processor:
    """The device cpu: memory and work are the host's own."""

    torch = torch.device("cpu")

    def free_bytes(self) -> int:
        return available_bytes()

    def release_cached(self) -> None:
        pass

    def synchronize(self) -> None:
        pass
