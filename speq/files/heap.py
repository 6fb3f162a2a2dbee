"""The process's heap: what collections look through, and what goes back to the system."""

import ctypes
import gc
from functools import cache


@cache
def spare_collections() -> None:
    """Leave the objects that exist out of garbage collections, once in a process.

    Torch and transformers are 400,000 objects. A collection that looks through all of them takes
    0.2 s, and comes in the middle of a text. Called before the first model is loaded, so that no
    model is left out, and what a closed one leaves is collected as ever.
    """
    gc.freeze()


def give_back() -> bool:
    """Make the C library return freed memory to the system; False if it cannot.

    glibc keeps freed blocks below a size that grows up to 32 MiB, per thread that freed some: after
    loading and encoding a model, 160 MiB that no budget includes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(ctypes.c_size_t(0)))
