"""How fast experts come from disk into slots, beside plain reads of the same files.

A plain read is what the disk gives: threads that do nothing but read whole blocks past the page
cache, at random places. Experts come as they do in a run: through the transfer engine, into slots.
A share compares figures of one round, taken one right after the other, each first in its turn, so
that a disk whose speed changes favours none; both are read into the same memory.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median
from typing import Any

from torch import Tensor

from speq.bench.page_cache import cached_bytes, drop
from speq.bench.report import Column, Report
from speq.config import MAX_READER_THREADS, checked_int, format_bytes, parse_bytes
from speq.errors import SpeqError
from speq.opened import Opened, open_model
from speq.runtime import fetch_from, moved_from
from speq.scheduler.expert_cache import ExpertKey
from speq.scheduler.reader_threads import ReaderThreads
from speq.scheduler.transfer import Priority, Ticket
from speq.stats import Recorder
from speq.store.alignment import ALIGNMENT, aligned_bytes
from speq.store.atomic_file import check_target
from speq.store.expert_store import is_expert_tensor, mean_moved_bytes
from speq.store.packed_store import RECORDS_FILE, PackedExpertStore
from speq.store.range_file import RangeFile

Clock = Callable[[], float]
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


@dataclass(frozen=True, slots=True)
class Settings:
    """readers: numbers of threads; sizes: of plain reads; volume: bytes of a measurement."""

    readers: list[int]
    sizes: list[str]
    volume: str
    rounds: int


@dataclass(frozen=True, slots=True)
class Sample:
    """What one measurement moved. payload: without what whole blocks bring along."""

    payload_bytes: int
    read_bytes: int
    seconds: float


@dataclass(slots=True)
class Source:
    """A model on disk, as plain files and as a store of experts."""

    opened: Opened
    name: str
    kind: str
    paths: list[Path]

    @classmethod
    def of(cls, model: str) -> "Source":
        opened = open_model(model)
        packed = isinstance(opened.store, PackedExpertStore)
        kind = "packed" if packed else "safetensors"
        return cls(opened, model, kind, expert_files(opened))

    def drop(self) -> None:
        for path in self.paths:
            drop(path)

    def cached_bytes(self) -> int:
        return sum(cached_bytes(path) for path in self.paths)


def expert_files(opened: Opened) -> list[Path]:
    """The files that hold a model's experts, perhaps with other weights."""
    if isinstance(opened.store, PackedExpertStore):
        return [opened.checkpoint.path / RECORDS_FILE]
    tensors = opened.checkpoint.tensors.items()
    return sorted({file.path for name, (file, _) in tensors if is_expert_tensor(name)})


def arena_for(rows: int, *sizes: int) -> Tensor:
    """Rows as long as the longest read. Memory nobody has written to yet would be slower."""
    return aligned_bytes(rows, max(sizes)).zero_()


