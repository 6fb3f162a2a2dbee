"""What the driver says of a GPU while it works: its memory, its clocks, and what crosses PCIe.

NVML answers, by way of nvidia-ml-py, which is optional. The driver counts the bytes that cross PCIe
for 20 ms at each reading; a thread of its own waits for that.
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
    """At one time, in seconds of the clock that steps are timed by.

    received_bytes_per_s, sent_bytes_per_s  over PCIe, as the card sees it
    link_generation, link_width             of PCIe as it is now: an idle card lowers them
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
    """Whatever tells of a card."""

    def read(self) -> CardReading:
        """Raises an error of its own where the driver refuses."""


class NvmlCard:
    """A card by its NVML handle."""

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


@cache  # whoever asks again hears no second time why not
def card_of(uuid: str) -> NvmlCard | None:
    """The card of that UUID, as torch gives it; None, said once, where NVML does not tell."""
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
    except Exception as error:  # NVML's errors are made as they occur
        logger.info("no figures of PCIe and clocks: NVML says %s", error)
        return None


@contextmanager
def watching(card: Card | None) -> Iterator[list[CardReading]]:
    """Readings of the time in the block, as a list that grows; none without a card."""
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
            logger.info("figures of PCIe and clocks end here: NVML says %s", error)

    thread = threading.Thread(target=watch, name="speq-card", daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        ended.set()
        thread.join()


def summary(readings: list[CardReading]) -> dict[str, Any] | None:
    """Figures of a run; None where there were no readings."""
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
