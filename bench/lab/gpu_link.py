"""What a GPU and its link give before any of our kernels run: copies, launches, waits and graphs.

    memory read     of the GPU's own memory
    to GPU          out of pinned memory, one copy behind the other on a stream
    to GPU, waited  the same, each copy waited for before the next begins
    from GPU        into pinned memory, each copy waited for: how late a host learns of a result
    launch          host time of a kernel that does next to nothing, none waited for
    wait            for such a kernel, launched alone
    graph node      GPU time of such a kernel as one of many in a graph
    pin             locking memory of the host that was written to before

Copies are timed by events, all else by the host's clock. Each figure is a median over rounds.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Annotated, Any

import torch
from torch import Tensor

from bench.lab.command import main
from speq.devices.named import find_device
from speq.files.alignment import allocate_aligned
from speq.kernels import library
from speq.measure.memory_read import READ_BYTES, MemoryRead, read_gb_per_s
from speq.measure.picture import Axis, Picture
from speq.measure.report import Column, Report
from speq.measure.settings import Rounds
from speq.options.declared import Option, Options
from speq.options.kinds import ListOf, Size
from speq.units import Clock, Progress, format_bytes, parse_bytes, track


@dataclass(frozen=True, slots=True)
class GpuLinkSettings(Options):
    sizes: Annotated[tuple[str, ...], Option("Sizes of copies.", ListOf(Size(kept=True)))] = (
        *("64KiB", "256KiB"),
        *("1MiB", "4MiB", "16MiB"),
    )
    volume: Annotated[str, Option("Copied for each measurement.", Size(kept=True))] = "256MiB"
    rounds: Rounds = 5


# What a host reads of a token: its id, or the routes of a layer.
RESULT_BYTES = 1 << 10
# Kernels of one launch figure, and nodes of a graph.
LAUNCHES = 256
PIN_BYTES = 1 << 30

COLUMNS: dict[str, Column] = {
    "what": ("what", "{}"),
    "size": ("size_bytes", format_bytes),
    "us": ("time_us", "{:.1f}"),
    "GB/s": ("gb_per_s", "{:.2f}"),
}
WHAT, SIZE = Axis("what", "what"), Axis("size_bytes", "bytes of a copy")
PICTURES = (
    Picture(
        *("speed", "How fast bytes move", (SIZE,), (Axis("gb_per_s", "speed, GB/s"),), (WHAT,)),
        mark="points",
    ),
    Picture("calls", "What calls take", (WHAT,), (Axis("time_us", "time, us"),), (SIZE,)),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """Rounds of one thing measured. seconds: of one call, in each round."""

    what: str
    seconds: list[float]
    size_bytes: int | None = None

    def row(self) -> dict[str, Any]:
        time_s, size = median(self.seconds), self.size_bytes
        return {
            "what": self.what,
            "size_bytes": size,
            "time_us": time_s * 1e6,
            "gb_per_s": None if size is None else size / time_s / 1e9,
            "rounds": len(self.seconds),
        }


def run(
    settings: GpuLinkSettings, progress: Progress | None = None, clock: Clock = time.perf_counter
) -> Report:
    """Measure the GPU. Raises SpeqError where there is none."""
    sizes = [parse_bytes(size) for size in settings.sizes]
    device = find_device("cuda").torch
    card = ProbedCard(device, max(*sizes, RESULT_BYTES), clock)
    read = memory_read(device, settings.rounds, clock)
    found = track("measuring the GPU", figures(card, sizes, settings), 2 * len(sizes) + 5, progress)
    rows = [read.row(), *(figure.row() for figure in found)]
    backend = library.backend_of("read_sum", device.type)
    more = {"device": device.type, "memory_read_by": backend.name}
    return Report("gpu-link", device.type, settings.as_json() | more, rows)


def memory_read(device: torch.device, rounds: int, clock: Clock) -> Figure:
    """A read of the GPU's memory; what was read is given back."""
    read = MemoryRead(READ_BYTES[device.type], device)
    rate = read_gb_per_s(read, device, rounds, clock)
    return Figure("memory read", [read.nbytes / rate / 1e9], read.nbytes)


def figures(card: "ProbedCard", sizes: list[int], settings: GpuLinkSettings) -> Iterator[Figure]:
    """All of the table but the read of memory."""
    volume = parse_bytes(settings.volume)

    def rounds(measure: Callable[[], float]) -> list[float]:
        measure()  # what is set up at a first call does not count
        return [measure() for _ in range(settings.rounds)]

    for size in sizes:
        copies = max(volume // size, 1)
        yield Figure("to GPU", rounds(partial(card.copies, size, copies)), size)
        yield Figure("to GPU, waited", rounds(partial(card.waited_copies, size, copies)), size)
    yield Figure("from GPU", rounds(card.result), RESULT_BYTES)
    yield Figure("launch", rounds(card.launch))
    yield Figure("wait", rounds(card.wait))
    yield Figure("graph node", rounds(card.graph_node()))
    yield Figure("pin", [card.pin(PIN_BYTES) for _ in range(settings.rounds)], PIN_BYTES)


class ProbedCard:
    """A GPU with a buffer on either side of the link, and one word for kernels to write to."""

    def __init__(self, device: torch.device, most_bytes: int, clock: Clock) -> None:
        self._host = torch.empty(most_bytes, dtype=torch.uint8, pin_memory=True).fill_(1)
        self._there = torch.empty(most_bytes, dtype=torch.uint8, device=device)
        self._word = torch.zeros(1, device=device)
        self._clock = clock

    def copies(self, size: int, count: int) -> float:
        """Seconds of a copy to the GPU, of `count` on one stream."""
        source, target = self._host[:size], self._there[:size]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(count):
            target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    def waited_copies(self, size: int, count: int) -> float:
        """Seconds of a copy to the GPU that is waited for."""
        return self._seconds(lambda: self._there[:size].copy_(self._host[:size]), count)

    def result(self) -> float:
        """Seconds until the host has RESULT_BYTES of the GPU."""
        source, target = self._there[:RESULT_BYTES], self._host[:RESULT_BYTES]
        return self._seconds(lambda: target.copy_(source), LAUNCHES)

    def launch(self) -> float:
        """Seconds of the host for a launch."""
        return self._seconds(lambda: self._word.add_(1), LAUNCHES)

    def wait(self) -> float:
        """Seconds from a launch until the host knows of its end."""

        def launch_and_wait() -> None:
            self._word.add_(1)
            torch.cuda.synchronize()

        return self._seconds(launch_and_wait, LAUNCHES)

    def graph_node(self) -> Callable[[], float]:
        """What measures the seconds of a node of a graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES):
                self._word.add_(1)

        def replay() -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / LAUNCHES

        return replay

    def pin(self, nbytes: int) -> float:
        """Seconds to lock memory of the host."""
        memory = allocate_aligned(1, nbytes).fill_(1)
        cudart = torch.cuda.cudart()
        start = self._clock()
        torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        seconds = self._clock() - start
        torch.cuda.check_error(cudart.cudaHostUnregister(memory.data_ptr()))
        return seconds

    def _seconds(self, call: Callable[[], Tensor | None], count: int) -> float:
        """Seconds of the host for a call, of `count` behind each other."""
        torch.cuda.synchronize()
        start = self._clock()
        for _ in range(count):
            call()
        seconds = self._clock() - start
        torch.cuda.synchronize()
        return seconds / count


if __name__ == "__main__":
    main("gpu_link")
