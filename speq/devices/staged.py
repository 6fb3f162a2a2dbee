"""Transfer of small tensors between the host and an accelerator, through pinned memory."""

from collections import deque

import torch
from torch import Tensor

from speq.devices.device import Accelerator, StreamEvent
from speq.errors import present


class Readback:
    """Reader of device tensors: one copy and one wait for all of them."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._staging = device.staging(0, torch.uint8)
        self._begun: tuple[StreamEvent, tuple[Tensor, ...]] | None = None

    def read(self, *tensors: Tensor) -> list[Tensor]:
        """Copy tensors to host memory. The host waits until the compute stream has reached this
        point.
        """
        self.begin(*tensors)
        return self.take()

    def begin(self, *tensors: Tensor) -> None:
        """Queue the copies of `read`, for `take`. The host does not wait."""
        pieces = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if len(self._staging) < len(packed):
            # Twice as much, so that growing sequences do not allocate pinned memory repeatedly.
            self._staging = self._device.staging(2 * len(packed), torch.uint8)
        compute = self._device.compute
        compute.copy(self._staging[: len(packed)], packed)
        self._begun = compute.record(), tensors

    def take(self) -> list[Tensor]:
        """Wait for the tensors of the last `begin`, and return them."""
        event, tensors = present(self._begun, "a readback was taken that never began")
        self._begun = None
        event.wait()
        sizes = [tensor.nbytes for tensor in tensors]
        # Copies: the next read overwrites the staging memory.
        values = zip(self._staging[: sum(sizes)].split(sizes), tensors, strict=True)
        return [value.clone().view(like.dtype).view(like.shape) for value, like in values]


class Uploads:
    """Sender of host tensors to the device, in the order of the compute stream, without waiting.

    Each goes through pinned memory of its own, which is held until its copy is done.
    """

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._under_way: deque[tuple[StreamEvent, Tensor]] = deque()

    def send(self, source: Tensor) -> Tensor:
        target = torch.empty(source.shape, dtype=source.dtype, device=self._device.torch)
        self.write(source, target)
        return target

    def write(self, source: Tensor, target: Tensor) -> None:
        """Copy `source`, which may change at once, to `target` [the same] on the device.

        Work already queued on the compute stream still reads the old values of `target`.
        """
        while self._under_way and self._under_way[0][0].done():
            self._under_way.popleft()
        staged = self._device.staging(source.numel(), source.dtype).view(source.shape)
        staged.copy_(source)
        compute = self._device.compute
        compute.copy(target, staged)
        self._under_way.append((compute.record(), staged))
