"""Protocols of devices that a run computes on, and the processor.

An accelerator runs streams concurrently with the host, which only queues work. The runtime uses
streams only through these protocols. `speq.devices.cuda` implements them for a GPU; tests have a
device on the host whose streams run in any order that events allow.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from speq.devices.card import Card
from speq.host_memory import available_bytes


class StreamEvent(Protocol):
    """A point in the work of a stream."""

    def done(self) -> bool:
        """True if the stream has reached the event. Does not wait."""

    def wait(self) -> None:
        """Make the host wait until the stream has reached the event."""


class Stream(Protocol):
    """A queue of work that the device does in order."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between the device and pinned memory, of one shape and dtype.

        Neither may be touched or freed until the stream has done it.
        """

    def record(self) -> StreamEvent:
        """Record an event after all queued work."""

    def after(self, event: StreamEvent) -> None:
        """Delay all work queued from now on until `event` is done. The host does not wait."""


class Graph(Protocol):
    def replay(self) -> None:
        """Queue the recorded work on the compute stream, on the memory of its recording, and do the
        host's work in between.
        """


# Places host work at this point of a graph; it runs at each replay, not during recording.
Cut = Callable[[Callable[[], None]], None]


class Device(Protocol):
    """A device. torch: torch's device, on which all tensors are created."""

    @property
    def torch(self) -> torch.device: ...

    def free_bytes(self) -> int:
        """Free bytes for tensors."""

    def release_cached(self) -> None:
        """Free memory that is cached for later tensors."""

    def synchronize(self) -> None:
        """Wait until all work of the device is done."""


class Accelerator(Device, Protocol):
    """A device with memory of its own.

    compute  torch's own stream, which runs the kernels of passes
    """

    @property
    def compute(self) -> Stream: ...

    def overhead_bytes(self, sizes: Iterable[int], recorded: bool) -> int:
        """Memory taken beyond kept tensors of these sizes, slots and activations: by libraries and
        by the allocator's rounding.

        recorded  whether passes are recorded, which takes more of both
        """

    def stream(self) -> Stream:
        """Create a further stream."""

    def while_waiting(self, work: Callable[[], None] | None) -> None:
        """Call `work` repeatedly whenever the host waits for an event. It must not wait itself.
        None: call nothing.
        """

    def elapsed_s(self, start: StreamEvent, end: StreamEvent) -> float:
        """Seconds between two finished events."""

    def card(self) -> Card | None:
        """Source of GPU readings; None if there is none."""

    def pin(self, memory: Tensor) -> bool:
        """Lock host memory, so that copies run asynchronously. Return False if the system refuses.

        Copies of unlocked memory are correct, but the host waits for them.
        """

    def unpin(self, memory: Tensor) -> None:
        """Undo one `pin` before the memory is freed; do nothing if there was none."""

    def staging(self, size: int, dtype: torch.dtype) -> Tensor:
        """Allocate [size] of pinned memory for small copies, freed as tensors are."""

    def capture(self, run: Callable[[Cut], None], beside: Graph | None = None) -> Graph:
        """Record the work that `run` queues on the compute stream. `run` is first called outside
        the graph, without the host's work.

        beside  a graph whose memory this one may share: a replay of either overwrites the other's
                results

        `run` must neither read the device nor copy from unpinned memory. Tensors that it creates,
        and that are still referenced, keep their addresses. Raises RuntimeError for work that
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
