"""`speq doctor`: what runs on this machine, how fast its memory is, and what is missing."""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from speq.cli import options as opt
from speq.config import Device
from speq.host_memory import HOST_SHARE
from speq.options.declared import Options
from speq.units import Progress, format_bytes

if TYPE_CHECKING:
    from speq.devices.card import CardReading
    from speq.devices.device import Accelerator, Processor
    from speq.measure.report import Column, Report

logger = logging.getLogger("speq")

# Read to measure the memory; less where a quarter of what is free is less.
READ_BYTES = 1 << 30
READS = 5
REFERENCE = "slower reference"
COLUMNS: "dict[str, Column]" = {
    "op": ("op", "{}"),
    "runs on": ("runs_on", "{}"),
    "why": ("why", "{}"),
}
ADVICE = {
    "cpu": "install a C++ compiler and run `make setup`, which builds them",
    "cuda": "install nvcc and a CUDA build of torch, and run `make setup`, which builds them for "
    "cards of compute capability 8.0 and later",
}


@dataclass(frozen=True, slots=True)
class DoctorSettings(Options):
    """What is examined."""

    device: Device = "auto"


def doctor(settings: DoctorSettings, output: opt.Output) -> None:
    """Say what runs our kernels on this machine, how fast its memory is, and what is missing."""
    from speq.devices.named import find_device

    output.check()
    with output.progress() as progress:
        report = examine(find_device(settings.device), time.perf_counter, progress)
    output.write(asdict(report))
    if output.printed:
        return
    report.print(COLUMNS)
    for line in findings(report):
        typer.echo(line)


def examine(
    on: "Processor | Accelerator", clock: Callable[[], float], progress: Progress | None = None
) -> "Report":
    """What runs each op on a device, with the speed of its memory among the settings."""
    from speq.host_memory import available_bytes
    from speq.kernels import library
    from speq.machine import default_host_bytes
    from speq.measure.memory_read import MemoryRead, read_gb_per_s
    from speq.measure.report import Report

    device = on.torch
    backends = {op: library.backend_of(op, device.type) for op in library.ops_of(device.type)}
    rows = [
        {
            "op": op,
            "runs_on": REFERENCE if backend.name == "reference" else backend.name,
            "why": backend.reason,
        }
        for op, backend in backends.items()
    ]
    built = library.MISSING["cpu"] is None
    read = MemoryRead(min(READ_BYTES, on.free_bytes() // 4) // 8 * 8, device)
    settings = {
        "device": device.type,
        "isa": library.isa() if built else None,
        "supported_isas": list(library.supported_isas()) if built else [],
        "missing": {name: library.MISSING[name] for name in ("cpu", "cuda")},
        "available_bytes": available_bytes(),
        "default_host_bytes": default_host_bytes(),
        "read_bytes": read.nbytes,
        "read_gb_per_s": read_gb_per_s(read, device, READS, clock, progress),
        "card": None if (card := card_reading(on)) is None else asdict(card),
    }
    return Report("doctor", device.type, settings, rows)


def card_reading(on: "Processor | Accelerator") -> "CardReading | None":
    """What the driver says of the card now; None, said why, where it says nothing."""
    from speq.devices.device import Processor

    card = None if isinstance(on, Processor) else on.card()
    try:
        return None if card is None else card.read()
    except Exception as error:  # NVML's errors are made as they occur
        logger.info("no figures of PCIe and clocks: NVML says %s", error)
        return None


def findings(report: "Report") -> list[str]:
    """Lines under the table: the machine, its memory, its libraries, and what to do."""
    found, machine = report.settings, report.machine
    missing: dict[str, str | None] = found["missing"]
    slow = [row["op"] for row in report.rows if row["runs_on"] == REFERENCE]
    by = f", by the {REFERENCE}" if "read_sum" in slow else ""
    lines = [
        f"processor:     {machine['processor']}, {machine['cores']} cores, "
        f"{format_bytes(machine['memory_bytes'])} of memory",
        f"free memory:   {format_bytes(found['available_bytes'])}; on a GPU experts take "
        f"{format_bytes(found['default_host_bytes'])} of it ({HOST_SHARE:.0%}), or what "
        "--host-budget says",
        f"GPU:           {machine['gpu'] or 'none that torch sees'}",
        *_card(found["card"]),
        f"torch:         {machine['torch']}, {machine['torch_threads']} threads; "
        f"Python {machine['python']}, {machine['system']}",
        f"memory speed:  {found['read_gb_per_s']:.1f} GB/s: a plain read of "
        f"{format_bytes(found['read_bytes'])} on {found['device']}, median of {READS}{by}",
        f"instructions:  {_instructions(found)}",
        f"CPU library:   {_library(missing['cpu'])}",
        f"CUDA library:  {_library(missing['cuda'])}",
    ]
    if slow:
        lines.append(
            f"{', '.join(slow)} on {found['device']}: the {REFERENCE}, exact but no measure of "
            f"speed.{_advice(found['device'], missing)}"
        )
    return lines


def _card(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    memory = f"{format_bytes(found['used_bytes'])} of {format_bytes(found['total_bytes'])} in use"
    link = f"PCIe {found['link_generation']} x{found['link_width']} now"
    clocks = f"{found['sm_clock_mhz']} MHz, memory {found['memory_clock_mhz']} MHz"
    return [f"card:          {memory}; {link}; {clocks}"]


def _instructions(found: dict[str, Any]) -> str:
    if found["isa"] is None:
        return "torch's own, without our CPU library"
    supported = ", ".join(found["supported_isas"])
    return f"{found['isa']} in use; this processor and build run {supported}"


def _library(missing: str | None) -> str:
    return "built, and loads" if missing is None else f"not in use: {missing}"


def _advice(device: str, missing: dict[str, str | None]) -> str:
    """What to do about ops on the reference; nothing where a library has no such op."""
    return "" if missing[device] is None else f" To have them fast, {ADVICE[device]}."
