"""A file read by byte ranges, neither mapped into memory nor left in the page cache.

What is read again and again, experts, goes past the page cache (`O_DIRECT`): a cache that no budget
knows of would hold memory that was promised to others, and would make every measurement a lie.
"""

import ctypes
import errno
import logging
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from speq.errors import SpeqError
from speq.store.alignment import ALIGNMENT, aligned, aligned_bytes

logger = logging.getLogger("speq")

SAMPLE_BYTES = 4096


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 CPU tensor, which must outlive the view."""
    assert tensor.dtype == torch.uint8 and tensor.is_contiguous() and tensor.device.type == "cpu"
    # Not tensor.numpy(), which would for ever keep the storage from being given back.
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


@cache
def say_buffered(folder: Path) -> None:
    """Once for each folder, which holds all of a model's files."""
    logger.warning(
        "the file system of %s has no reads past the page cache: files are read through it, which "
        "is slower, and their pages are dropped afterwards",
        folder,
    )


class RangeFile:
    """An open file: its `size`, and reads of byte ranges, from any thread.

    Raises SpeqError, naming the file, where it is missing or unreadable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = self._direct_fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            self.size = os.fstat(self._fd).st_size
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
            self._direct_fd = self._open_direct()
            self._check()
        except OSError as error:
            self.close()
            raise SpeqError(f"{path} cannot be read: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def _open_direct(self) -> int:
        """A descriptor for reads past the page cache, or -1 where there are none.

        Some file systems refuse the flag, others only the first read.
        """
        if not hasattr(os, "O_DIRECT"):
            return -1
        descriptor, block = -1, aligned_bytes(1, ALIGNMENT)[0]
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            os.preadv(descriptor, [bytes_of(block)], 0)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return -1
        return descriptor

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
        descriptors = (self._fd, self._direct_fd)
        self._fd = self._direct_fd = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def read_into(self, offset: int, out: Tensor) -> None:
        """Fill `out`, a contiguous uint8 CPU tensor, through the page cache; drop the pages."""
        self._fill(self._fd, offset, out, out.nbytes)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, out.nbytes, os.POSIX_FADV_DONTNEED)

    def read_aligned(self, offset: int, nbytes: int, out: Tensor) -> int:
        """Fill the first `nbytes` of `out`, past the page cache; return bytes read.

        offset, and the address and length of `out`, a contiguous uint8 CPU tensor, are multiples of
        ALIGNMENT. What `out` holds behind nbytes afterwards is undefined.
        """
        assert offset % ALIGNMENT == 0 and out.nbytes >= aligned(nbytes)
        assert out.data_ptr() % ALIGNMENT == 0
        if self._direct_fd < 0:
            return self._read_buffered(offset, out[:nbytes])
        return self._fill(self._direct_fd, offset, out[: aligned(nbytes)], nbytes)

    def read_through(self, offset: int, out: Tensor, bounce: Tensor) -> int:
        """Fill `out`, which lies anywhere, past the page cache by way of `bounce`.

        bounce, of the alignment and whole blocks that `read_aligned` wants, takes a piece at a
        time. Returns bytes read, which are more than out's by what its ends share blocks with.
        """
        if self._direct_fd < 0:
            return self._read_buffered(offset, out)
        read_bytes = done = 0
        while done < out.nbytes:
            before = (offset + done) % ALIGNMENT
            payload = min(out.nbytes - done, bounce.nbytes - before)
            block = bounce[: aligned(before + payload)]
            read_bytes += self.read_aligned(offset + done - before, before + payload, block)
            # Neither torch's copy, which would start threads of its own beside the one that reads,
            # nor a memoryview's, which would hold Python's lock while it lasts.
            ctypes.memmove(out.data_ptr() + done, bounce.data_ptr() + before, payload)
            done += payload
        return read_bytes

    def _read_buffered(self, offset: int, out: Tensor) -> int:
        say_buffered(self.path.parent)
        self.read_into(offset, out)
        return out.nbytes

    def _fill(self, descriptor: int, offset: int, out: Tensor, wanted: int) -> int:
        """Read until `out` holds `wanted` bytes or more, no further than its end; return them."""
        view = bytes_of(out)
        done = start = 0
        while done < wanted:
            try:
                count = os.preadv(descriptor, [view[start:]], offset + start)
            except OSError as error:
                raise SpeqError(
                    f"reading {wanted} bytes at {offset} of {self.path} failed: {error.strerror}"
                ) from error
            if start + count <= done:
                raise SpeqError(
                    f"{self.path} ended at byte {offset + done} while it was read; it held "
                    f"{self.size} bytes when it was opened"
                )
            done = start + count
            # A direct read goes on at a block's start: the last one is read again if it was cut.
            start = done if descriptor == self._fd else done - done % ALIGNMENT
        return done

    def samples(self, count: int) -> Iterator[bytes]:
        """Up to `count` blocks of 4 KiB spread evenly over the file."""
        last = max(self.size - SAMPLE_BYTES, 0)
        for offset in sorted({last * i // max(count - 1, 1) for i in range(count)}):
            yield os.pread(self._fd, SAMPLE_BYTES, offset)
