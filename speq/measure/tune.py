"""What `speq tune` measures of a model on this machine: the offline half of MoE-SpeQ 3.2.2.

The link by size of a read; what a first expert takes; drafts and verifications of several lengths,
from generations under the budget; and how fast each codec's experts are computed with, and
published ones encoded, on random experts of the model's shape.
"""

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from speq.config import SamplingParams
from speq.decode.offload import fetch_from, moved_from
from speq.decode.sequence import Sequence
from speq.errors import checked_int
from speq.experts.codec import ExpertCodec, ExpertShape, Matrices, codec_of, codecs_for
from speq.experts.encoding_store import EncodingStore
from speq.experts.expert_store import ExpertStore, SafetensorsExpertStore, mean_moved_bytes
from speq.experts.int4 import Int4Arena, Int4Expert, Int4Layout
from speq.files.alignment import aligned_bytes
from speq.generator import Generator
from speq.governor.adaptive import LONGEST
from speq.governor.draft_length import FixedDraftLength
from speq.governor.profile import Profile
from speq.governor.roofline import Points
from speq.measure.link import arena_for, expert_files, plain_reads
from speq.measure.report import read_prompts
from speq.measure.routes import distinct_points
from speq.planning.profiles import key_of
from speq.runtime import Runtime
from speq.scheduler.expert_cache import ExpertKey
from speq.scheduler.reader_threads import ReaderThreads
from speq.scheduler.transfer import Priority
from speq.stats import Recorder, StepStats
from speq.units import Clock, Progress, parse_bytes, tracked

# Draft lengths that are measured; those between are interpolated.
DRAFT_LENGTHS = (0, 1, 2, 4, 8, LONGEST)
# Sizes of plain reads; an expert's own follows, from reads of experts.
READ_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
# Read for a point of the link, and held of a layer's words while a codec is timed: more than caches
# hold. First fetches and calls that are timed.
LINK_BYTES = 64 << 20
LAYER_BYTES = 192 << 20
FIRST_FETCHES = 16
CALLS = 24
# Experts that each thread encodes to be timed.
ENCODED = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """options: of `RunConfig`, besides the draft length."""

    memory_budget: str
    prompts: Path | None
    num_prompts: int
    max_new_tokens: int
    options: dict[str, Any]


def tune(
    model: str,
    settings: Settings,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
) -> Profile:
    """Measure a profile. Raises SpeqError for nonsense settings and budgets that are too small."""
    # Room for a cycle of each length.
    checked_int("max_new_tokens", settings.max_new_tokens, sum(k + 1 for k in DRAFT_LENGTHS))
    prompts = read_prompts(settings.prompts, settings.num_prompts)
    parse_bytes(settings.memory_budget)
    tell = progress or (lambda label, done, total: None)
    generator = Generator.from_pretrained(
        model,
        settings.memory_budget,
        draft_length="auto",
        profile="none",
        progress=progress,
        **settings.options,
    )
    try:
        runtime = generator.runtime
        cycles, routes = measured_cycles(generator, prompts, settings.max_new_tokens, tell)
        link, first_fetch_s = measured_link(runtime, tell, clock)
        shape = runtime.opened.store.codec.shape
        names = codecs_for(shape.dtype)
        codecs = {
            name: compute_speed(runtime, codec_of(name, shape), clock)
            for name in tracked("timing kernels of each codec", names, len(names), tell)
        }
        others = encodable(runtime)
        encoders = {
            name: encode_speed(codec_of(name, shape), runtime.config.reader_threads, clock)
            for name in tracked("timing what encodes", others, len(others), tell)
        }
        key = key_of(runtime.opened, runtime.device.type, runtime.config.memory_budget)
        expert_bytes = mean_bytes(runtime)
        codec = runtime.opened.store.codec.name
        points = distinct_points(routes, runtime.shape.experts.num_experts)
    finally:
        generator.close()
    return Profile(
        key=key,
        link=link,
        transfer_overhead_s=max(first_fetch_s - expert_bytes / link[-1][1], 0.0),
        first_fetch_s=first_fetch_s,
        expert_bytes=expert_bytes,
        decode_bytes_per_s=codecs,
        encode_bytes_per_s=encoders,
        codec=codec,
        routes=points,
        **figures_of(cycles),
    )


