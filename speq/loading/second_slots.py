"""Slots of a second device, filled with experts that stay there."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from speq.devices.device import Accelerator
from speq.errors import NoRoom
from speq.experts.host_tier import HostTier
from speq.files.alignment import allocate_aligned
from speq.scheduler.expert_key import ExpertKey
from speq.units import format_bytes


@dataclass(frozen=True, slots=True)
class SecondSlots:
    """slots: [S, slot_bytes] uint8 on the device; at: the slot of each expert that it holds"""

    device: Accelerator
    slots: Tensor
    at: dict[ExpertKey, int]

    @classmethod
    def fill(
        cls,
        device: Accelerator,
        budget_bytes: int,
        tier: HostTier,
        slot_bytes: int,
        num_layers: int,
        num_experts: int,
    ) -> "SecondSlots":
        """Fill a budget on a device. Raises NoRoom where that is too little, or is not there."""
        free_bytes = device.free_bytes()
        at = spread(budget_bytes // slot_bytes, num_layers, num_experts)
        if not at or budget_bytes > free_bytes:
            raise NoRoom(
                f"second_budget is {format_bytes(budget_bytes)}, and {device.torch} has "
                f"{format_bytes(free_bytes)} free; one expert of each layer takes "
                f"{format_bytes(num_layers * slot_bytes)}: give an amount between these, or leave "
                "second_budget out"
            )
        return cls(device, filled_slots(device, tier, slot_bytes, at), at)


def spread(count: int, num_layers: int, num_experts: int) -> dict[ExpertKey, int]:
    """Slots of so many experts: as many of each layer, the first ones."""
    of_layer = min(count // num_layers, num_experts)
    keys = (ExpertKey(at, expert) for at in range(num_layers) for expert in range(of_layer))
    return {key: slot for slot, key in enumerate(keys)}


def filled_slots(
    device: Accelerator, tier: HostTier, slot_bytes: int, at: Mapping[ExpertKey, int]
) -> Tensor:
    """Slots [S, slot_bytes] uint8 on a device with the experts that have one.

    tier  their records in host memory, and the disk behind it
    """
    slots = allocate_aligned(len(at), slot_bytes, device.torch)
    staged = device.staging(slot_bytes, torch.uint8)
    records = {key: at for at, key in enumerate(tier.contents)} if tier.resident else {}
    for key, slot in at.items():
        nbytes = tier.record_bytes(*key)
        if key in records:
            staged[:nbytes].copy_(tier.record(records[key])[:nbytes])
        else:
            tier.read(*key, staged)
        device.compute.copy(slots[slot, :nbytes], staged[:nbytes])
        device.compute.record().wait()
    return slots
