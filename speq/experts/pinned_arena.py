"""Host memory that a device copies from, locked chunk by chunk."""

import weakref

import torch
from torch import Tensor

from speq.devices.device import Accelerator
from speq.files.alignment import ALIGNMENT, align, allocate_aligned

# Bytes locked at a time: a system that refuses one chunk may grant others, and none takes long.
CHUNK_BYTES = 256 << 20


class PinnedArena:
    """Arena that grows by pieces and is freed as a whole.

    A chunk that the system does not lock stays unlocked: copies from it are correct but slower.

    limit_bytes  of all chunks together
    chunks       [n] uint8 each, in the order in which they were taken
    """

    def __init__(
        self, device: Accelerator, limit_bytes: int, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._device = device
        self._limit_bytes, self._chunk_bytes = limit_bytes, chunk_bytes
        self.chunks: list[Tensor] = []
        self._pinned: list[Tensor] = []
        self._rest = torch.empty(0, dtype=torch.uint8)
        # An arena that is not closed is unlocked when it is freed, but not at process exit: the
        # system does that, and the device may be gone.
        self._release = weakref.finalize(self, unlock, device, self._pinned)
        self._release.atexit = False

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def pinned_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._pinned)

    def take(self, nbytes: int, expected_bytes: int) -> Tensor | None:
        """Allocate [nbytes] uint8 at a multiple of ALIGNMENT; None if the limit is reached.

        expected_bytes  bytes still to be allocated, these included: no chunk is much larger
        """
        size = align(nbytes)
        if size > self._rest.nbytes and not self._grow(size, align(expected_bytes)):
            return None
        taken, self._rest = self._rest[:nbytes], self._rest[size:]
        return taken

    def _grow(self, fewest_bytes: int, expected_bytes: int) -> bool:
        left = (self._limit_bytes - self.nbytes) // ALIGNMENT * ALIGNMENT
        size = min(max(fewest_bytes, self._chunk_bytes), max(fewest_bytes, expected_bytes), left)
        if size < fewest_bytes:
            return False
        chunk = self._rest = allocate_aligned(1, size)[0]
        self.chunks.append(chunk)
        # Appended before it is locked, so an interrupt in between leaves no lock behind.
        self._pinned.append(chunk)
        if not self._device.pin(chunk):
            self._pinned.pop()
        return True

    def close(self) -> None:
        self._release()
        self.chunks.clear()
        self._rest = self._rest[:0].clone()


def unlock(device: Accelerator, pinned: list[Tensor]) -> None:
    while pinned:
        device.unpin(pinned.pop())
