"""Exact experts in host memory, for devices that have memory of their own.

Pinned memory is what a GPU copies from at full speed. Where the host has too little of it for all
experts, they stay on disk and pass through one pinned record: slower, and said so.
"""

import logging

import torch
from torch import Tensor

from speq.experts.codec import ExpertCodec
from speq.experts.expert_store import ExpertStore
from speq.files.alignment import aligned_bytes
from speq.machine import available_bytes
from speq.units import format_bytes

logger = logging.getLogger("speq")

# Share of the host's free memory that experts may take.
HOST_SHARE = 0.8


class HostTier:
    """Copies experts to a device from host memory, or from disk through it.

    pin          whether to lock the memory (False only where there is no device to copy to, in
                 tests)
    moved_bytes  (layer, expert): what has to be moved to fill a slot
    """

    def __init__(self, store: ExpertStore, host_bytes: int | None = None, pin: bool = True) -> None:
        self._store = store
        count = store.num_layers * store.num_experts
        needed = count * store.codec.slot_bytes
        limit = int(available_bytes() * HOST_SHARE) if host_bytes is None else host_bytes
        self.resident = needed <= limit
        if not self.resident:
            logger.warning(
                "host memory has room for %s and the experts take %s: they stay on disk, which is "
                "slower",
                format_bytes(limit),
                format_bytes(needed),
            )
        rows = count if self.resident else 1
        self._slots = aligned_bytes(rows, store.codec.slot_bytes)
        self.moved_bytes = store.record_bytes if self.resident else store.moved_bytes
        self._pinned = pin
        if pin:
            # Not torch's own pinned allocator: it rounds up to a power of two, gigabytes here.
            cudart = torch.cuda.cudart()
            torch.cuda.check_error(
                cudart.cudaHostRegister(self._slots.data_ptr(), self._slots.nbytes, 0)
            )
        for at in range(count if self.resident else 0):
            store.read(*divmod(at, store.num_experts), self._slots[at])

    @property
    def codec(self) -> ExpertCodec:
        return self._store.codec

    def read(self, layer: int, expert: int, slot: Tensor) -> int:
        """Fill `slot` [slot_bytes] uint8 on the device; it is there on return.

        Returns the bytes that this read from the disk.
        """
        at = layer * self._store.num_experts + expert if self.resident else 0
        read_bytes = 0 if self.resident else self._store.read(layer, expert, self._slots[at])
        nbytes = self._store.record_bytes(layer, expert)
        slot[:nbytes].copy_(self._slots[at, :nbytes])
        return read_bytes

    def close(self) -> None:
        """Unlock the memory."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._slots.data_ptr())
            self._pinned = False
