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

PCIE4_X8, PCIE4, PCIE5_X8, PCIE5 = 15.75e9, 31.5e9, 31.5e9, 63.0e9
# Reads of large blocks, by the data sheets of such disks.
NVME4, NVME5 = 7.0e9, 14.0e9


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
    "rtx-4070": _preset("NVIDIA RTX 4070 data sheet, PCIe 4.0 x16", "cuda", 504, PCIE4),
    "rtx-4090": _preset("NVIDIA RTX 4090 data sheet, PCIe 4.0 x16", "cuda", 1008, PCIE4),
    "rtx-5060-ti": _preset("NVIDIA RTX 5060 Ti data sheet, PCIe 5.0 x8", "cuda", 448, PCIE5_X8),
    "rtx-5070": _preset("NVIDIA RTX 5070 data sheet, PCIe 5.0 x16", "cuda", 672, PCIE5),
    "rtx-5070-ti": _preset("NVIDIA RTX 5070 Ti data sheet, PCIe 5.0 x16", "cuda", 896, PCIE5),
    "rtx-5080": _preset("NVIDIA RTX 5080 data sheet, PCIe 5.0 x16", "cuda", 960, PCIE5),
    "rtx-5090": _preset("NVIDIA RTX 5090 data sheet, PCIe 5.0 x16", "cuda", 1792, PCIE5),
    "rtx-pro-6000": _preset(
        "NVIDIA RTX PRO 6000 Blackwell data sheet, PCIe 5.0 x16", "cuda", 1792, PCIE5
    ),
    "laptop-rtx-5090": _preset(
        "NVIDIA RTX 5090 Laptop data sheet (GDDR7 at 28 Gb/s, 256 bits); eight lanes of PCIe 5.0 "
        "are counted",
        "cuda",
        896,
        PCIE5_X8,
    ),
    "a100-40gb": _preset("NVIDIA A100 PCIe 40 GB data sheet, PCIe 4.0 x16", "cuda", 1555, PCIE4),
    "h100-pcie": _preset("NVIDIA H100 PCIe data sheet, PCIe 5.0 x16", "cuda", 2000, PCIE5),
    "h200": _preset("NVIDIA H200 SXM data sheet, PCIe 5.0 x16", "cuda", 4800, PCIE5),
    "laptop-ddr5": _preset(
        "two channels of DDR5-5600 (JEDEC), an NVMe disk on PCIe 4.0 x4", "cpu", 89.6, NVME4
    ),
    "laptop-lpddr5x": _preset(
        "Intel Core Ultra 200V data sheet: LPDDR5X-8533 on 128 bits; an NVMe disk on PCIe 4.0 x4",
        "cpu",
        136.5,
        NVME4,
    ),
    "desktop-ddr5": _preset(
        "two channels of DDR5-6400 (JEDEC), an NVMe disk on PCIe 5.0 x4", "cpu", 102.4, NVME5
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
    "rtx-4070": Multiprocessors("sm_89", 46, 2.475e9),
    "rtx-4090": Multiprocessors("sm_89", 128, 2.52e9),
    "rtx-5090": Multiprocessors("sm_120", 170, 2.407e9),
    "rtx-5060-ti": Multiprocessors("sm_120", 36, 2.57e9),
    "rtx-5070": Multiprocessors("sm_120", 48, 2.51e9),
    "rtx-5070-ti": Multiprocessors("sm_120", 70, 2.45e9),
    "rtx-5080": Multiprocessors("sm_120", 84, 2.62e9),
    "rtx-pro-6000": Multiprocessors("sm_120", 188, 2.617e9),
    "a100-40gb": Multiprocessors("sm_80", 108, 1.41e9),
    "h100-pcie": Multiprocessors("sm_90", 114, 1.755e9),
    "h200": Multiprocessors("sm_90", 132, 1.98e9),
}
# The card of a user who plans for one and does not say which.
DEFAULT_CARD = "rtx-4090"


def preset(name: str) -> Rates:
    """The rates of that name. Raises SpeqError for a name that is not among `PRESETS`."""
    rates = PRESETS[checked_choice("preset", name, tuple(PRESETS))]
    return replace(rates, source=f"preset {name}: {rates.source}")
