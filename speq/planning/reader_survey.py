"""Chooses how many threads read experts, by a survey of their disk that is kept for later runs.

The survey loads experts as runs do, by more and more threads. The fewest threads that come close to
the best rate are enough: a read takes longer beside others, and so does the one that a layer waits
for. Threads cost little else: while they read, they compute nothing.
"""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from speq.config import DEFAULT_READER_THREADS
from speq.control_groups import processors
from speq.errors import SpeqError
from speq.experts.expert_store import ExpertStore, SafetensorsExpertStore, mean_moved_bytes
from speq.files.alignment import allocate_aligned
from speq.files.atomic_file import write_whole
from speq.files.cache_folder import cache_folder
from speq.files.json_file import read_json
from speq.machine import host, is_recent
from speq.planning.processor_trial import link_bytes_per_s
from speq.units import Clock, Progress, format_bytes, no_progress

logger = logging.getLogger("speq")

NAME, FORMAT = "readers.json", 1
# Of other disks, models and machines with the same home.
MAX_KEPT = 64
# Numbers of threads that are tried. One would have what a layer waits for stand behind prefetches.
COUNTS = (2, 3, 4, 6, 8)
# As many threads as cores, or so many, at most: to submit reads they need a core now and then.
ALWAYS_TRIED = 4
# Share of the best rate that is enough. Disks vary by as much from one second to the next.
ENOUGH = 0.95
# Takes turns so often, or until so much time has passed; bytes of one sample, at most.
ROUNDS, SURVEY_S, SAMPLE_BYTES = 3, 1.5, 256 << 20
# Smaller models are read in a second or two, and their survey would take as long.
LEAST_BYTES = 1 << 30
# Slots that are read into, and buffers of reads, at most; besides, half of the budget.
SLOT_BYTES = 512 << 20

# (threads, number of the sample) -> bytes a second
ReadRate = Callable[[int, int], float]


def reader_threads(
    store: ExpertStore,
    budget_bytes: int,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
) -> int:
    """Threads that are enough to read a store's experts: surveyed now, or when that was done last.

    budget_bytes  of memory, of which the survey takes half at most

    Raises SpeqError where an expert cannot be read.
    """
    mean_bytes = mean_moved_bytes(store)
    if store.num_layers * store.num_experts * mean_bytes < LEAST_BYTES:
        return DEFAULT_READER_THREADS
    slot_bytes = store.codec.slot_bytes
    room = min(SLOT_BYTES, budget_bytes // 2) // (slot_bytes + store.reading_bytes)
    most = min(max(processors(), ALWAYS_TRIED), room)
    counts = [count for count in COUNTS if count <= most]
    if len(counts) < 2:
        return COUNTS[0]
    folder, key = cache_folder(), key_of(store, mean_bytes)
    path = None if folder is None else folder / NAME
    rates = {} if path is None else kept_rates(path).get(key, {})
    if not rates.keys() >= {*counts}:
        report = progress or no_progress
        report("surveying the disk", 0, 1)
        slots = allocate_aligned(counts[-1], slot_bytes).zero_()  # fresh memory is slower

        def rate(count: int, sample: int) -> float:
            return link_bytes_per_s(store, [*slots[:count]], clock, SAMPLE_BYTES, 64 * sample)

        rates = survey(rate, counts, clock)
        if isinstance(store, SafetensorsExpertStore):
            store.drop_buffers()  # a run counts those of as many threads as it has
        report("surveying the disk", 1, 1)
        if path is not None:
            keep(path, key, rates)
    chosen = fewest_that_do({count: rates[count] for count in counts})
    shown = ", ".join(f"{format_bytes(rates[count])}/s by {count}" for count in counts)
    logger.info("experts are read by %d threads: the disk gives %s", chosen, shown)
    return chosen


def survey(rate: ReadRate, counts: Sequence[int], clock: Clock) -> dict[int, float]:
    """Median rates by threads. All take turns, each of them first in one, so that a disk whose
    speed changes favours none.
    """
    found: dict[int, list[float]] = {count: [] for count in counts}
    begun_s, sample = clock(), 0
    for turn in range(ROUNDS):
        for count in (*counts[turn:], *counts[:turn]):
            found[count].append(rate(count, sample))
            sample += 1
        if clock() - begun_s >= SURVEY_S:
            break
    return {count: median(rates) for count, rates in found.items()}


def fewest_that_do(rates: Mapping[int, float]) -> int:
    """The fewest threads with about the best rate."""
    best = max(rates.values())
    return min(count for count, rate in rates.items() if rate >= ENOUGH * best)


def key_of(store: ExpertStore, mean_bytes: float) -> str:
    """What a survey is of: machine, disks, form and size of an expert."""
    devices = sorted({os.stat(path).st_dev for path in store.files})
    form = "published" if store.published else "packed"
    return f"{host()}, devices {devices}, {form} experts of {round(mean_bytes)} bytes"


def kept_rates(path: Path) -> dict[str, dict[int, float]]:
    """Rates by threads of each survey in a file that still holds; damaged ones are left out."""
    return {key: rates for key, (rates, _) in _surveys(path).items()}


def keep(path: Path, key: str, rates: Mapping[int, float]) -> None:
    """Keep a survey beside others; where that cannot be written, it is made again."""
    found = _surveys(path)
    found.pop(key, None)
    kept = dict([*found.items(), (key, (dict(rates), time.time()))][-MAX_KEPT:])
    entries = {
        name: {"rates": {str(count): rate for count, rate in each.items()}, "measured_at": at}
        for name, (each, at) in kept.items()
    }
    with contextlib.suppress(SpeqError):
        write_whole(path, json.dumps({"format": FORMAT, "surveys": entries}).encode())


def _surveys(path: Path) -> dict[str, tuple[dict[int, float], float]]:
    if not path.exists():
        return {}
    found = {}
    try:
        content = read_json(path)
        if content["format"] != FORMAT:
            raise ValueError("another format")
        for key, entry in content["surveys"].items():
            rates = {int(count): float(rate) for count, rate in entry["rates"].items()}
            measured_at = float(entry["measured_at"])
            if not all(0 < rate < 1e18 for rate in rates.values()):
                raise ValueError("a rate is not above 0")
            if is_recent(measured_at):
                found[key] = rates, measured_at
    except (SpeqError, AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        logger.debug("%s is made anew: %s", path, error)
        return {}
    return found
