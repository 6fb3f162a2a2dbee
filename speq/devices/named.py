"""Devices by the names that users give them."""

import torch

from speq.devices.cuda import CudaDevice
from speq.devices.device import Accelerator, Processor
from speq.errors import SpeqError


def device_named(name: str) -> Processor | Accelerator:
    """The device "cpu" or "cuda", or for "auto" the GPU where there is one.

    Raises SpeqError where torch sees no GPU and one was asked for.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return Processor()
    if not torch.cuda.is_available():
        raise SpeqError(
            "device cuda was asked for, but torch sees no CUDA device; use --device cpu, or "
            "install a CUDA build of torch"
        )
    return CudaDevice(torch.cuda.current_device())
