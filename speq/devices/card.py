"""Driver readings of a GPU at work: memory, clocks and PCIe traffic.

They come from NVML through nvidia-ml-py, which is optional. Each reading counts PCIe bytes for 20
ms, so a thread of its own takes them.
"""

import importlib
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from statistics import fmean, median
from typing import Any, Protocol

logger = logging.getLogger("speq")

# Seconds between two readings of a run.
PERIOD_S = 0.25
# The unit of NVML's throughput is KB/s.
KILO = 1000


@dataclass(frozen=True, slots=True)
class CardReading:
    """One reading, at a time in seconds of the clock that times steps.

    received_bytes_per_s, sent_bytes_per_s  over PCIe, from the GPU's side
    link_generation, link_width             of PCIe at present: an idle GPU lowers them
    """

    used_bytes: int
    total_bytes: int
    sm_clock_mhz: int
    memory_clock_mhz: int
    received_bytes_per_s: int
    sent_bytes_per_s: int
    link_generation: int
    link_width: int
    time_s: float


class Card(Protocol):
    """A source of GPU readings."""

    def read(self) -> CardReading:
        """Take a reading. Raises an error of its own if the driver refuses."""


class NvmlCard:
    """A GPU by its NVML handle."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def read(self) -> CardReading:
        nvml, handle = self._nvml, self._handle
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)

        def crossing(direction: int) -> int:
            return KILO * nvml.nvmlDeviceGetPcieThroughput(handle, direction)

        return CardReading(
            used_bytes=int(memory.used),
            total_bytes=int(memory.total),
            sm_clock_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            received_bytes_per_s=crossing(nvml.NVML_PCIE_UTIL_RX_BYTES),
            sent_bytes_per_s=crossing(nvml.NVML_PCIE_UTIL_TX_BYTES),
            link_generation=nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
            link_width=nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
            time_s=time.perf_counter(),
        )


@cache  # the reason is logged once
def card_of(uuid: str) -> NvmlCard | None:
    """Find the GPU with torch's UUID; None, logged once, if NVML is not available."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        logger.info(
            "no figures of PCIe and clocks: nvidia-ml-py is not installed; pip install nvidia-ml-py"
        )
        return None
    try:
        nvml.nvmlInit()
        return NvmlCard(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except Exception as error:  # NVML creates its error classes dynamically
        logger.info("no figures of PCIe and clocks: NVML reports %s", error)
        return None


@contextmanager
def watch_card(card: Card | None) -> Iterator[list[CardReading]]:
    """Take readings during the block, into a growing list; empty without a GPU."""
    readings: list[CardReading] = []
    if card is None:
        yield readings
        return
    ended = threading.Event()

    def watch() -> None:
        try:
            while not ended.is_set():
                readings.append(card.read())
                ended.wait(PERIOD_S)
        except Exception as error:
            logger.info("figures of PCIe and clocks end here: NVML reports %s", error)

    thread = threading.Thread(target=watch, name="speq-card", daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        ended.set()
        thread.join()


def summary(readings: list[CardReading]) -> dict[str, Any] | None:
    """Summarise the readings of a run; None without readings."""
    if not readings:
        return None
    received = [reading.received_bytes_per_s for reading in readings]
    return {
        "readings": len(readings),
        "pcie_received_bytes_per_s": fmean(received),
        "pcie_received_bytes_per_s_most": max(received),
        "pcie_generation": max(reading.link_generation for reading in readings),
        "pcie_width": max(reading.link_width for reading in readings),
        "sm_clock_mhz": median(reading.sm_clock_mhz for reading in readings),
        "memory_clock_mhz": median(reading.memory_clock_mhz for reading in readings),
        "used_bytes_most": max(reading.used_bytes for reading in readings),
    }
