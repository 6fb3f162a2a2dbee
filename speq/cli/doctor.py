"""`speq doctor`: this machine's memory and disk, what runs our kernels, and what is missing."""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from speq.cli import options as opt
from speq.config import Device
from speq.errors import SpeqError
from speq.host_memory import HOST_SHARE
from speq.options.declared import Options
from speq.units import Progress, format_bytes, format_rate

if TYPE_CHECKING:
    from speq.devices.card import CardReading
    from speq.devices.device import Accelerator, Processor
    from speq.measure.report import Column, Report

logger = logging.getLogger("speq")

# Read to measure the memory; less where a quarter of what is free is less.
READ_BYTES = 1 << 30
READS = 5
REFERENCE = "slower reference"
OP_COLUMNS: "dict[str, Column]" = {
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
    """Say how much memory this machine has and how fast it and the disk are, how fast published
    models would run, what runs our kernels, and what is missing.
    """
    from speq.bench.shapes.known_models import COLUMNS, known_models
    from speq.devices.named import find_device
    from speq.measure.report import print_table

    output.check()
    with output.progress() as progress:
        report = examine(find_device(settings.device), time.perf_counter, progress)
        report.settings["models"] = known_models(report.settings["device"], progress)
    output.write(asdict(report))
    if output.printed:
        return
    for line in findings(report):
        typer.echo(line)
    print_table("published models, as planned for here", COLUMNS, report.settings["models"])
    slow = [row for row in report.rows if row["runs_on"] == REFERENCE]
    if slow:
        replace(report, rows=slow).print(OP_COLUMNS)
        typer.echo(advice(report, slow))
    else:
        typer.echo("Everything is in place. `speq plan OWNER/NAME` says whether a model runs here.")


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
        "disk_bytes_per_s": disk_bytes_per_s(progress),
        "card": None if (card := card_reading(on)) is None else asdict(card),
    }
    return Report("doctor", device.type, settings, rows)


def disk_bytes_per_s(progress: Progress | None) -> float | None:
    """Rate of the disk of the cache folder, kept or measured now; None, said why, where it cannot
    be measured.
    """
    from speq.measure.this_machine import machine_rates

    try:
        return machine_rates(progress).disk_bytes_per_s
    except SpeqError as error:
        logger.warning("%s", error)
        return None


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
    """Lines of the machine, its memory and its disk, and the libraries."""
    found, machine = report.settings, report.machine
    missing: dict[str, str | None] = found["missing"]
    slow = [row["op"] for row in report.rows if row["runs_on"] == REFERENCE]
    by = f", by the {REFERENCE}" if "read_sum" in slow else ""
    disk = found["disk_bytes_per_s"]
    native = f"native for {len(report.rows) - len(slow)} of {len(report.rows)} ops"
    return [
        f"processor:     {machine['processor']}, {machine['cores']} cores, "
        f"{format_bytes(machine['memory_bytes'])} of memory",
        f"free memory:   {format_bytes(found['available_bytes'])}; on a GPU experts take "
        f"{format_bytes(found['default_host_bytes'])} of it ({HOST_SHARE:.0%}), or what "
        "--host-budget says",
        f"GPU:           {machine['gpu'] or 'none that torch sees'}",
        *_card(found["card"]),
        f"disk speed:    {'not known' if disk is None else format_rate(disk)}, of reads past the "
        "page cache on the disk of the cache folder",
        f"memory speed:  {found['read_gb_per_s']:.1f} GB/s: a plain read of "
        f"{format_bytes(found['read_bytes'])} on {found['device']}, median of {READS}{by}",
        f"torch:         {machine['torch']}, {machine['torch_threads']} threads; "
        f"Python {machine['python']}, {machine['system']}",
        f"kernels:       {native}; {_instructions(found)}",
        f"CPU library:   {_library(missing['cpu'])}",
        f"CUDA library:  {_library(missing['cuda'])}",
    ]


def advice(report: "Report", slow: list[dict[str, Any]]) -> str:
    """A sentence on ops without native kernels, and what to do about a library that is missing."""
    device, missing = report.settings["device"], report.settings["missing"]
    ops = ", ".join(row["op"] for row in slow)
    do = "" if missing[device] is None else f" To have them fast, {ADVICE[device]}."
    return f"{ops} on {device}: the {REFERENCE}, exact but no measure of speed.{do}"


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
