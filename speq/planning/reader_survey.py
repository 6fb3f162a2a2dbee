"""Chooses how many threads read experts, by a survey of their disk that is kept for later runs.

The survey loads experts as runs do, by more and more threads. The fewest threads that come close to
the best rate are enough: a read takes longer beside others, and so does the one that a layer waits
for. Threads cost little else: while they read, they compute nothing.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from speq.config import DEFAULT_READER_THREADS
from speq.control_groups import processors
from speq.experts.expert_store import ExpertStore, SafetensorsExpertStore, mean_moved_bytes
from speq.files.alignment import allocate_aligned
from speq.machine import host
from speq.planning import kept_file
from speq.planning.link_trial import link_bytes_per_s
from speq.units import Clock, Progress, format_bytes, no_progress

logger = logging.getLogger("speq")

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
    key = f"readers: {store_key(store)}"
    rates = kept_file.read(key, rates_of) or {}
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
        kept_file.keep(key, {"rates": rates})
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


def store_key(store: ExpertStore) -> str:
    """What reads are of: machine, disks, form and size of an expert."""
    devices = sorted({os.stat(path).st_dev for path in store.files})
    form = "published" if store.published else "packed"
    return f"{host()}, devices {devices}, {form} experts of {round(mean_moved_bytes(store))} bytes"


def rates_of(entry: dict[str, Any]) -> dict[int, float]:
    """Rates by threads. Raises AttributeError, KeyError, OverflowError, TypeError or ValueError for
    what was not kept here.
    """
    return {int(count): kept_file.positive(rate) for count, rate in entry["rates"].items()}
