"""How fast experts come from disk into slots, beside plain reads of the same files.

A plain read is what the disk gives: threads that do nothing but read whole blocks past the page
cache, at random places. Experts come as they do in a run: through the transfer engine, into slots.
A share compares figures of one round, taken one right after the other, each first in its turn, so
that a disk whose speed changes favours none; both are read into the same memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from speq.bench.machine.page_cache import cached_bytes, drop
from speq.bench.settings import TransferSettings as Settings
from speq.errors import OptionError
from speq.experts.expert_store import mean_moved_bytes
from speq.files.alignment import ALIGNMENT
from speq.files.plain_reads import LinkSample, arena_for, plain_reads
from speq.measure.link import expert_reads
from speq.measure.picture import Axis, Picture
from speq.measure.report import Column, Report
from speq.models.opened import Opened, open_model
from speq.units import Progress, format_bytes, parse_bytes, track

COLUMNS: dict[str, Column] = {
    "store": ("store", "{}"),
    "what": ("kind", "{}"),
    "size": ("request_bytes", format_bytes),
    "readers": ("readers", "{}"),
    "GB/s": ("gb_per_s", "{:.2f}"),
    "read GB/s": ("read_gb_per_s", "{:.2f}"),
    "of plain": ("share", "{:.2f}"),
    "page cache": ("cached_bytes", format_bytes),
}
PICTURES = (
    Picture(
        *("speed", "Reading experts", (Axis("readers", "reads at a time"),)),
        (Axis("gb_per_s", "speed, GB/s"),),
        (Axis("kind", "kind"), Axis("request_bytes", "bytes")),
        each="store",
        aid="Experts come as fast as the disk gives them where their bars reach plain reads'.",
    ),
)


@dataclass(slots=True)
class StoreSource:
    """A model on disk, as plain files and as a store of experts."""

    opened: Opened
    name: str
    kind: str
    paths: list[Path]

    @classmethod
    def of(cls, model: str) -> "StoreSource":
        opened = open_model(model)
        kind = "safetensors" if opened.store.published else "packed"
        return cls(opened, model, kind, list(opened.store.files))

    def drop(self) -> None:
        for path in self.paths:
            drop(path)

    def cached_bytes(self) -> int:
        return sum(cached_bytes(path) for path in self.paths)


def run(models: Sequence[str], settings: Settings, progress: Progress | None = None) -> Report:
    """Measure every model at every number of readers. Raises SpeqError for nonsense settings."""
    volume = parse_bytes(settings.volume)
    sizes = [parse_bytes(size) for size in settings.sizes]
    for size in sizes:
        if size % ALIGNMENT:
            raise OptionError(f"size {size} is no multiple of {ALIGNMENT} bytes")
    sources: list[StoreSource] = []
    try:
        for model in models:
            sources.append(StoreSource.of(model))
        rows = measure(sources, settings, sizes, volume, progress)
    finally:
        for source in sources:
            source.opened.close()
    return Report("transfer", " ".join(models), settings.as_json(), rows)


def measure(
    sources: list[StoreSource],
    settings: Settings,
    sizes: list[int],
    volume: int,
    progress: Progress | None,
) -> list[dict[str, Any]]:
    """A row for each setting; `share` is of plain reads of the largest size, as many at a time."""
    kinds = (*sizes, None)  # None: experts
    groups = [(source, readers) for source in sources for readers in settings.readers]
    cases = [(source, readers, size) for source, readers in groups for size in kinds]
    arena = arena_for(
        2 * max(settings.readers), *sizes, *(s.opened.store.codec.slot_bytes for s in sources)
    )
    samples: dict[int, list[LinkSample]] = {at: [] for at in range(len(cases))}
    cached = dict.fromkeys(samples, 0)
    for turn in track("reading", range(settings.rounds), settings.rounds, progress):
        for group in range(len(groups)):
            # What is compared is measured within a second or so, each kind first in its turn.
            for kind in range(len(kinds)):
                at = group * len(kinds) + (kind + turn) % len(kinds)
                source, readers, size = cases[at]
                source.drop()
                before = source.cached_bytes()
                if size is None:
                    sample = expert_reads(source.opened.store, arena, readers, volume, seed=turn)
                else:
                    sample = plain_reads(source.paths, size, arena, readers, volume, seed=turn)
                samples[at].append(sample)
                cached[at] = max(cached[at], source.cached_bytes() - before)
    rows = []
    for at, (source, readers, size) in enumerate(cases):
        plain = samples[cases.index((source, readers, max(sizes)))]
        rates = [s.bytes_per_s for s in samples[at]]
        pairs = zip(rates, plain, strict=True)
        shares = [rate / other.bytes_per_s for rate, other in pairs]
        rows.append(
            {
                "store": source.name,
                "kind": "plain reads" if size is not None else f"experts, {source.kind}",
                "request_bytes": size or round(mean_moved_bytes(source.opened.store)),
                "readers": readers,
                "gb_per_s": median(rates) / 1e9,
                "read_gb_per_s": median(s.read_bytes / s.seconds for s in samples[at]) / 1e9,
                "share": median(shares),
                "cached_bytes": cached[at],
            }
        )
    return rows
