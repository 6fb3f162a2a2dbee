"""A file read by byte ranges, neither mapped into memory nor left in the page cache."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from speq.errors import SpeqError

SAMPLE_BYTES = 4096


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 CPU tensor, which must outlive the view."""
    assert tensor.dtype == torch.uint8 and tensor.is_contiguous() and tensor.device.type == "cpu"
    # Not tensor.numpy(), which would for ever keep the storage from being given back.
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class RangeFile:
    """An open file: its `size`, and `read_into` for byte ranges.

    Raises SpeqError, naming the file, where it is missing or unreadable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            self.size = os.fstat(self._fd).st_size
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
            self._check()
        except OSError as error:
            self.close()
            raise SpeqError(f"{path} cannot be read: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        """Read what must be known of the file before it is trusted."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read_into(self, offset: int, out: Tensor) -> None:
        """Fill `out`, a contiguous uint8 CPU tensor, with the bytes from `offset` on."""
        view = bytes_of(out)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise SpeqError(
                    f"reading {len(view)} bytes at {offset} of {self.path} failed: {error.strerror}"
                ) from error
            if count == 0:
                raise SpeqError(
                    f"{self.path} ended at byte {offset + done} while it was read; it held "
                    f"{self.size} bytes when it was opened"
                )
            done += count
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, len(view), os.POSIX_FADV_DONTNEED)

    def samples(self, count: int) -> Iterator[bytes]:
        """Up to `count` blocks of 4 KiB spread evenly over the file."""
        last = max(self.size - SAMPLE_BYTES, 0)
        for offset in sorted({last * i // max(count - 1, 1) for i in range(count)}):
            yield os.pread(self._fd, SAMPLE_BYTES, offset)
