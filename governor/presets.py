"""Cards, memories and links by name, to plan for a machine that is not at hand.

Bandwidths are those of data sheets. Kernels and copies reach the shares below of them.
"""

from dataclasses import dataclass, replace
from typing import Literal

from speq.errors import checked_choice

# `speq bench kernels` reads exact experts at this share of the memory's speed.
MEMORY_SHARE = 0.9
# Large copies reach this share of a link: 25 GB/s of the 31.5 of PCIe 4.0 x16.
LINK_SHARE = 0.8
# A layer's time besides reading weights: eager Python takes 280 to 390 us in transformers.
LAYER_S = 350e-6

PCIE4_X8, PCIE4, PCIE5 = 15.75e9, 31.5e9, 63.0e9
NVME4 = 7.0e9


@dataclass(frozen=True, slots=True)
class Rates:
    """A machine's speeds in bytes per second, and their source.

    layer_s  time of a layer in any pass, besides reading weights
    """

    source: str
    device: Literal["cpu", "cuda"]
    link_bytes_per_s: float
    memory_bytes_per_s: float
    layer_s: float = LAYER_S

    def but(self, link: float | None, memory: float | None) -> "Rates":
        """The same rates with the given figures in place of these."""
        rates = self
        if link is not None:
            rates = replace(rates, link_bytes_per_s=link, source=f"{rates.source}, link as given")
        if memory is not None:
            rates = replace(
                rates, memory_bytes_per_s=memory, source=f"{rates.source}, memory as given"
            )
        return rates


def _preset(
    sheet: str, device: Literal["cpu", "cuda"], memory_gb_per_s: float, link: float
) -> Rates:
    return Rates(sheet, device, LINK_SHARE * link, MEMORY_SHARE * memory_gb_per_s * 1e9)


# Vendors' data sheets: memory bandwidth in GB/s, and the link of the card or the disk.
PRESETS: dict[str, Rates] = {
    "rtx-3090": _preset("NVIDIA RTX 3090 data sheet, PCIe 4.0 x16", "cuda", 936, PCIE4),
    "rtx-4060-ti": _preset("NVIDIA RTX 4060 Ti data sheet, PCIe 4.0 x8", "cuda", 288, PCIE4_X8),
    "rtx-4090": _preset("NVIDIA RTX 4090 data sheet, PCIe 4.0 x16", "cuda", 1008, PCIE4),
    "rtx-5090": _preset("NVIDIA RTX 5090 data sheet, PCIe 5.0 x16", "cuda", 1792, PCIE5),
    "a100-40gb": _preset("NVIDIA A100 PCIe 40 GB data sheet, PCIe 4.0 x16", "cuda", 1555, PCIE4),
    "h100-pcie": _preset("NVIDIA H100 PCIe data sheet, PCIe 5.0 x16", "cuda", 2000, PCIE5),
    "h200": _preset("NVIDIA H200 SXM data sheet, PCIe 5.0 x16", "cuda", 4800, PCIE5),
    "laptop-ddr5": _preset(
        "two channels of DDR5-5600 (JEDEC), an NVMe disk on PCIe 4.0 x4", "cpu", 89.6, NVME4
    ),
    "desktop-ddr4": _preset(
        "two channels of DDR4-3200 (JEDEC), an NVMe disk on PCIe 4.0 x4", "cpu", 51.2, NVME4
    ),
}


@dataclass(frozen=True, slots=True)
class Multiprocessors:
    """What a card computes with. clock_hz: the boost clock of the data sheet."""

    arch: str
    count: int
    clock_hz: float


# Of the cards among PRESETS, by the same names: data sheets and architecture white papers.
MULTIPROCESSORS: dict[str, Multiprocessors] = {
    "rtx-3090": Multiprocessors("sm_86", 82, 1.695e9),
    "rtx-4060-ti": Multiprocessors("sm_89", 34, 2.535e9),
    "rtx-4090": Multiprocessors("sm_89", 128, 2.52e9),
    "rtx-5090": Multiprocessors("sm_120", 170, 2.407e9),
    "a100-40gb": Multiprocessors("sm_80", 108, 1.41e9),
    "h100-pcie": Multiprocessors("sm_90", 114, 1.755e9),
    "h200": Multiprocessors("sm_90", 132, 1.98e9),
}
# The preset of a user who says nothing of the machine, by device.
DEFAULT_PRESET = {"cuda": "rtx-4090", "cpu": "laptop-ddr5"}


def preset(name: str) -> Rates:
    """The rates of that name. Raises SpeqError for a name that is not among `PRESETS`."""
    rates = PRESETS[checked_choice("preset", name, tuple(PRESETS))]
    return replace(rates, source=f"preset {name}: {rates.source}")
