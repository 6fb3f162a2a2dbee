"""Slots of further devices, filled with experts that stay there."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speq.devices.device import Accelerator
from speq.experts.host_tier import HostTier
from speq.files.alignment import allocate_aligned
from speq.planning.cost.peers import Peers, dealt
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.peers import check_room
from speq.planning.used_experts import UsedExperts
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
        cls, device: Accelerator, keys: Sequence[ExpertKey], tier: HostTier, plan: ResidencyPlan
    ) -> "PeerSlots":
        """tier: the experts' records in host memory, and the disk behind it"""
        slots = allocate_aligned(len(keys), plan.slot_bytes, device.torch)
        staged = device.staging(plan.slot_bytes, torch.uint8)
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


def held_experts(plan: ResidencyPlan, peers: Peers, used: UsedExperts) -> list[list[ExpertKey]]:
    """The experts of each further GPU, as many of each layer as planned or as fit.

    Raises SpeqError for a budget that holds no expert of each layer.
    """
    check_room(peers, plan.slot_bytes, used.num_layers)
    room = peers.room(plan.slot_bytes, used.num_layers)
    held = [min(counts) for counts in zip(plan.peers, room, strict=True)]
    by_layer = [dealt(held, used.ranked(layer)) for layer in range(used.num_layers)]
    return [
        [ExpertKey(layer, expert) for layer, each in enumerate(by_layer) for expert in each[gpu]]
        for gpu in range(len(held))
    ]
