"""Memory that was freed, given back to the system."""

import ctypes


def give_back() -> bool:
    """Have the C library return what it keeps of freed memory; False where it cannot.

    glibc keeps freed blocks below a size that grows up to 32 MiB, for each thread that freed some:
    after a model was loaded and encoded, 160 MiB that no budget knows of.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(ctypes.c_size_t(0)))
