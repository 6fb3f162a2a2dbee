"""Devices by name."""

import logging
import warnings

import torch

from speq.devices.cuda import CudaDevice
from speq.devices.device import Accelerator, Processor
from speq.devices.failures import first_sentence
from speq.errors import DeviceError

logger = logging.getLogger("speq")

# torch's message for a GPU that it cannot use (c10/cuda/CUDAFunctions.cpp).
TOO_OLD = "driver on your system is too old"


def find_device(name: str) -> Processor | Accelerator:
    """Find the device "cpu" or "cuda", or for "auto" the GPU if there is one.

    Raises SpeqError if a GPU is requested and torch can use none.
    """
    if name == "cpu":
        return Processor()
    missing = why_no_gpu()
    if missing is None:
        return CudaDevice(torch.cuda.current_device())
    advice = "install a CUDA build of torch"
    if TOO_OLD in missing:
        advice = "install a newer driver, or a torch that is built for this one"
    if name == "cuda":
        raise DeviceError(
            f"device cuda was asked for, but torch sees no CUDA device: {missing}; use --device "
            f"cpu, or {advice}"
        )
    if TOO_OLD in missing:
        logger.warning("there is a GPU, and the run is on the cpu: %s; %s", missing, advice)
    return Processor()


def find_second(device: Processor | Accelerator) -> Accelerator:
    """Find a GPU beside the one of a run, of its compute capability: others' matrix products may
    add up in another order. Raises DeviceError if there is none.
    """
    index = device.torch.index
    if index is None:
        raise DeviceError(
            "second_budget is given and the run is on the CPU; a second GPU helps a first one: "
            "leave second_budget out, or give device cuda"
        )
    others = [at for at in range(torch.cuda.device_count()) if at != index]
    if not others:
        raise DeviceError(
            f"second_budget is given and torch sees one GPU alone, {device.torch}; leave "
            "second_budget out"
        )
    first = torch.cuda.get_device_capability(index)
    capabilities = {at: torch.cuda.get_device_capability(at) for at in others}
    alike = [at for at, capability in capabilities.items() if capability == first]
    if not alike:
        (second, (major, minor)), *_ = capabilities.items()
        raise DeviceError(
            f"second_budget is given and the GPUs are of different compute capabilities, "
            f"{device.torch} of {first[0]}.{first[1]} and cuda:{second} of {major}.{minor}, whose "
            "results may differ; leave second_budget out, or let torch see two GPUs of one kind"
        )
    return CudaDevice(alike[0])


def why_no_gpu() -> str | None:
    """Reason why torch can use no GPU, in its own words; None if it can."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its first call warns as well
        if torch.cuda.is_available():
            return None
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_sentence(error)
    return "it finds none"
