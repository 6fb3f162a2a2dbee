"""Small tensors between the host and a device, by way of pinned memory."""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from speq.devices.staged import Readback, Uploads
from speq.layers.slot_table import DeviceSlotTable
from tests.helpers.host_device import host_device

CPU = torch.device("cpu")
TENSORS = [
    torch.arange(6).view(2, 3),
    torch.tensor([[1.5, -0.0], [float("nan"), float("-inf")]]),
    torch.tensor(7),
    torch.tensor([True, False, True]),
    torch.tensor([3.0, 1e-3], dtype=torch.bfloat16),
    torch.arange(12).view(3, 4).t()[1:],
    torch.empty(0, 4, dtype=torch.float64),
]


def bits(tensor: Tensor) -> tuple[torch.Size, torch.dtype, list[int]]:
    return tensor.shape, tensor.dtype, tensor.reshape(-1).view(torch.uint8).tolist()


def test_a_read_brings_all_it_is_asked_for() -> None:
    with host_device() as device:
        there = [tensor.to(device.torch) for tensor in TENSORS]
        readback = Readback(device)
        first = readback.read(*there)
        alone = [readback.read(tensor)[0] for tensor in there]
        assert device.reads == []
        assert len(device.waits) == 1 + len(TENSORS)
    for wanted, together, read in zip(TENSORS, first, alone, strict=True):
        assert together.device == CPU
        assert bits(together) == bits(read) == bits(wanted)


def test_a_read_sees_what_was_asked_of_the_device_before() -> None:
    with host_device() as device:
        readback, made = Readback(device), torch.zeros(3, device=device.torch)
        read = []
        for at in range(3):
            made[at] = at + 1.0
            read += readback.read(made)
    assert [row.tolist() for row in read] == [[1, 0, 0], [1, 2, 0], [1, 2, 3]]


@dataclass
class LateEvent:
    reached: bool = False

    def done(self) -> bool:
        return self.reached

    def wait(self) -> None:
        raise AssertionError("nobody waits")


@dataclass
class LateDevice:
    """Copies nothing before `advance`, and holds no memory for anybody."""

    queue: list[Any] = field(default_factory=list)

    @property
    def torch(self) -> Any:
        return CPU

    @property
    def compute(self) -> "LateDevice":
        return self

    def staging(self, size: int, dtype: Any) -> Tensor:
        return torch.empty(size, dtype=dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.queue.append((target, weakref.ref(source)))

    def record(self) -> LateEvent:
        self.queue.append(LateEvent())
        return self.queue[-1]

    def advance(self) -> None:
        """Do all up to the next event."""
        while not isinstance(first := self.queue.pop(0), LateEvent):
            target, source = first
            words = source()
            assert words is not None, "memory was given back before it was copied"
            target.copy_(words)
        first.reached = True


def test_what_is_sent_may_change_at_once_and_nobody_waits() -> None:
    device: Any = LateDevice()
    uploads, source = Uploads(device), torch.zeros(2, 2, dtype=torch.int64)
    sent = []
    for at in range(5):
        source.fill_(at)
        sent.append(uploads.send(source))
        if at == 2:
            device.advance()
    held = weakref.ref(device.queue[0][1]())
    while device.queue:
        device.advance()
    assert [row.tolist() for row in sent] == [[[at, at], [at, at]] for at in range(5)]
    assert held() is not None
    uploads.send(source)
    assert held() is None  # what has been copied is let go


def test_a_slot_table_is_patched_in_place_in_the_order_of_the_stream() -> None:
    waves: list[dict[int, int]] = [{0: 3, 4: 1}, {2: 0}, {}, {4: 2, 1: 1}]
    found = []
    with host_device() as device:
        table = DeviceSlotTable(5, device)
        tables = []
        for wave in waves:
            tables.append(table.of(wave))
            found.append(tables[-1] * 1)  # as a kernel would read it
        assert device.reads == device.waits == []
        assert {one.data_ptr() for one in tables} == {tables[0].data_ptr()}
        values = [row.cpu().tolist() for row in found]
    assert values == [[wave.get(expert, -1) for expert in range(5)] for wave in waves]
