"""What it costs to record a run for pictures: the same texts with recording and without, in turns.

A pair is all texts without and all texts with it, in one process and by one generator. Which comes
first alternates. Each run goes on from the slots that the same last text left. The first pair sets
up whatever is set up once, and does not count.

The time is that between a text's first token and its end, by the bench's own clock: recording takes
its time between two steps, which no step's record counts.
"""

import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

from speq.bench.rotation import rotated
from speq.bench.settings import ProfileCostSettings as Settings
from speq.dashboard.recording import Recording
from speq.files.atomic_file import check_target
from speq.generator import Generator
from speq.measure.report import Column, Report, read_prompts
from speq.units import Clock, Progress, track

OFF, ON = False, True
# Of the interval of the median, at least.
CONFIDENCE = 0.95

COLUMNS: dict[str, Column] = {
    "pairs": ("pairs", "{}"),
    "TPOT off ms": ("tpot_off_ms", "{:.3f}"),
    "TPOT on ms": ("tpot_on_ms", "{:.3f}"),
    "on / off": ("ratio", "{:.4f}"),
    "95% from": ("ratio_low", "{:.4f}"),
    "to": ("ratio_high", "{:.4f}"),
    "slower in": ("slower", "{:.0%}"),
    "listeners off": ("listeners_off", "{}"),
    "on": ("listeners_on", "{}"),
}


@dataclass(frozen=True, slots=True)
class Timed:
    """A run over all texts. listeners: how many heard of its steps"""

    tpot_ms: float
    listeners: int


def run(
    model: str,
    settings: Settings,
    json_file: Path | None,
    force: bool,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
) -> Report:
    """Measure all pairs. Raises SpeqError for nonsense settings."""
    check_target(json_file, force)
    prompts = read_prompts(settings.prompts, settings.num_prompts)
    generator = Generator.from_pretrained(
        model, settings.memory_budget, progress=progress, **settings.run
    )
    try:
        longest = max(len(generator.encode(prompt)) for prompt in prompts)
        generator.reserve(longest + settings.max_new_tokens)
        pairs = []
        turns = track("measuring pairs", range(settings.pairs + 1), settings.pairs + 1, progress)
        for turn in turns:
            pair = {
                on: timed(generator, prompts, settings.max_new_tokens, on, clock)
                for on in rotated((OFF, ON), turn)
            }
            pairs.append((pair[OFF], pair[ON]))
    finally:
        generator.close()
    report = Report("profile-cost", model, settings.as_json(), [summed_up(pairs[1:])])
    if json_file is not None:
        report.write(json_file)
    return report


def timed(
    generator: Generator, prompts: list[str], max_new_tokens: int, on: bool, clock: Clock
) -> Timed:
    """Run each text to its full length, with recording or without."""
    tokens, time_s = 0, 0.0
    with Recording(generator) if on else nullcontext(generator) as source:
        listeners = len(generator.runtime.recorder.listeners)
        for prompt in prompts:
            stream = source.stream(prompt, max_new_tokens=max_new_tokens, ignore_eos=True)
            next(stream)
            start_s = clock()
            tokens += sum(1 for _ in stream)
            time_s += clock() - start_s
    return Timed(time_s / tokens * 1e3, listeners)


def summed_up(pairs: list[tuple[Timed, Timed]]) -> dict[str, Any]:
    """Of (without, with) recording: medians, and what the ratios within pairs say."""
    ratios = [on.tpot_ms / off.tpot_ms for off, on in pairs]
    low, high = interval(ratios) or (None, None)
    return {
        "pairs": len(pairs),
        "tpot_off_ms": median(off.tpot_ms for off, _ in pairs),
        "tpot_on_ms": median(on.tpot_ms for _, on in pairs),
        "ratio": median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "slower": sum(ratio > 1 for ratio in ratios) / len(ratios),
        "listeners_off": max(off.listeners for off, _ in pairs),
        "listeners_on": max(on.listeners for _, on in pairs),
        "pairs_ms": [[off.tpot_ms, on.tpot_ms] for off, on in pairs],
    }


def interval(values: Iterable[float]) -> tuple[float, float] | None:
    """Two of the values that have their median between them with `CONFIDENCE`, by the sign test:
    it assumes nothing of how they are distributed. None where they are too few, which is under six.
    """
    ordered = sorted(values)
    count, left, chance = len(ordered), 0, 0.0
    # Below the value at place `left` lie at most so many, each with chance one half.
    while 2 * (chance + comb(count, left) / 2**count) <= 1 - CONFIDENCE:
        chance += comb(count, left) / 2**count
        left += 1
    return (ordered[left - 1], ordered[count - left]) if left else None
