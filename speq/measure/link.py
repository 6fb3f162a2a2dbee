"""Measures the link to the experts: reads from disk, and copies from host memory.

Plain reads measure the disk alone, and expert reads the transfer engine, which loads experts as a
run does. The rate of the link is what a load surveys.
"""

import random
import time
from contextlib import closing
from math import inf
from statistics import median

import torch
from torch import Tensor

from speq.engine.offload import fetch_from, moved_from
from speq.experts.expert_store import ExpertStore, mean_moved_bytes
from speq.files.plain_reads import LinkSample, arena_for, plain_reads
from speq.governor.roofline import Points
from speq.planning.link_trial import link_bytes_per_s
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.read_queue import ReaderThreads
from speq.scheduler.transfer import Priority, TransferTicket
from speq.stats import Recorder
from speq.units import Clock, Progress, track

# Bytes read for one figure by default.
LINK_BYTES = 256 << 20
# Sizes of plain reads and copies; an expert's own follows.
READ_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
FIRST_FETCHES = 16


def expert_reads(
    store: ExpertStore,
    arena: Tensor,
    readers: int,
    volume: int,
    seed: int = 0,
    clock: Clock = time.perf_counter,
) -> LinkSample:
    """Load random experts into rows of `arena` through the transfer engine at full speed."""
    recorder, count = Recorder(clock), store.num_layers * store.num_experts
    wanted = min(max(int(volume // mean_moved_bytes(store)), readers), count)
    keys = [
        ExpertKey(*divmod(at, store.num_experts))
        for at in random.Random(seed).sample(range(count), wanted)
    ]
    # Twice as many slots as reads, so that a reader never waits for the next request.
    slots = arena[: 2 * readers, : store.codec.slot_bytes]
    step = recorder.begin("bench")
    tickets: dict[int, TransferTicket] = {}
    with closing(_transfer_of(store, slots, readers, recorder)) as engine:
        start_s = clock()
        for at, key in enumerate(keys):
            slot = at % len(slots)
            if slot in tickets:
                engine.wait(tickets[slot])
            tickets[slot] = engine.submit(key, slot, Priority.DEMAND)
        for ticket in tickets.values():
            engine.wait(ticket)
        seconds = clock() - start_s
    return LinkSample(step.moved_bytes, step.read_bytes, seconds)


def long_link_bytes_per_s(
    store: ExpertStore, readers: int, clock: Clock = time.perf_counter
) -> float:
    """The rate that a load surveys, by more bytes than it spares."""
    slots = [*arena_for(readers, store.codec.slot_bytes)]
    return link_bytes_per_s(store, slots, clock, LINK_BYTES, limit_s=inf)


def link_by_size(
    store: ExpertStore,
    readers: int,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
) -> Points:
    """Bytes per second from disk by size of a read: plain reads, and an expert's own size last.

    store  the model's experts as they are on disk
    """
    expert_bytes, files = round(mean_moved_bytes(store)), list(store.files)
    sizes = [size for size in READ_SIZES if size < expert_bytes]
    arena = arena_for(readers, *sizes, store.codec.slot_bytes)
    plain = [
        plain_reads(files, size, arena, readers, LINK_BYTES, clock=clock)
        for size in track("measuring the link", sizes, len(sizes), progress)
    ]
    speeds = [sample.bytes_per_s for sample in plain]
    speeds.append(long_link_bytes_per_s(store, readers, clock))
    return tuple(zip(map(float, (*sizes, expert_bytes)), speeds, strict=True))


def first_fetch_s(store: ExpertStore, readers: int, clock: Clock = time.perf_counter) -> float:
    """Median time to load an expert into its slot while nothing else is under way."""
    slots, count = arena_for(1, store.codec.slot_bytes), store.num_layers * store.num_experts
    spent_s = []
    with closing(_transfer_of(store, slots, readers, Recorder(clock))) as engine:
        for turn in range(1 + FIRST_FETCHES):
            key = ExpertKey(*divmod(7 * turn % count, store.num_experts))
            start_s = clock()
            engine.wait(engine.submit(key, 0, Priority.DEMAND))
            spent_s.append(clock() - start_s)
    return median(spent_s[1:])  # the first one wakes threads and files


def copies_by_size(expert_bytes: int, device: torch.device, clock: Clock) -> Points:
    """Bytes per second to a GPU by size of a copy, an expert's own size last."""
    sizes = [*(size for size in READ_SIZES if size < expert_bytes), expert_bytes]
    copies = {size: max(LINK_BYTES // size, 4) for size in sizes}
    return tuple(
        (float(size), count * size / copy_time_s(size, count, device, clock))
        for size, count in copies.items()
    )


def first_copy_s(expert_bytes: int, device: torch.device, clock: Clock) -> float:
    """Median time to copy an expert to a GPU while nothing else is under way."""
    return median(copy_time_s(expert_bytes, 1, device, clock) for _ in range(FIRST_FETCHES))


def copy_time_s(size: int, copies: int, device: torch.device, clock: Clock) -> float:
    """Time of consecutive copies from pinned memory."""
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    start_s = clock()
    for _ in range(copies):
        there.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    return clock() - start_s


def _transfer_of(
    store: ExpertStore, slots: Tensor, readers: int, recorder: Recorder
) -> ReaderThreads:
    return ReaderThreads(fetch_from(store), slots, moved_from(store), recorder, readers)
