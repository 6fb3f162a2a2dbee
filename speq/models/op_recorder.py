"""Records the ops of a pass over fixed buffers, so that it can be run again without its modules.

Each buffer has one address for good. Native ops are recorded with their arguments and run as one
call from Python. Ops of torch are few, and are called one by one at stops between them.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from speq.kernels.op_list import OpList, starts_of

# Ops that make tensors whose values nobody reads.
UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
ZEROED = frozenset({"zeros", "zeros_like", "new_zeros"})


class Unrecordable(Exception):
    """A pass that cannot be run again with other values in its buffers."""


class BufferPool:
    """Buffers of a recorded pass. The layer after the next one uses those of a layer again."""

    def __init__(self) -> None:
        self._made: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._free: list[Tensor] = []
        self._parity = 0

    def next_layer(self) -> None:
        self._parity = 1 - self._parity
        self._free = [*self._made[self._parity]]

    def keep(self, buffer: Tensor) -> None:
        """Use a buffer no more."""
        for made in self._made:
            made[:] = [each for each in made if each.data_ptr() != buffer.data_ptr()]

    def take(self, like: Tensor) -> Tensor:
        """A zeroed buffer with the shape, strides and dtype of a tensor."""
        for at, buffer in enumerate(self._free):
            if (buffer.shape, buffer.stride(), buffer.dtype) == (
                *(like.shape, like.stride()),
                like.dtype,
            ):
                return self._free.pop(at).zero_()
        buffer = torch.zeros_like(like)
        if buffer.stride() != like.stride():
            buffer = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).zero_()
        self._made[self._parity].append(buffer)
        return buffer


class OpRecorder(TorchDispatchMode):
    """Records the ops that run inside it. Native ones do not run; torch's run on zeros.

    Raises Unrecordable for an op whose result the host reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops = OpList()
        self._pool = BufferPool()
        # By the index of what follows a stop: the host's part there, and where to go on.
        self._parts: dict[int, tuple[Callable[[], object], int]] = {}

    def run(self, starts: Sequence[int], straight: bool = False) -> None:
        """Run the pass on what is in its buffers.

        starts    position of each sequence's first token
        straight  leave out the host's part where the recording has ops for it
        """
        parts, run, positions = self._parts, self.ops.run, starts_of(starts)
        at = run(positions, 0, straight)
        while at:
            part, at = parts[at]
            part()
            at = run(positions, at, straight)

    def cut(self, part: Callable[[], object]) -> None:
        """Call the host's `part` at this point of the pass."""
        at = self.ops.stop()
        self._parts[at] = part, at

    def cut_or_issue(
        self,
        part: Callable[[], Tensor],
        issue: Callable[[], Tensor],
        ids: Tensor,
        table: Tensor | None,
    ) -> tuple[Tensor, int]:
        """Have a tensor made by the host's `part`, or in straight runs by the ops that `issue`
        calls. Return its buffer, and a number that `OpList.passed` has for such runs.

        ids, table  as `OpList.gate` has them
        """
        at = self.ops.gate(ids, table)
        output = issue()
        self._parts[at] = (lambda: output.copy_(part())), self.ops.end()
        return output, at

    def keep(self, buffer: Tensor) -> None:
        """Leave a buffer's values until the end of the pass."""
        self._pool.keep(buffer)

    def next_layer(self) -> None:
        """From here on, nothing reads what was made before the layer that ends here, but its
        results.
        """
        self._pool.next_layer()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if func.namespace == "speq":
            with self.ops.recording():
                func(*args, **kwargs)
            return None
        if is_read(func, args):
            raise Unrecordable(f"the host reads the result of {name}")
        if name in UNWRITTEN or name in ZEROED:
            buffer = self._pool.take(func(*args, **kwargs))
            if name in ZEROED:
                self.cut(buffer.zero_)
            return buffer
        if is_composite(func):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if func._schema.is_mutable:
            self.cut(lambda: func(*args, **kwargs))
            return args[0] if "out" not in kwargs else kwargs["out"]
        made = func(*args, **kwargs)
        if is_view(func):
            return made
        return self._compute(func, args, kwargs, made)

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: Any, made: Any) -> Any:
        """Record an op of torch that made new tensors. Return buffers for its results."""
        one = isinstance(made, Tensor)
        results = [made] if one else list(made)
        if not all(isinstance(each, Tensor) for each in results):
            raise Unrecordable(f"{func} returns more than tensors")
        buffers = [self._pool.take(each) for each in results]
        into = writing(func)
        if into is not None:
            overload, names = into
            outs = dict(zip(names, buffers, strict=True))
            self.cut(lambda: overload(*args, **kwargs, **outs))
        else:

            def copy() -> None:
                found = func(*args, **kwargs)
                for buffer, each in zip(buffers, [found] if one else found, strict=True):
                    buffer.copy_(each)

            self.cut(copy)
        return buffers[0] if one else tuple(buffers)


def is_read(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """True if the host reads what an op computes: a value, or how many values there are."""
    if func is torch.ops.aten.index.Tensor:  # by integers it makes as many as these
        return any(each is not None and not each.dtype.is_signed for each in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags})


def is_composite(func: OpOverload) -> bool:
    """True if an op is made of other ops on every device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def is_view(func: OpOverload) -> bool:
    """True if what an op returns is the memory of its arguments."""
    return any(each.alias_info is not None for each in func._schema.returns)


@cache
def writing(func: OpOverload) -> tuple[OpOverload, list[str]] | None:
    """The overload of an op that writes its results into tensors, and their names, if there is
    one.
    """
    given = [(each.name, str(each.type)) for each in func._schema.arguments]
    packet = func.overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments = overload._schema.arguments
        outs = [each.name for each in arguments if each.is_out]
        taken = [(each.name, str(each.type)) for each in arguments if not each.is_out]
        if taken == given and len(outs) == len(func._schema.returns):
            return overload, outs
    return None
