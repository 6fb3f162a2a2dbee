"""A GPU through torch.cuda."""

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speq.devices import allocator
from speq.devices.card import Card, card_of
from speq.devices.device import Cut, Graph, StreamEvent
from speq.errors import Broken

PoolHandle = Any  # torch's type for memory that graphs share


@dataclass(frozen=True, slots=True)
class CudaEvent:
    device: "CudaDevice"
    event: torch.cuda.Event

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        meanwhile = self.device.meanwhile
        if meanwhile is None:
            self.event.synchronize()
            return
        while not self.event.query():
            meanwhile()
            time.sleep(0)  # let other threads run


@dataclass(frozen=True, slots=True)
class CudaStream:
    device: "CudaDevice"
    stream: torch.cuda.Stream

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def record(self) -> CudaEvent:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return CudaEvent(self.device, event)

    def after(self, event: StreamEvent) -> None:
        self.stream.wait_event(require_cuda_event(event).event)


@dataclass(frozen=True, slots=True)
class CudaGraph:
    """A recorded graph. pool: its memory pool; steps: replays of pieces, and the host's work
    between them.
    """

    pool: PoolHandle
    steps: tuple[Callable[[], None], ...]

    def replay(self) -> None:
        for step in self.steps:
            step()


def require_cuda_event(event: StreamEvent) -> CudaEvent:
    if not isinstance(event, CudaEvent):
        raise Broken(f"{event!r} is an event of another device")
    return event


class CudaDevice:
    """The GPU `cuda:INDEX` of torch. It owns its streams; torch's allocator owns the memory."""

    def __init__(self, index: int = 0) -> None:
        self.torch = torch.device("cuda", index)
        self._recorded: torch.cuda.Stream | None = None
        self.meanwhile: Callable[[], None] | None = None

    @property
    def compute(self) -> CudaStream:
        return CudaStream(self, torch.cuda.current_stream(self.torch))

    def stream(self) -> CudaStream:
        return CudaStream(self, torch.cuda.Stream(self.torch))

    def while_waiting(self, work: Callable[[], None] | None) -> None:
        self.meanwhile = work

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch)
        # Memory that torch's allocator holds without tensors is free as well.
        idle = torch.cuda.memory_reserved(self.torch) - torch.cuda.memory_allocated(self.torch)
        return free + idle

    def overhead_bytes(self, sizes: Iterable[int], recorded: bool) -> int:
        major, _ = torch.cuda.get_device_capability(self.torch)
        return allocator.overhead_bytes(sizes, recorded, allocator.blas_bytes(major))

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def elapsed_s(self, start: StreamEvent, end: StreamEvent) -> float:
        return require_cuda_event(start).event.elapsed_time(require_cuda_event(end).event) / 1e3

    def card(self) -> Card | None:
        return card_of(str(torch.cuda.get_device_properties(self.torch).uuid))

    def pin(self, memory: Tensor) -> bool:
        # Not torch's own pinned allocator: it rounds up to a power of two, gigabytes here.
        registered = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        return self._went_well(int(registered))

    def unpin(self, memory: Tensor) -> None:
        self._went_well(int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())))

    @staticmethod
    def _went_well(status: int) -> bool:
        """True if a call succeeded. An error is cleared, or torch would attribute it to the next
        kernel.
        """
        if status != 0:
            # The runtime that torch has loaded into the process.
            forget = getattr(ctypes.CDLL(None), "cudaGetLastError", None)
            if forget is not None:
                forget()
        return status == 0

    def staging(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def capture(self, run: Callable[[Cut], None], beside: Graph | None = None) -> CudaGraph:
        # The first call sets up kernels and libraries, which cannot be recorded. It runs on the
        # recorded stream, because cuBLAS has a workspace per stream.
        stream = self._recorded = self._recorded or torch.cuda.Stream(self.torch)
        stream.wait_stream(torch.cuda.current_stream(self.torch))
        with torch.cuda.stream(stream):
            run(lambda work: None)
        torch.cuda.current_stream(self.torch).wait_stream(stream)
        # As in torch.cuda.graph, which does not support cuts.
        torch.cuda.synchronize(self.torch)
        torch.cuda.empty_cache()
        with torch.cuda.stream(stream):
            return record_graph(run, None if beside is None else pool_of(beside))


def pool_of(graph: Graph) -> PoolHandle:
    if not isinstance(graph, CudaGraph):
        raise Broken(f"{graph!r} is a graph of another device")
    return graph.pool


def record_graph(run: Callable[[Cut], None], pool: PoolHandle | None) -> CudaGraph:
    """Record on the current stream, which is not torch's own; a piece ends at each cut."""
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    steps: list[Callable[[], None]] = []
    piece = begin_capture(pool)

    def cut(work: Callable[[], None]) -> None:
        nonlocal piece
        piece.capture_end()
        steps.extend((piece.replay, work))
        piece = begin_capture(pool)

    try:
        run(cut)
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the error is known already
            piece.capture_end()
        raise
    piece.capture_end()
    return CudaGraph(pool, (*steps, piece.replay))


def begin_capture(pool: PoolHandle) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # Threads that poll their copies would abort a capture of mode "global".
    graph.capture_begin(pool, capture_error_mode="thread_local")
    return graph
