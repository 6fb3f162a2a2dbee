"""Lists of native CPU ops with their arguments, run without a call of each from Python.

A stop in a list is a place where the host has its part. csrc/cpu/op_list.h has the lists.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar
from weakref import finalize

from torch import Tensor

from speq.kernels import library

# Longest message of an op that fails.
MESSAGE_BYTES = 2000

Starts = ctypes.Array[ctypes.c_int64]


class OpList:
    """Native ops in the order of their calls. Their tensors live as long as the list."""

    def __init__(self) -> None:
        functions = _functions()
        self._run = functions.speq_op_list_run
        self._list = ctypes.c_void_p(functions.speq_op_list_new())
        self._message = ctypes.create_string_buffer(MESSAGE_BYTES)
        finalize(self, functions.speq_op_list_free, self._list)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Add the native ops that this thread calls in the block to the list; they do not run."""
        record = _functions().speq_op_list_record
        record(self._list)
        try:
            yield
        finally:
            record(None)

    def stop(self) -> int:
        """Add a stop. Return the index of what will follow it, which is never 0."""
        return int(_functions().speq_op_list_stop(self._list))

    def gate(self, ids: Tensor, table: Tensor | None) -> int:
        """Add a stop that straight runs pass: then the ops up to `end` do the host's part. Return
        the index of what will follow it.

        ids    int64, contiguous, as they are in the run
        table  [N] int64: a run stops if an entry of the ids is negative; None: it never does

        Both must live as long as the list.
        """
        entries = None if table is None else table.data_ptr()
        gate = _functions().speq_op_list_gate
        return int(gate(self._list, ids.data_ptr(), ids.numel(), entries))

    def end(self) -> int:
        """End what a gate begins. Return the index of what will follow."""
        return int(_functions().speq_op_list_end(self._list))

    def run(self, starts: Starts, first: int, straight: bool = False) -> int:
        """Run ops from index `first` to the next stop. Return the index of what follows it, or 0
        at the end of the list.

        starts    of the pass's sequences, by the numbers that recorded ops have in place of them
        straight  pass gates

        Raises RuntimeError with the message of an op that fails.
        """
        following: int = self._run(
            *(self._list, starts, len(starts), first, straight, self._message, MESSAGE_BYTES)
        )
        if following < 0:
            raise RuntimeError(self._message.value.decode(errors="replace"))
        return following

    @property
    def ran_s(self) -> float:
        """Seconds that ops have run, in all runs."""
        return float(_functions().speq_op_list_ran_s(self._list))

    def passed(self, first: int = 0) -> list[tuple[int, float, float]]:
        """The gates that the last run passed, from number `first` on: the index of what follows
        each, and when its part began and ended, in seconds of perf_counter.
        """
        count = ctypes.c_int64()
        held = _functions().speq_op_list_passed(self._list, ctypes.byref(count))
        gates = (held[number] for number in range(first, count.value))
        return [(gate.following, gate.start_s, gate.end_s) for gate in gates]


def starts_of(positions: Sequence[int]) -> Starts:
    """The position of each sequence's first token, as `OpList.run` takes them."""
    return (ctypes.c_int64 * len(positions))(*positions)


class _Passed(ctypes.Structure):
    _fields_: ClassVar = [
        ("following", ctypes.c_int64),
        ("start_s", ctypes.c_double),
        ("end_s", ctypes.c_double),
    ]


@cache
def _functions() -> Any:
    functions = library.cpu_library()
    functions.speq_op_list_new.restype = ctypes.c_void_p
    functions.speq_op_list_ran_s.restype = ctypes.c_double
    functions.speq_op_list_passed.restype = ctypes.POINTER(_Passed)
    functions.speq_op_list_gate.argtypes = [
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    ]
    for name in ("stop", "gate", "end", "run"):
        getattr(functions, f"speq_op_list_{name}").restype = ctypes.c_int64
    functions.speq_op_list_run.argtypes = [
        *(ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64), ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_int, ctypes.c_char_p, ctypes.c_int64),
    ]
    return functions
