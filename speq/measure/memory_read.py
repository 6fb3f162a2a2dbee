"""A plain read of memory, as a reference for kernels, and the timing of steps."""

from collections.abc import Callable, Sequence
from statistics import median

import torch

from speq.kernels import library
from speq.units import Clock, Progress, track

# A call to time.
Step = Callable[[], None]

# Bytes of a read: many times the last cache, and on a GPU long compared with a kernel's launch.
READ_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}


class MemoryRead:
    """A step that reads `nbytes`, a multiple of 8, with the threads that kernels use."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # Filled: unwritten pages all map to one page of zeros, which is cached.
        self._words = torch.empty(nbytes // 8, dtype=torch.int64, device=device).fill_(1)
        self._sum = self._words.new_empty(1)

    @property
    def nbytes(self) -> int:
        return self._words.nbytes

    def __call__(self) -> None:
        # Not `ops.read_sum`, which also waits for the sum: on a GPU that takes too long.
        library.call("read_sum", self._words, self._sum)


def step_times(steps: Sequence[Step], device: torch.device, clock: Clock) -> list[float]:
    """Time each of `steps`, run one after another.

    On a GPU it is the time between events, not `clock`; the host runs ahead, so a step's launch is
    hidden behind the previous step.
    """
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for step, event in zip(steps, events[1:], strict=True):
            step()
            event.record()
        events[-1].synchronize()
        return [events[at].elapsed_time(events[at + 1]) / 1e3 for at in range(len(steps))]
    marks = [clock()]
    for step in steps:
        step()
        marks.append(clock())
    return [marks[at + 1] - marks[at] for at in range(len(steps))]


def read_gb_per_s(
    read: MemoryRead,
    device: torch.device,
    times: int,
    clock: Clock,
    progress: Progress | None = None,
) -> float:
    """GB/s of a plain read: the median of `times` reads after a warm-up."""
    read()
    turns = track("reading memory", range(times), times, progress)
    times_s = [step_times([read], device, clock)[0] for _ in turns]
    return read.nbytes / median(times_s) / 1e9
