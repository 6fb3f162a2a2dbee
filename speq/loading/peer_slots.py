"""Slots of a further device, filled with experts that stay there."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speq.devices.device import Accelerator
from speq.experts.host_tier import HostTier
from speq.files.alignment import allocate_aligned
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.peer_devices import PeerSlot


@dataclass(frozen=True, slots=True)
class PeerSlots:
    """slots: [S, slot_bytes] uint8 on the device; keys: the expert of each"""

    device: Accelerator
    slots: Tensor
    keys: Sequence[ExpertKey]

    @classmethod
    def fill(
        cls, device: Accelerator, keys: Sequence[ExpertKey], tier: HostTier, slot_bytes: int
    ) -> "PeerSlots":
        """tier: the experts' records in host memory, and the disk behind it"""
        slots = allocate_aligned(len(keys), slot_bytes, device.torch)
        staged = device.staging(slot_bytes, torch.uint8)
        records = {key: at for at, key in enumerate(tier.contents)} if tier.resident else {}
        for slot, key in zip(slots, keys, strict=True):
            nbytes = tier.record_bytes(*key)
            if key in records:
                staged[:nbytes].copy_(tier.record(records[key])[:nbytes])
            else:
                tier.read(*key, staged)
            device.compute.copy(slot[:nbytes], staged[:nbytes])
            device.compute.record().wait()
        return cls(device, slots, keys)


def slots_of(peers: Sequence[PeerSlots]) -> dict[ExpertKey, PeerSlot]:
    """The slot of each expert that any of them has."""
    return {
        key: PeerSlot(peer, slot)
        for peer, held in enumerate(peers)
        for slot, key in enumerate(held.keys)
    }
