"""This machine's memory, disk and products, measured once in some seconds and kept."""

import tempfile
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch

from speq.config import DEFAULT_READER_THREADS
from speq.errors import SpeqError
from speq.files.cache_folder import cache_folder
from speq.files.plain_reads import bytes_per_s_of
from speq.kernels.many_rows import has_native_product
from speq.machine import host
from speq.measure.memory_read import MemoryRead, read_gb_per_s, step_times
from speq.planning import kept_file
from speq.planning.cost.presets import MEMORY_SHARE, Rates
from speq.units import Progress, no_progress

CPU = torch.device("cpu")
MEMORY_BYTES, MEMORY_READS = 256 << 20, 3
# The file that is read, past the page cache, and a read of it.
DISK_BYTES, READ_BYTES = 512 << 20, 8 << 20
MATRIX, PRODUCTS = 2048, 3


@dataclass(frozen=True, slots=True)
class MachineRates:
    """What was measured, in bytes and products of floats a second.

    measured_at  seconds since 1970
    """

    memory_bytes_per_s: float
    disk_bytes_per_s: float
    flops_per_s: float
    measured_at: float

    @property
    def rates(self) -> Rates:
        day = time.strftime("%Y-%m-%d", time.localtime(self.measured_at))
        source = f"measured on this machine on {day}"
        memory = MEMORY_SHARE * self.memory_bytes_per_s
        return Rates(source, "cpu", self.disk_bytes_per_s, memory)

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "MachineRates":
        """Raises KeyError, OverflowError, TypeError or ValueError for what was not kept here."""
        return cls(*(kept_file.positive(entry[each.name]) for each in fields(cls)))


def machine_rates(progress: Progress | None = None) -> MachineRates:
    """Rates that were kept, or measured now in some seconds.

    Raises SpeqError where the disk of the cache folder has no room for a file to read.
    """
    kept = kept_file.read(host(), MachineRates.of)
    if kept is not None:
        return kept
    found = measure(cache_folder() or Path(tempfile.gettempdir()), progress)
    kept_file.keep(host(), asdict(found), found.measured_at)
    return found


def measure(folder: Path, progress: Progress | None = None) -> MachineRates:
    """Measure now. folder: on the disk that is meant; it is made if it is not there"""
    report = progress or no_progress
    memory = read_gb_per_s(
        MemoryRead(MEMORY_BYTES, CPU), CPU, MEMORY_READS, time.perf_counter, progress
    )
    report("measuring the disk", 0, 1)
    disk = disk_bytes_per_s(folder)
    report("measuring the disk", 1, 1)
    return MachineRates(memory * 1e9, disk, flops_per_s(), time.time())


def disk_bytes_per_s(folder: Path) -> float:
    """Rate of large reads past the page cache, several at a time as runs have them."""
    try:
        return bytes_per_s_of(folder, DISK_BYTES, READ_BYTES, DEFAULT_READER_THREADS)
    except OSError as error:
        raise SpeqError(
            f"the disk of {folder} cannot be measured: {error.strerror}; give --link and "
            "--memory-bandwidth, or --preset"
        ) from error


def flops_per_s() -> float:
    """Rate of a product of large matrices, in bfloat16 or as torch has it without kernels of it."""
    matrix = torch.randn(MATRIX, MATRIX)
    if has_native_product(torch.bfloat16):
        matrix = matrix.bfloat16()

    def multiply() -> None:
        torch.mm(matrix, matrix)

    multiply()
    return 2 * MATRIX**3 / median(step_times([multiply] * PRODUCTS, CPU, time.perf_counter))
