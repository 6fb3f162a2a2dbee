"""The machine that figures are measured on, and what tells it from others."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

from speq.config import HOST_SHARE
from speq.control_groups import PROC, granted_bytes, processors


def device_name(device: str) -> str:
    """Of the device "cpu" or "cuda": its kind, and the processor or card that it is."""
    if device == "cuda":
        return f"cuda: {torch.cuda.get_device_name()}"
    return f"{device}: {_processor()}, {processors()} cores"


def describe_machine() -> dict[str, Any]:
    """The machine a figure was measured on."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": processors(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


# What Python, torch (its CPU build) and transformers take beside the budget; measured by a test.
PROCESS_BYTES = 448 << 20


def process_bytes() -> int:
    """Host memory that this process has, as the system counts it; 0 where it does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def available_bytes(proc: Path = PROC) -> int:
    """Host memory that can be had without swapping, within the limits of the process's control
    groups. proc: where the kernel tells of the machine.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # not Linux
    granted = granted_bytes(proc)
    return free if granted is None else min(free, granted)


def default_host_bytes() -> int:
    """What exact experts may take of the host's memory where nothing is said."""
    return int(available_bytes() * HOST_SHARE)
