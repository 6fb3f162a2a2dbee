"""Exact experts in host memory, for devices that have memory of their own.

Pinned memory is what a GPU copies from at full speed. Where the host has too little of it for all
experts, they stay on disk and pass through one pinned record: slower, and said so.
"""

import logging
import os

import torch
from torch import Tensor

from speq.config import format_bytes
from speq.store.expert_store import ExpertStore, expert_record

logger = logging.getLogger("speq")

# Share of the host's free memory that experts may take.
HOST_SHARE = 0.8


def available_bytes() -> int:
    """Host memory that can be had without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class HostTier:
    """Copies experts to a device from host memory, or from disk through it.

    pin: whether to lock the memory (False only where there is no device to copy to, in tests)
    """

    def __init__(self, store: ExpertStore, host_bytes: int | None = None, pin: bool = True) -> None:
        self._store = store
        count = store.num_layers * store.num_experts
        needed = count * store.codec.record_bytes
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
        self._records = torch.empty(
            rows, store.codec.record_bytes, dtype=torch.uint8, pin_memory=pin
        )
        if self.resident:
            record = expert_record(store)
            for at in range(count):
                store.read(*divmod(at, store.num_experts), record)
                self._records[at].copy_(record)

    def fetch(self, layer: int, expert: int, slot: Tensor) -> None:
        """Fill `slot` [record_bytes] uint8 on the device; it is there on return."""
        if self.resident:
            record = self._records[layer * self._store.num_experts + expert]
        else:
            record = self._records[0]
            self._store.read(layer, expert, record)
        slot.copy_(record)
