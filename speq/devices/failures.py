"""Errors of the device, of host memory and of the disk, translated into one sentence for users."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from speq.errors import DeviceError, FileError, NoRoom, SpeqError

# Prefixes of torch's RuntimeErrors that have no type of their own.
OF_THE_DEVICE = ("CUDA error: ", "CUDA driver error: ", "CUBLAS_STATUS_", "cuBLAS")
# Name of torch's allocator of host memory in its errors.
OF_THE_HOST = "DefaultCPUAllocator"


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise SpeqError if the device, host memory or the disk fails in this block."""
    try:
        yield
    except (SpeqError, ConnectionError):
        raise
    except OSError as error:
        if error.errno == errno.ENOMEM:  # of memory that is mapped
            raise host_memory_error(error) from error
        raise FileError(
            f"input or output failed: {error}; check the disk, and run again"
        ) from error
    except torch.OutOfMemoryError as error:
        raise NoRoom(
            f"the GPU has no memory left ({first_sentence(error)}); give a smaller memory_budget, "
            "or end other programs that use the GPU"
        ) from error
    except MemoryError as error:
        raise host_memory_error(error) from error
    except RuntimeError as error:
        if OF_THE_HOST in str(error):
            raise host_memory_error(error) from error
        if not is_device_error(error):
            raise
        raise DeviceError(
            f"the GPU failed ({first_sentence(error)}); its work is lost: start again, "
            "and see `nvidia-smi` and the system's log if it fails again"
        ) from error


def is_device_error(error: RuntimeError) -> bool:
    """True if the device failed: it was lost or reset, or refused a launch."""
    return isinstance(error, torch.AcceleratorError) or any(
        beginning in str(error) for beginning in OF_THE_DEVICE
    )


def host_memory_error(error: BaseException) -> SpeqError:
    return NoRoom(
        f"the host has no memory left ({first_sentence(error)}); give a smaller memory_budget, or "
        "on a GPU a smaller host_budget, or end other programs"
    )


def first_sentence(error: BaseException) -> str:
    """First sentence of an error: torch continues with advice and traces."""
    line = str(error).strip().partition("\n")[0]
    return line.partition(". ")[0].rstrip(".") or type(error).__name__