def plain_reads(
    paths: list[Path],
    size: int,
    arena: Tensor,
    readers: int,
    volume: int,
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> Sample:
    """Read blocks of `size`, spread at random over files, into the first rows of `arena`."""
    files = [RangeFile(path) for path in paths]
    try:
        blocks = [(f, at) for f in files for at in range(0, f.size - size + 1, size)]
        if not blocks:
            raise SpeqError(f"{paths[0]} is smaller than a read of {format_bytes(size)}")
        wanted = max(volume // size, readers)
        blocks = random.Random(seed).sample(blocks, min(wanted, len(blocks)))
        todo: SimpleQueue[tuple[RangeFile, int]] = SimpleQueue()
        for block in blocks:
            todo.put(block)
        failed: list[BaseException] = []

        def work(buffer: Tensor) -> None:
            try:
                while True:
                    file, at = todo.get_nowait()
                    file.read_aligned(at, size, buffer)
            except Empty:
                pass
            except BaseException as error:
                failed.append(error)

        buffers = arena[:readers, :size]
        threads = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
        start_s = clock()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = clock() - start_s
        if failed:
            raise failed[0]
        return Sample(len(blocks) * size, len(blocks) * size, seconds)
    finally:
        for file in files:
            file.close()


def expert_reads(
    opened: Opened,
    arena: Tensor,
    readers: int,
    volume: int,
    seed: int,
    clock: Clock = time.perf_counter,
) -> Sample:
    """Have the transfer engine bring random experts into rows of `arena`, as fast as it can."""
    store, recorder = opened.store, Recorder(clock)
    count = store.num_layers * store.num_experts
    wanted = min(max(int(volume // mean_moved_bytes(store)), readers), count)
    keys = [
        ExpertKey(*divmod(at, store.num_experts))
        for at in random.Random(seed).sample(range(count), wanted)
    ]
    # As many again as are read: a reader never waits for the next request.
    slots = arena[: 2 * readers, : store.codec.slot_bytes]
    engine = ReaderThreads(fetch_from(store), slots, moved_from(store), recorder, readers)
    step = recorder.begin("bench")
    tickets: dict[int, Ticket] = {}
    try:
        start_s = clock()
        for at, key in enumerate(keys):
            slot = at % len(slots)
            if slot in tickets:
                engine.wait(tickets[slot])
            tickets[slot] = engine.submit(key, slot, Priority.DEMAND)
        for ticket in tickets.values():
            engine.wait(ticket)
        seconds = clock() - start_s
    finally:
        engine.close()
    return Sample(step.moved_bytes, step.read_bytes, seconds)


def run(models: list[str], settings: Settings, json_file: Path | None, force: bool) -> Report:
    """Measure every model at every number of readers. Raises SpeqError for nonsense settings."""
    check_target(json_file, force)
    checked_int("rounds", settings.rounds, 1)
    for readers in settings.readers:
        checked_int("readers", readers, 1, MAX_READER_THREADS)
    volume = parse_bytes(settings.volume)
    sizes = [parse_bytes(size) for size in settings.sizes]
    for size in sizes:
        if size % ALIGNMENT:
            raise SpeqError(f"size {size} is no multiple of {ALIGNMENT} bytes")
    sources: list[Source] = []
    try:
        for model in models:
            sources.append(Source.of(model))
        rows = measure(sources, settings, sizes, volume)
    finally:
        for source in sources:
            source.opened.close()
    report = Report("transfer", " ".join(models), asdict(settings), rows)
    if json_file is not None:
        report.write(json_file)
    return report


def measure(
    sources: list[Source], settings: Settings, sizes: list[int], volume: int
) -> list[dict[str, Any]]:
    """A row for each setting; `share` is of plain reads of the largest size, as many at a time."""
    kinds = (*sizes, None)  # None: experts
    groups = [(source, readers) for source in sources for readers in settings.readers]
    cases = [(source, readers, size) for source, readers in groups for size in kinds]
    arena = arena_for(
        2 * max(settings.readers), *sizes, *(s.opened.store.codec.slot_bytes for s in sources)
    )
    samples: dict[int, list[Sample]] = {at: [] for at in range(len(cases))}
    cached = dict.fromkeys(samples, 0)
    for turn in range(settings.rounds):
        for group in range(len(groups)):
            # What is compared is measured within a second or so, each kind first in its turn.
            for kind in range(len(kinds)):
                at = group * len(kinds) + (kind + turn) % len(kinds)
                source, readers, size = cases[at]
                source.drop()
                before = source.cached_bytes()
                if size is None:
                    sample = expert_reads(source.opened, arena, readers, volume, seed=turn)
                else:
                    sample = plain_reads(source.paths, size, arena, readers, volume, seed=turn)
                samples[at].append(sample)
                cached[at] = max(cached[at], source.cached_bytes() - before)
    rows = []
    for at, (source, readers, size) in enumerate(cases):
        plain = samples[cases.index((source, readers, max(sizes)))]
        rates = [s.payload_bytes / s.seconds for s in samples[at]]
        pairs = zip(rates, plain, strict=True)
        shares = [rate / (other.payload_bytes / other.seconds) for rate, other in pairs]
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


def link_bytes_per_s(opened: Opened, readers: int, volume: int) -> float:
    """What the disk gives: plain reads of an expert's size from the files that hold them."""
    size = opened.store.codec.slot_bytes
    sample = plain_reads(expert_files(opened), size, arena_for(readers, size), readers, volume)
    return sample.payload_bytes / sample.seconds
