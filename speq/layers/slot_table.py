"""The expert slot of each of a layer's experts, or -1, for the kernels."""

from typing import Protocol

import torch
from torch import Tensor

from speq.devices.device import Accelerator
from speq.devices.staged import Uploads


class SlotTable(Protocol):
    def of(self, slots: dict[int, int]) -> Tensor:
        """Fill the table [E] int64 from {expert: slot}; valid until the next call."""


class HostSlotTable:
    """A slot table in host memory."""

    def __init__(self, num_experts: int) -> None:
        self._host = torch.empty(num_experts, dtype=torch.int64)
        self._entries = self._host.numpy()  # shared memory: no torch op for each expert

    def of(self, slots: dict[int, int]) -> Tensor:
        self._entries.fill(-1)
        for expert, slot in slots.items():
            self._entries[expert] = slot
        return self._host


class DeviceSlotTable:
    """A slot table on an accelerator, always at the same address. The host does not wait for it."""

    def __init__(self, num_experts: int, device: Accelerator) -> None:
        self._host = HostSlotTable(num_experts)
        self._table = torch.empty(num_experts, dtype=torch.int64, device=device.torch)
        self._uploads = Uploads(device)

    def of(self, slots: dict[int, int]) -> Tensor:
        self._uploads.write(self._host.of(slots), self._table)
        return self._table