def measured_cycles(
    generator: Generator,
    prompts: list[str],
    max_new_tokens: int,
    tell: Progress,
) -> tuple[dict[int, list[StepStats]], list[list[list[int]]]]:
    """Cycles by draft length, of as many lengths as the budget's draft allows; and expert ids by
    layer and token, of all tokens that were emitted.

    Lengths take turns within each text, so that a machine that changes favours none; what their
    slots hold is then of all lengths, which is why stalls are taken off and not measured here.
    """
    runtime = generator.runtime
    longest = max(len(generator.encode(prompt)) for prompt in prompts)
    generator.reserve(longest + max_new_tokens)
    lengths = DRAFT_LENGTHS if runtime.draft_bank is not None else DRAFT_LENGTHS[:1]
    engine, cycles = runtime.engine, defaultdict[int, list[StepStats]](list)
    lookahead = engine.offload.prefetcher.lookahead
    routes: list[list[list[int]]] = [[] for _ in range(lookahead.num_layers)]
    total, before = len(prompts) * max_new_tokens, engine.governor
    tell("measuring drafts and verifications", 0, total)
    try:
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
            request = Sequence(generator.encode(prompt), sampling, runtime.model.eos_ids)
            engine.start(request)
            while request.finish_reason is None:
                counts = {k: len(cycles[k]) for k in lengths}
                engine.governor = FixedDraftLength(min(counts, key=lambda k: (counts[k], k)))
                step = engine.step(request)
                cycles[step.draft_length].append(step)
                for layer, chosen in enumerate(routes):  # a chain is accepted from the front
                    chosen += lookahead.used[layer].topk_ids[: step.accepted + 1].tolist()
                done = number * max_new_tokens + max_new_tokens - request.remaining
                tell("measuring drafts and verifications", done, total)
    finally:
        engine.governor = before
        tell("measuring drafts and verifications", total, total)
    return {k: cycles[k] for k in lengths if cycles[k]}, routes


def figures_of(cycles: dict[int, list[StepStats]]) -> dict[str, Any]:
    """The fields of a profile that cycles tell."""
    verify = tuple(
        (k + 1.0, median(step.verify_s - step.stall_s for step in steps))
        for k, steps in cycles.items()
    )
    distinct = tuple(
        (k + 1.0, fmean(step.requests for step in steps)) for k, steps in cycles.items()
    )
    drafts = [(k, median(step.draft_s for step in steps)) for k, steps in cycles.items() if k]
    base_s, token_s = line_through(drafts)
    tried = sum(min(s.accepted + 1, s.draft_length) for steps in cycles.values() for s in steps)
    stood = sum(step.accepted for steps in cycles.values() for step in steps)
    return {
        "verify": verify,
        "distinct": distinct,
        "draft_base_s": base_s,
        "draft_token_s": token_s,
        "acceptance": stood / tried if tried else None,
    }


