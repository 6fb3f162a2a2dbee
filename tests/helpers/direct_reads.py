"""Reads past the page cache: whether a file can be read so, and a disk that asks more of them."""

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from speq.files.alignment import ALIGNMENT


def reads_directly(path: Path) -> bool:
    """Whether the file system of `path` has reads past the page cache."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        os.preadv(descriptor, [mmap.mmap(-1, ALIGNMENT)], 0)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def ask_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that writes to whole blocks of memory only."""
    really_read = os.preadv

    def read(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            starts = [torch.frombuffer(part, dtype=torch.uint8).data_ptr() for part in buffers]
            if any(start % ALIGNMENT for start in starts):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
