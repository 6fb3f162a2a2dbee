"""Where the kernels find a layer's experts: the slot of each, or -1."""

from typing import Protocol

import torch
from torch import Tensor

from speq.devices.device import Accelerator
from speq.devices.staged import Uploads


class SlotTable(Protocol):
    def of(self, slots: dict[int, int]) -> Tensor:
        """[E] int64 for {expert: slot}, good until the next call: each wave fills it anew."""


class HostSlotTable:
    """In host memory."""

    def __init__(self, num_experts: int) -> None:
        self._host = torch.empty(num_experts, dtype=torch.int64)
        self._entries = self._host.numpy()  # shared memory: no torch op for each expert

    def of(self, slots: dict[int, int]) -> Tensor:
        self._entries.fill(-1)
        for expert, slot in slots.items():
            self._entries[expert] = slot
        return self._host


class DeviceSlotTable:
    """On an accelerator, always at the same address. The host does not wait for it."""

    def __init__(self, num_experts: int, device: Accelerator) -> None:
        self._host = HostSlotTable(num_experts)
        self._table = torch.empty(num_experts, dtype=torch.int64, device=device.torch)
        self._uploads = Uploads(device)

    def of(self, slots: dict[int, int]) -> Tensor:
        self._uploads.write(self._host.of(slots), self._table)
        return self._table
