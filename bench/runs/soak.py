"""Texts one behind the other for a while: whether memory stays what it was.

A row for each pass over the prompts. The first two passes set up whatever is set up once. After
them neither the bytes allocated on the device nor those that the allocator has reserved may grow.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from speq.bench.settings import SoakSettings as Settings
from speq.errors import SpeqError
from speq.files.atomic_file import check_target
from speq.generator import Generator
from speq.machine import process_bytes
from speq.measure.report import Column, Report, read_prompts
from speq.measure.runs import runs_of
from speq.units import Clock, Progress, format_bytes, no_progress

WARM_UP_PASSES = 2
RUNNING = "running, by seconds"

COLUMNS: dict[str, Column] = {
    "at s": ("at_s", "{:.1f}"),
    "tokens": ("tokens", "{}"),
    "TPOT ms": ("tpot_ms", "{:.2f}"),
    "allocated": ("allocated_bytes", format_bytes),
    "reserved": ("reserved_bytes", format_bytes),
    "process": ("process_bytes", format_bytes),
}


def run(
    model: str,
    settings: Settings,
    json_file: Path | None,
    force: bool,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
) -> Report:
    """Generate for `settings.seconds`. Raises SpeqError where memory of the device grew."""
    check_target(json_file, force)
    prompts = read_prompts(settings.prompts, settings.num_prompts)
    generator = Generator.from_pretrained(
        model, settings.memory_budget, progress=progress, **settings.run
    )
    try:
        rows = []
        told = progress or no_progress
        told(RUNNING, 0, settings.seconds)
        for row in passes(generator, prompts, settings, clock):
            rows.append(row)
            told(RUNNING, min(int(row["at_s"]), settings.seconds), settings.seconds)
    finally:
        generator.close()
    report = Report("soak", model, settings.as_json(), rows)
    if json_file is not None:
        report.write(json_file)
    check_flat(rows)
    return report


def passes(
    generator: Generator, prompts: list[str], settings: Settings, clock: Clock
) -> Iterator[dict[str, Any]]:
    """A row for each pass over the prompts, until the time is over; three at least."""
    on_gpu = generator.runtime.device.type == "cuda"
    start, done = clock(), 0
    while done <= WARM_UP_PASSES or clock() - start < settings.seconds:
        runs = runs_of(generator, prompts, settings.max_new_tokens)
        done += 1
        times = [run.summary()["tpot_ms"] for run in runs]
        yield {
            "at_s": clock() - start,
            "tokens": len(prompts) * settings.max_new_tokens,
            "tpot_ms": sum(times) / len(times),
            "allocated_bytes": torch.cuda.memory_allocated() if on_gpu else None,
            "reserved_bytes": torch.cuda.memory_reserved() if on_gpu else None,
            "process_bytes": process_bytes(),
        }


def check_flat(rows: list[dict[str, Any]]) -> None:
    """Raise SpeqError where memory of the device grew after the warm-up."""
    warm = rows[WARM_UP_PASSES - 1]
    for name in ("allocated_bytes", "reserved_bytes"):
        if warm[name] is None:
            continue
        most = max(row[name] for row in rows)
        if most > warm[name]:
            raise SpeqError(
                f"{name} grew from {warm[name]} after {WARM_UP_PASSES} passes to {most}, and was "
                "to stay; look at the rows for when"
            )
