"""Tensors that say they are on a GPU, and lie in the host's memory.

What a GPU refuses is refused here: operands on different devices, and data read from Python. What
makes the host wait for a GPU is seen here, whoever asks for it. The CUDA kernels of ours run as
they were built for the host.
"""

import ctypes
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from speq.kernels import library
from tests.helpers.backends import BUILT_ON_HOST, HOST_NAMESPACE, load_host_ops
from tests.helpers.paths import FOLDERS

GUARD = BUILT_ON_HOST.with_name("libspeq_host_guard.so")
DEVICE, SECOND, THIRD = (torch.device("cuda", number) for number in range(3))
CPU = torch.device("cpu")

aten = torch.ops.aten
# Ops whose results have as many elements as their data say: the host waits for the number.
COUNTED = {aten.nonzero, aten._unique2, aten.unique_dim, aten.masked_select, aten.equal}


class HostTensor(Tensor):
    """On a device, as far as torch is concerned. inner: its words, on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device = DEVICE) -> "HostTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"HostTensor({self.inner})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], *_: Any) -> "HostTensor":
        return HostTensor(parts["inner"])

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()


class Machine:
    """What a device notices of the ops on its tensors; this one notices nothing."""

    def read(self, what: str) -> None:
        """The host asks for data, and waits for all work before."""

    def launch(self, func: OpOverload, args: Any, kwargs: Any, result: Any) -> None:
        """An op was queued on the compute stream."""


# By the number of the device.
_machines = {number: Machine() for number in range(3)}


class HostMode(TorchDispatchMode):
    """Makes tensors of GPUs HostTensors while it is entered."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})


def run(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an op where its operands say."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        with HostMode():
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if func.overloadpacket is aten._pin_memory:  # all of the host's memory is as good
        return args[0].clone()
    leaves = tree_leaves((args, kwargs))
    held = [leaf for leaf in leaves if isinstance(leaf, HostTensor)]
    asked = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    there = asked[0].type == "cuda" if asked else bool(held)
    on = asked[0] if asked and there else held[0].device if held else DEVICE
    check_devices(func, leaves)
    if (to_host := read_of(func, args, there)) is not None:
        of = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, HostTensor))
        _machines[of.device.index].read(to_host)
    inner_args, inner_kwargs = tree_map(on_cpu, (args, kwargs))
    # Views of tensors made outside inference mode are none of it, which wrappers cannot tell.
    with torch.inference_mode(False), torch.no_grad():
        # Ops of the host's own tensors are the processor's.
        asked_of = on_host(func) if held or there else func
        result = asked_of(*inner_args, **inner_kwargs)
        result = wrapped(result, held, there, on) if held or there else result
    if held or there:
        _machines[on.index or 0].launch(func, args, kwargs, result)
    return result


def on_host(func: OpOverload) -> Callable[..., Any]:
    if func.namespace != "speq":
        return func
    name = func._schema.name.partition("::")[2]
    if name.removesuffix("_out") not in library.ops_of("cuda"):
        return func
    return getattr(getattr(torch.ops, HOST_NAMESPACE), name).default


def on_cpu(leaf: Any) -> Any:
    if isinstance(leaf, HostTensor):
        return leaf.inner
    return CPU if isinstance(leaf, torch.device) and leaf.type == "cuda" else leaf


def check_devices(func: OpOverload, leaves: list[Any]) -> None:
    """As CUDA has it: all operands on one device, but for copies and numbers."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    mixed = {
        str(tensor.device) if isinstance(tensor, HostTensor) else "cpu"
        for tensor in tensors
        if tensor.dim()
    }
    if len(mixed) > 1 and func.overloadpacket not in (aten.copy_, aten._to_copy):
        raise RuntimeError(
            f"{func}: expected all tensors to be on the same device, but found "
            + " and ".join(sorted(mixed, reverse=True))
        )


def read_of(func: OpOverload, args: Any, there: bool) -> str | None:
    """How the host gets to data of the device by this op, if it does."""
    packet = func.overloadpacket
    if not args or not isinstance(args[0], Tensor):
        return None
    from_device = isinstance(args[0], HostTensor)
    if packet is aten.copy_:
        return "copy_" if not from_device and isinstance(args[1], HostTensor) else None
    if not from_device:
        return None
    if packet is aten._local_scalar_dense:
        return "item"
    if packet is aten._to_copy and not there:
        return "to the host"
    if packet in COUNTED:
        return packet.__name__
    if packet in (aten.index, aten.index_put_, aten.index_put):
        masks = [i for i in tree_leaves(args[1]) if isinstance(i, Tensor) and i.dtype == torch.bool]
        return "a mask as an index" if masks else None
    return None


def wrapped(result: Any, held: list[HostTensor], there: bool, on: torch.device) -> Any:
    """Results as tensors of the device, an operand itself where the op gave it back."""
    known = {id(tensor.inner): tensor for tensor in held}

    def wrap(tensor: Tensor) -> Tensor:
        if id(tensor) in known:
            return known[id(tensor)]
        return HostTensor(tensor, torch.device("cuda", on.index or 0)) if there else tensor

    return tree_map_only(Tensor, wrap, result)


@cache
def load_libraries() -> None:
    """The kernels for the host, and a guard: torch without CUDA knows no device of that kind."""
    for path in (BUILT_ON_HOST, GUARD):
        if not path.exists():
            pytest.fail(f"{path} was not built: run `make host`")
    ctypes.CDLL(str(GUARD))
    load_host_ops()


@contextmanager
def host_tensors(*machines: Machine) -> Iterator[None]:
    """Tensors made on GPUs in the block are HostTensors, and machines notice their ops: the first
    those of cuda:0.
    """
    load_libraries()
    before, lifted = dict(_machines), torch._C._only_lift_cpu_tensors()
    _machines.update(enumerate(machines))
    # torch.tensor(..., device=...) then makes its words on the CPU and copies them, as an op.
    torch._C._set_only_lift_cpu_tensors(True)
    with pytest.MonkeyPatch.context() as patch, HostMode():
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        try:
            yield
        finally:
            _machines.update(before)
            torch._C._set_only_lift_cpu_tensors(lifted)


def caller() -> str:
    """Where in our code the op under way was asked for."""
    for frame in reversed(traceback.extract_stack(limit=40)):
        path = Path(frame.filename)
        if any(path.is_relative_to(folder) for folder in FOLDERS.values()):
            return f"{path.name}:{frame.lineno} {frame.name}"
    return "outside"
