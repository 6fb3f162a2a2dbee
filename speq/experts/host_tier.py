"""Exact experts in host memory, for devices that have memory of their own.

Pinned memory is what a GPU copies from at full speed. Where the host has too little of it for all
experts, they stay on disk and pass through one pinned record: slower, and said so.
"""

import logging

from torch import Tensor

from speq.devices.device import Accelerator
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

    def __init__(
        self, store: ExpertStore, device: Accelerator, host_bytes: int | None = None
    ) -> None:
        self._store, self._device = store, device
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
        self.num_records = count if self.resident else max(8, limit // store.codec.slot_bytes)
        self._slots = aligned_bytes(self.num_records, store.codec.slot_bytes)
        self._pinned = device.pin(self._slots)
        held = self.num_records if self.resident else 0
        self.contents = [divmod(at, store.num_experts) for at in range(held)]
        for at, (layer, expert) in enumerate(self.contents):
            store.read(layer, expert, self._slots[at])

    @property
    def codec(self) -> ExpertCodec:
        return self._store.codec

    def record(self, at: int) -> Tensor:
        """[slot_bytes] uint8: record number `at`."""
        return self._slots[at]

    def read(self, layer: int, expert: int, record: Tensor) -> int:
        """Fill a record from the disk; the bytes read."""
        return self._store.read(layer, expert, record)

    def record_bytes(self, layer: int, expert: int) -> int:
        return self._store.record_bytes(layer, expert)

    def close(self) -> None:
        """Unlock the memory."""
        if self._pinned:
            self._device.unpin(self._slots)
            self._pinned = False
