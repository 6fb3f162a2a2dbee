"""Return of freed memory to the system."""

import ctypes


def give_back() -> bool:
    """Make the C library return freed memory to the system; False if it cannot.

    glibc keeps freed blocks below a size that grows up to 32 MiB, per thread that freed some: after
    loading and encoding a model, 160 MiB that no budget includes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(ctypes.c_size_t(0)))
