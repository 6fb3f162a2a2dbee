"""How fast the link to the experts is: reads from disk, copies from host memory."""

import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from torch import Tensor

from speq.decode.offload import fetch_from, moved_from
from speq.errors import SpeqError
from speq.experts.expert_store import mean_moved_bytes
from speq.experts.packed_store import RECORDS_FILE, PackedExpertStore
from speq.files.alignment import aligned_bytes
from speq.files.range_file import RangeFile
from speq.models.opened import Opened
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.reader_threads import ReaderThreads
from speq.scheduler.transfer import Priority, Ticket
from speq.stats import Recorder
from speq.units import Clock, format_bytes


@dataclass(frozen=True, slots=True)
class Sample:
    """What one measurement moved. payload: without what whole blocks bring along."""

    payload_bytes: int
    read_bytes: int
    seconds: float


def expert_files(opened: Opened) -> list[Path]:
    """The files that hold a model's experts, perhaps with other weights."""
    if isinstance(opened.store, PackedExpertStore):
        return [opened.checkpoint.path / RECORDS_FILE]
    tensors = opened.checkpoint.tensors.items()
    is_expert = opened.family.names.is_expert
    return sorted({file.path for name, (file, _) in tensors if is_expert(name)})


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


def link_bytes_per_s(opened: Opened, readers: int, volume: int) -> float:
    """What the disk gives: plain reads of an expert's size from the files that hold them."""
    size = opened.store.codec.slot_bytes
    sample = plain_reads(expert_files(opened), size, arena_for(readers, size), readers, volume)
    return sample.payload_bytes / sample.seconds
