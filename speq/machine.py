"""Describes the machine that figures are measured on."""

import os
import platform
import time
from typing import Any

import torch

from speq.control_groups import processors
from speq.host_memory import HOST_SHARE, available_bytes

# What was measured longer ago is measured again: disks fill, and machines change.
KEPT_DAYS = 30


def host() -> str:
    """A name that other machines with the same home do not have."""
    return f"{platform.node()}, {os.cpu_count()} processors, {platform.machine()}"


def is_recent(measured_at: float) -> bool:
    """True if what was measured of the machine then still holds. measured_at: seconds since 1970"""
    return 0 <= time.time() - measured_at < 86_400 * KEPT_DAYS


def device_name(device: str) -> str:
    """Describe the device "cpu" or "cuda": its kind and its processor or card."""
    if device == "cuda":
        return f"cuda: {torch.cuda.get_device_name()}"
    return f"{device}: {_processor()}, {processors()} cores"


def describe_machine() -> dict[str, Any]:
    """Describe the machine that a figure is measured on."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": processors(),
        "memory_bytes": machine_memory_bytes(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }


def machine_memory_bytes() -> int:
    """All memory of this machine, whoever has it."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def default_host_bytes() -> int:
    """Host memory that exact experts may take by default."""
    return int(available_bytes() * HOST_SHARE)
