"""Alignment of direct reads: offsets, lengths and addresses are whole blocks."""

import ctypes
import mmap

import torch
from torch import Tensor

# A multiple of the logical block of every disk in use, and a page.
ALIGNMENT = 4096
# A huge page of most processors.
HUGE_PAGE = 2 << 20
# Linux's, of 5.14, by names that Python's mmap lacks.
ADVICE = {"MADV_POPULATE_WRITE": 23}


def align(nbytes: int) -> int:
    """Round up to a multiple of ALIGNMENT, where a packed expert may begin or a slot may end."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def allocate_aligned(rows: int, row_bytes: int, device: torch.device | str = "cpu") -> Tensor:
    """Allocate a uint8 tensor [rows, row_bytes] that begins at a multiple of ALIGNMENT.

    It takes ALIGNMENT extra bytes. On the CPU what holds a huge page is mapped on its own: malloc
    may give memory again that lies in small pages already, into which a disk was measured to read
    at 1.2 GB/s in place of 2.5.
    """
    nbytes = rows * row_bytes
    mapped = torch.device(device).type == "cpu" and nbytes >= HUGE_PAGE
    alignment = HUGE_PAGE if mapped else ALIGNMENT
    if mapped:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        room = mmap.mmap(-1, nbytes + alignment, flags=private)
        whole = torch.frombuffer(room, dtype=torch.uint8)
    else:
        whole = torch.empty(nbytes + alignment, dtype=torch.uint8, device=device)
    start = -whole.data_ptr() % alignment
    made = whole[start : start + nbytes].view(rows, row_bytes)
    if made.device.type == "cpu":
        prefer_huge_pages(made)
    return made


def prefer_huge_pages(memory: Tensor) -> None:
    """Ask the system to back unwritten memory with huge pages, if it has them.

    A disk writes to contiguous pages at once: reads into huge pages are up to a fifth faster than
    into other fresh memory. Kernels look up fewer addresses as well.
    """
    _advise(memory, "MADV_HUGEPAGE")


def populate(memory: Tensor) -> bool:
    """Take the memory of a tensor from the system without changing what it holds, while other
    threads may write to it. False if the system cannot: it comes as it is written.
    """
    return _advise(memory, "MADV_POPULATE_WRITE")


def release_pages(memory: Tensor) -> None:
    """Give the memory of a tensor that nobody reads back to the system, in whole pages, until it is
    written again.
    """
    _advise(memory, "MADV_DONTNEED")


def free_memory(tensor: Tensor) -> None:
    """Free the memory of a tensor that nobody reads any more, but something may still hold."""
    storage = tensor.untyped_storage()
    if storage.resizable():
        storage.resize_(0)
    else:  # mapped by `allocate_aligned`
        release_pages(tensor)


def _advise(memory: Tensor, advice: str) -> bool:
    """Do nothing where the system does not know the advice; whether it was followed."""
    start = align(memory.data_ptr())
    length = (memory.data_ptr() + memory.nbytes) // ALIGNMENT * ALIGNMENT - start
    number = getattr(mmap, advice, ADVICE.get(advice))
    if number is None:
        return False
    if length <= 0:  # no whole page
        return True
    libc = ctypes.CDLL(None)
    return libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), number) == 0
