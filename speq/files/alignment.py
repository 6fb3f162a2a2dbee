"""What reads past the page cache ask for: offsets, lengths and addresses in whole blocks."""

import ctypes
import mmap

import torch
from torch import Tensor

# A multiple of the logical block of every disk in use, and a page.
ALIGNMENT = 4096


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT: where a record may begin, or a slot end."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def aligned_bytes(rows: int, row_bytes: int, device: torch.device | str = "cpu") -> Tensor:
    """An empty uint8 tensor [rows, row_bytes] that begins at a multiple of ALIGNMENT.

    It takes ALIGNMENT bytes more than it shows.
    """
    whole = torch.empty(rows * row_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -whole.data_ptr() % ALIGNMENT
    made = whole[start : start + rows * row_bytes].view(rows, row_bytes)
    if made.device.type == "cpu":
        prefer_huge_pages(made)
    return made


def prefer_huge_pages(memory: Tensor) -> None:
    """Ask the system to back memory nobody has written to yet with huge pages, if it has them.

    A disk writes into a run of contiguous pages at once: reads into huge ones are up to a fifth
    faster than into what else is fresh. Kernels look up fewer addresses as well.
    """
    start = aligned(memory.data_ptr())
    length = memory.data_ptr() + memory.nbytes - start
    if hasattr(mmap, "MADV_HUGEPAGE") and length > 0:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
