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


def find_peers(device: Processor | Accelerator, count: int) -> list[Accelerator]:
    """Find so many GPUs beside the one of a run, of its kind: others' matrix products may add up in
    another order. Raises DeviceError if there are fewer.
    """
    index = device.torch.index
    if not count:
        return []
    if index is None:
        raise DeviceError(
            "peer_budget is given and the run is on the CPU; further GPUs help a first one: leave "
            "peer_budget out, or give device cuda"
        )
    kind = kind_of(index)
    others = [at for at in range(torch.cuda.device_count()) if at != index]
    alike = [at for at in others if kind_of(at) == kind]
    if len(alike) < count:
        seen = ", ".join(f"cuda:{at} ({kind_of(at)})" for at in others) or "none"
        raise DeviceError(
            f"peer_budget names {count} further GPUs like {device.torch} ({kind}), since results "
            f"of others may differ, and torch sees {len(alike)}, beside it: {seen}; give fewer "
            "sizes, or leave peer_budget out"
        )
    return [CudaDevice(at) for at in alike[:count]]


def kind_of(index: int) -> str:
    """Name of a GPU and its compute capability."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"{torch.cuda.get_device_name(index)}, {major}.{minor}"


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
