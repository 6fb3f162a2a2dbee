"""How much of a file the system's page cache holds, and how to have it hold nothing."""

import ctypes
import mmap
import os
from pathlib import Path

MAP_FAILED = ctypes.c_void_p(-1).value


def drop(path: Path) -> None:
    """Drop a file's clean pages from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def cached_bytes(path: Path) -> int:
    """Bytes of a file in the page cache, in whole pages (mincore(2)). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    size = path.stat().st_size
    if size == 0:
        return 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    finally:
        os.close(descriptor)
    if address == MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"{path} cannot be mapped")
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    try:
        if libc.mincore(address, size, pages) != 0:
            raise OSError(ctypes.get_errno(), f"mincore fails for {path}")
    finally:
        libc.munmap(address, size)
    return sum(byte & 1 for byte in pages.raw[: -(-size // mmap.PAGESIZE)]) * mmap.PAGESIZE
