"""Graphs of a device that is the host's: ops are recorded as they run, and run again at a replay.

They run on the tensors they were recorded with, and results go to the memory they went to then. So
a replay finds what lies in that memory now, and whatever Python made of numbers stays as it was. A
read by the host, which no graph can hold, fails as it is recorded.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from speq.devices.device import Cut

aten = torch.ops.aten
# Ops by which the host gets to know data: by themselves, or because their results are as long as
# their data say.
READS = {
    *(aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.nonzero, aten.masked_select),
    *(aten._unique2, aten.unique_dim, aten.unique_consecutive),
}
INDEXED = {aten.index, aten.index_put, aten.index_put_}
COPIES = {aten._to_copy, aten.copy_}


class NotRecorded(RuntimeError):
    """Something that a graph cannot hold, as CUDA reports it."""


@dataclass(eq=False, slots=True)
class HostGraph:
    """Recorded ops, and the tensors that they made.

    beside  graphs that use the same memory, this one included
    """

    beside: list["HostGraph"]
    ops: list[Callable[[], None]] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)

    @torch.inference_mode()
    def replay(self) -> None:
        for graph in self.beside:
            if graph is not self:
                graph.spoil()
        for op in self.ops:
            op()

    @torch.inference_mode()
    def spoil(self) -> None:
        """What others make of memory that is used by them as well."""
        for tensor in self.made:
            poison(tensor)


class Recording(TorchDispatchMode):
    """Records the ops that run while it is entered."""

    def __init__(self, graph: HostGraph, device: torch.device) -> None:
        super().__init__()
        self._graph, self._device = graph, device

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
        ):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._check_reads(func, args, given)
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._check_places(func, results)
        self._record(func, args, kwargs, given, results)
        return result

    def _check_reads(self, func: OpOverload, args: Any, given: list[Tensor]) -> None:
        packet = func.overloadpacket
        if packet in READS:
            raise NotRecorded(f"{packet} reads the device while a graph is recorded")
        if packet in INDEXED and any(
            isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1])
        ):
            raise NotRecorded(f"{packet} counts a mask while a graph is recorded")
        host = [tensor for tensor in given if tensor.device != self._device and tensor.dim()]
        if host:
            raise NotRecorded(f"{packet} uses host memory while a graph is recorded")

    def _check_places(self, func: OpOverload, results: list[Tensor]) -> None:
        for tensor in results:
            if tensor.device != self._device and (tensor.dim() or func.overloadpacket in COPIES):
                raise NotRecorded(f"{func} makes host memory while a graph is recorded")

    def _record(
        self, func: OpOverload, args: Any, kwargs: Any, given: list[Tensor], results: list[Tensor]
    ) -> None:
        schema = func._schema
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        known = {storage_of(tensor) for tensor in given}
        fresh = [tensor for tensor in results if storage_of(tensor) not in known]
        if not fresh and not writes:
            return  # a view: the memory is the same at every replay
        if func.overloadpacket in (aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided):
            self._graph.ops.extend([lambda made=made: poison(made) for made in fresh])  # type: ignore[misc]
        else:
            self._graph.ops.append(lambda: again(func, args, kwargs, fresh, known))
        self._graph.made += fresh


def again(func: OpOverload, args: Any, kwargs: Any, fresh: list[Tensor], known: set[int]) -> None:
    """Run an op once more, and put what it makes where it was then."""
    results = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
    made = [tensor for tensor in results if storage_of(tensor) not in known]
    for target, value in zip(fresh, made, strict=True):
        target.copy_(value)


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def poison(tensor: Tensor) -> None:
    """What nobody may take for a result."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.logical_not_()
    elif not tensor.is_complex():
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def capture(
    run: Callable[[Cut], None], device: torch.device, beside: HostGraph | None = None
) -> HostGraph:
    """As `speq.devices.device.Accelerator.capture`."""
    run(lambda work: None)
    graph = HostGraph([] if beside is None else beside.beside)
    with Recording(graph, device), torch.no_grad():
        run(graph.ops.append)
    graph.beside.append(graph)
    graph.spoil()
    return graph
