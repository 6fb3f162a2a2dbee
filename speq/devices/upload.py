"""Small tensors on their way to a device, without the host waiting."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from speq.devices.device import Accelerator, Event, Processor

# Uploads under way at a time. The host gives a pass a handful, and is seldom a pass ahead.
PLACES = 8
PLACE_BYTES = 4096

Send = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Place:
    """Pinned memory, and the end of the copy that reads it."""

    memory: Tensor
    copied: Event | None = None


class Upload:
    """Copies by way of pinned memory, in the order of the device's compute stream.

    The memory is used in turn. The host waits only where it is `PLACES` uploads ahead.
    """

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._places = [Place(device.staging(PLACE_BYTES, torch.uint8)) for _ in range(PLACES)]
        self._turn = 0

    def send(self, values: Tensor) -> Tensor:
        """The same tensor on the device."""
        target = torch.empty(values.shape, dtype=values.dtype, device=self._device.torch)
        self.fill(target, values)
        return target

    def fill(self, target: Tensor, values: Tensor) -> None:
        """Copy `values`, on the host, into a contiguous tensor on the device of that shape."""
        place = self._places[self._turn]
        self._turn = (self._turn + 1) % PLACES
        if place.copied is not None:
            place.copied.wait()
        if place.memory.nbytes < values.nbytes:
            place.memory = self._device.staging(values.nbytes, torch.uint8)
        staged = place.memory[: values.nbytes].view(values.dtype).view(values.shape)
        staged.copy_(values)
        self._device.compute.copy(target, staged)
        place.copied = self._device.compute.record()


def sender(device: Processor | Accelerator) -> Send:
    """What puts tensors of the host on a device; on the processor they are there."""
    if isinstance(device, Processor):
        return lambda values: values
    return Upload(device).send
