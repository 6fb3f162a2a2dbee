"""A transfer engine over a fake tier and slots of some bytes, on any device with streams."""

import random

import torch
from torch import Tensor

from speq.devices.device import Accelerator
from speq.scheduler.device_clock import DeviceClock
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.stream_transfer import StreamTransfer
from speq.scheduler.transfer import Priority, State, TransferTicket
from speq.stats import Recorder

LAYERS, EXPERTS, SLOTS, RECORD_BYTES = 3, 8, 5, 48


def words(key: ExpertKey) -> list[int]:
    return [16 * key.layer + key.expert] * record_bytes(*key)


def record_bytes(layer: int, expert: int) -> int:
    return RECORD_BYTES - 4 * expert


class FakeTier:
    """Records that hold the first of LAYERS x EXPERTS; the others come from a disk.

    failing  experts that cannot be read
    """

    def __init__(self, device: Accelerator, num_records: int) -> None:
        self._memory = torch.full((num_records, RECORD_BYTES), 255, dtype=torch.uint8)
        self._device, self._pinned = device, device.pin(self._memory)
        self.num_records = num_records
        self.resident = num_records >= LAYERS * EXPERTS
        held = num_records if self.resident else num_records // 2
        self.contents = [divmod(at, EXPERTS) for at in range(min(held, LAYERS * EXPERTS))]
        self.failing: set[ExpertKey] = set()
        self.reads: list[ExpertKey] = []
        for at, (layer, expert) in enumerate(self.contents):
            self.fill(layer, expert, self._memory[at])

    def close(self) -> None:
        if self._pinned:
            self._device.unpin(self._memory)

    def record(self, at: int) -> Tensor:
        return self._memory[at]

    def fill(self, layer: int, expert: int, record: Tensor) -> None:
        record[: record_bytes(layer, expert)] = 16 * layer + expert

    def read(self, layer: int, expert: int, record: Tensor) -> int:
        key = ExpertKey(layer, expert)
        self.reads.append(key)
        if key in self.failing:
            raise OSError(f"{key} cannot be read")
        self.fill(layer, expert, record)
        return 512

    def record_bytes(self, layer: int, expert: int) -> int:
        return record_bytes(layer, expert)


class Rig:
    """An engine over a fake tier and slots on the device."""

    def __init__(
        self, device: Accelerator, num_records: int = LAYERS * EXPERTS, readers: int = 2
    ) -> None:
        self.device = device
        self.tier = FakeTier(device, num_records)
        self.recorder = Recorder()
        self.step = self.recorder.begin("decode")
        self.slots = torch.empty(SLOTS, RECORD_BYTES, dtype=torch.uint8, device=device.torch)
        self.slots.zero_()
        clock = DeviceClock(device, self.recorder)
        self.engine = StreamTransfer(device, self.tier, self.slots, clock, readers)

    def close(self) -> None:
        self.engine.close()
        self.tier.close()

    def demand(self, layer: int, expert: int, slot: int) -> TransferTicket:
        return self.engine.submit(ExpertKey(layer, expert), slot, Priority.DEMAND)

    def ahead(self, layer: int, expert: int, slot: int) -> TransferTicket:
        return self.engine.submit(ExpertKey(layer, expert), slot, Priority.PREFETCH)

    def kernel(self, slot: int, nbytes: int) -> Tensor:
        """What a kernel that is launched now finds in a slot."""
        found = self.slots[slot, :nbytes] + 0
        self.engine.launched([slot])
        return found

    def check(self, ticket: TransferTicket) -> None:
        wanted = words(ticket.key)
        assert self.kernel(ticket.slot, len(wanted)).tolist() == wanted


def any_calls(rig: Rig, seed: int, calls: int) -> None:
    """Slots hold what was asked for, whoever is waited for, withdrawn or overwritten."""
    rng = random.Random(seed)
    held: dict[int, TransferTicket] = {}  # by slot
    for _ in range(calls):
        choice = rng.random()
        free = [slot for slot in range(SLOTS) if slot not in held or held[slot].ended]
        key = ExpertKey(rng.randrange(LAYERS), rng.randrange(EXPERTS))
        asked = any(ticket.key == key and not ticket.ended for ticket in held.values())
        if choice < 0.5 and free and not asked:
            slot = rng.choice(free)
            held[slot] = rig.engine.submit(key, slot, rng.choice(list(Priority)))
        elif choice < 0.8 and held:
            ticket = held[rng.choice(list(held))]
            if ticket.state is not State.CANCELLED:
                rig.engine.wait(ticket)
                rig.check(ticket)
        elif choice < 0.9 and held:
            slot = rng.choice(list(held))
            if not held[slot].ended and rig.engine.cancel(held[slot]):
                del held[slot]
        elif choice < 0.95:
            rig.engine.report()
        else:
            rig.engine.drain()
            assert all(ticket.ended for ticket in held.values())
            held = {slot: ticket for slot, ticket in held.items() if ticket.state is State.DONE}
    for ticket in held.values():
        rig.engine.wait(ticket)
        rig.check(ticket)