def line_through(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope by least squares, neither of them negative; (0, 0) without points."""
    if not points:
        return 0.0, 0.0
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    if not 0 < slope * mean_x <= mean_y:
        return 0.0, mean_y / mean_x
    return mean_y - slope * mean_x, slope


def mean_bytes(runtime: Runtime) -> int:
    """What moves for an expert."""
    return round(mean_moved_bytes(runtime.opened.store))


def source_of(runtime: Runtime) -> ExpertStore:
    """Where reads come from, without what encodes them."""
    store = runtime.opened.store
    return store.words if isinstance(store, EncodingStore) else store


def encodable(runtime: Runtime) -> list[str]:
    """Codecs by which a run on the CPU can encode these experts as it reads them."""
    source = source_of(runtime)
    if runtime.device.type != "cpu" or not isinstance(source, SafetensorsExpertStore):
        return []
    return [name for name in codecs_for(source.codec.shape.dtype) if name != source.codec.name]


def measured_link(runtime: Runtime, tell: Progress, clock: Clock) -> tuple[Points, float]:
    """Bytes per second by size, experts last, and seconds until a first expert is there."""
    store, readers = source_of(runtime), runtime.config.reader_threads
    expert_bytes = mean_bytes(runtime)
    sizes = [size for size in READ_SIZES if size < expert_bytes]
    if runtime.device.type == "cuda":
        every = (*sizes, expert_bytes)
        speeds = {
            size: copy_speed(size, runtime.device, clock)
            for size in tracked("measuring the link", every, len(every), tell)
        }
        points = tuple((float(size), speed) for size, speed in speeds.items())
        first_s = [copied_s(expert_bytes, 1, runtime.device, clock) for _ in range(FIRST_FETCHES)]
        return points, median(first_s)
    arena = arena_for(2 * readers, store.codec.slot_bytes)
    files, plain = expert_files(runtime.opened), []
    for size in tracked("measuring plain reads", sizes, len(sizes), tell):
        sample = plain_reads(files, size, arena, readers, LINK_BYTES, 0, clock)
        plain.append((float(size), sample.payload_bytes / sample.seconds))
    engine = ReaderThreads(fetch_from(store), arena, moved_from(store), Recorder(clock), readers)
    count = store.num_layers * store.num_experts
    batch = min(len(arena), count)

    def fetched_s(first: int, experts: int) -> float:
        start_s = clock()
        tickets = [
            engine.submit(
                ExpertKey(*divmod((first + at) % count, store.num_experts)), at, Priority.DEMAND
            )
            for at in range(experts)
        ]
        for ticket in tickets:
            engine.wait(ticket)
        return clock() - start_s

    try:
        fetched_s(0, batch)  # wakes threads and files
        rounds = max(LINK_BYTES // (batch * expert_bytes), 4)
        spent_s = [
            fetched_s(1 + turn * batch, batch)
            for turn in tracked("measuring reads of experts", range(rounds), rounds, tell)
        ]
        first_s = [fetched_s(7 * turn, 1) for turn in range(FIRST_FETCHES)]
    finally:
        engine.close()
    speed = batch * expert_bytes / median(spent_s)
    return (*plain, (float(expert_bytes), speed)), median(first_s)


def copy_speed(size: int, device: torch.device, clock: Clock) -> float:
    """Bytes per second of copies out of pinned memory, one behind the other."""
    copies = max(LINK_BYTES // size, 4)
    return copies * size / copied_s(size, copies, device, clock)


def copied_s(size: int, copies: int, device: torch.device, clock: Clock) -> float:
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    start_s = clock()
    for _ in range(copies):
        there.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    return clock() - start_s


def random_expert(shape: ExpertShape, generator: torch.Generator) -> Matrices:
    """An expert whose words are spread as trained ones are."""
    gate_up_proj, down_proj = (
        (torch.randn(size, generator=generator) * 0.02).to(shape.dtype)
        for size in (shape.gate_up_shape, shape.down_shape)
    )
    return gate_up_proj, down_proj


def encode_speed(codec: ExpertCodec, readers: int, clock: Clock) -> float:
    """Bytes of words a second that `readers` threads encode together, out of memory."""
    shape = codec.shape
    words = random_expert(shape, torch.Generator().manual_seed(1))
    base = None
    if codec.needs_draft:
        base = Int4Expert.rounded(Int4Layout(shape.hidden_size, shape.expert_width), *words)
    rooms = list(aligned_bytes(readers, codec.slot_bytes))

    def encode(room: torch.Tensor) -> None:
        for _ in range(ENCODED):
            codec.encode(words, base, room)

    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(encode, rooms))  # wakes threads, and takes the memory
        start_s = clock()
        list(pool.map(encode, rooms))
        spent_s = clock() - start_s
    return readers * ENCODED * shape.nbytes / spent_s


@torch.inference_mode()
def compute_speed(runtime: Runtime, codec: ExpertCodec, clock: Clock) -> float:
    """Bytes of words a second at which one token's experts are computed with, out of slots."""
    shape, device = codec.shape, runtime.device
    top_k = runtime.shape.top_k
    held = max(min(LAYER_BYTES // shape.nbytes, runtime.shape.experts.num_experts), 2 * top_k)
    layout = Int4Layout(shape.hidden_size, shape.expert_width)
    arena = Int4Arena(layout, 1, held, device) if codec.needs_draft else None
    generator = torch.Generator().manual_seed(1)
    records = []
    for at in range(held):
        words, base = random_expert(shape, generator), None
        if arena is not None:
            base = Int4Expert.rounded(layout, *words)
            arena.put(at, base)
        record = aligned_bytes(1, codec.slot_bytes)[0]
        nbytes = codec.encode(words, base, record)
        records.append(record[:nbytes].clone())
    codec = codec.holding(max(map(len, records)))
    slots = aligned_bytes(held, codec.slot_bytes, device)
    for slot, record in zip(slots, records, strict=True):
        slot[: len(record)] = record.to(device)
    experts = codec.experts(slots, arena)
    routes = torch.arange(CALLS * top_k, device=device).remainder(held).view(CALLS, 1, top_k)
    table = torch.arange(held, device=device)
    hidden_states = torch.randn(1, shape.hidden_size, generator=generator).to(device, runtime.dtype)
    out = hidden_states.new_empty(1, top_k, shape.hidden_size)

    def call(topk_ids: torch.Tensor) -> float:
        start_s = clock()
        experts.run(0, hidden_states, topk_ids, table, runtime.shape.activation, out)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - start_s

    spent_s = [call(topk_ids) for topk_ids in routes]
    return top_k * shape.nbytes / median(spent_s[1:])
