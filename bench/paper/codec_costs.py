"""How much memory and time an exact expert takes with each codec."""

import contextlib
import time
from collections.abc import Mapping
from statistics import median

import torch

from speq.bench.paper.candidates import CodecCost
from speq.drafts.draft_source import open_draft
from speq.errors import SpeqError
from speq.experts.codec import ExpertCodec, codec_of
from speq.experts.draft_codes import DraftSource
from speq.experts.expert_store import expert_slot, mean_moved_bytes, read_matrices
from speq.experts.int4 import Int4Arena
from speq.experts.packed_store import PackedExpertStore
from speq.files.alignment import allocate_aligned
from speq.measure.codec_speed import in_slots, pass_s
from speq.measure.report import Column
from speq.models.opened import Opened, open_model
from speq.units import Clock, Progress, format_bytes

# Experts whose arithmetic is timed together, and how often.
SAMPLE, ROUNDS = 8, 15
COLUMNS: dict[str, Column] = {
    "codec": ("codec", "{}"),
    "bits a weight": ("bits_per_weight", "{:.2f}"),
    "record, mean": ("moved_bytes", format_bytes),
    "slot": ("slot_bytes", format_bytes),
    "compute, of raw's": ("compute", "{:.2f}"),
}


# Of plain words; others are what a model is published in.
COMPARED = ("raw", "lossless", "residual")


def measure(
    stores: Mapping[str, str], progress: Progress | None = None, clock: Clock = time.perf_counter
) -> dict[str, CodecCost]:
    """Every codec, by name.

    stores  the model by codec: sizes are those of packed stores where there are any, and otherwise
            of all the raw model's experts, encoded, residuals over the draft it has by itself

    Raises SpeqError where stores are not of one model, or its experts have no such codes.
    """
    with contextlib.ExitStack() as stack:
        opened = {name: stack.enter_context(contextlib.closing(open_model(folder)))
                  for name, folder in stores.items()}  # fmt: skip
        check_same(opened, stores)
        raw = opened["raw"]
        draft = stack.enter_context(contextlib.closing(
            open_draft("auto", raw.checkpoint, raw.store, raw.shape.experts)
        ))  # fmt: skip
        sizes = {name: _packed_sizes(each) for name, each in opened.items()}
        shape = raw.store.codec.shape
        codecs = {name: codec_of(name, shape) for name in COMPARED}
        missing = {name: codec for name, codec in codecs.items() if name not in sizes}
        sizes |= encoded_sizes(raw, draft, missing, progress)
        compute = compute_ratios(raw, draft, codecs, clock)
    return {name: CodecCost(name, shape.weights, *sizes[name], compute[name]) for name in codecs}


def check_same(opened: Mapping[str, Opened], stores: Mapping[str, str]) -> None:
    """Raise SpeqError unless each store has its codec and was packed from the same checkpoint."""
    source = _source(opened["raw"])
    for name, each in opened.items():
        if each.store.codec.name != name:
            raise SpeqError(
                f"{stores[name]} has codec {each.store.codec.name}; give one with codec {name}"
            )
        if _source(each) != source:
            raise SpeqError(
                f"{stores[name]} was not packed from the checkpoint of {stores['raw']}; pack that "
                "one, so that all systems run the same model"
            )


def _source(opened: Opened) -> str:
    store = opened.store
    if isinstance(store, PackedExpertStore):
        return store.manifest.source
    return opened.checkpoint.fingerprint()


def _packed_sizes(opened: Opened) -> tuple[int, int]:
    """(slot_bytes, moved_bytes)"""
    return opened.store.codec.slot_bytes, round(mean_moved_bytes(opened.store))


def encoded_sizes(
    raw: Opened,
    draft: DraftSource,
    codecs: Mapping[str, ExpertCodec],
    progress: Progress | None,
) -> dict[str, tuple[int, int]]:
    """(slot_bytes, moved_bytes) of every expert of a model, encoded."""
    store = raw.store
    count = store.num_layers * store.num_experts
    sizes: dict[str, list[int]] = {name: [] for name in codecs}
    slot = expert_slot(store)
    rooms = {name: allocate_aligned(1, codec.slot_bytes)[0] for name, codec in codecs.items()}
    for at in range(count if codecs else 0):
        exact, base = read_matrices(store, *divmod(at, store.num_experts), slot), draft.expert(at)
        for name, codec in codecs.items():
            sizes[name].append(codec.encode(exact, base, rooms[name]))
        if progress is not None:
            progress("encoding experts", at + 1, count)
    return {
        name: (codec.residency_plan(max(sizes[name])).slot_bytes, round(sum(sizes[name]) / count))
        for name, codec in codecs.items()
    }


def compute_ratios(
    raw: Opened, draft: DraftSource, codecs: Mapping[str, ExpertCodec], clock: Clock
) -> dict[str, float]:
    """Time of one token's pass through some experts of the first layer, of that of raw ones.

    Codecs are timed one after the other within a round; medians of the rounds' ratios.
    """
    store = raw.store
    count = min(SAMPLE, store.num_experts)
    device = torch.device("cpu")
    exact = [read_matrices(store, 0, at, expert_slot(store)) for at in range(count)]
    bases = [draft.expert(at) for at in range(count)]
    arena = Int4Arena(draft.layout, 1, count, device)
    for at, base in enumerate(bases):
        arena.put(at, base)
    held = {
        name: in_slots(codec, zip(exact, bases, strict=True), arena, device)
        for name, codec in codecs.items()
    }
    shape, topk_ids = store.codec.shape, torch.arange(count).view(1, count)
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(1, shape.hidden_size, generator=generator).to(shape.dtype)
    times: dict[str, list[float]] = {name: [] for name in held}
    for _ in range(ROUNDS):
        for name, experts in held.items():
            spent_s = pass_s(experts, count, hidden_states, topk_ids, raw.shape.activation, clock)
            times[name].append(spent_s)
    return {
        name: median(one / plain for one, plain in zip(mine, times["raw"], strict=True))
        for name, mine in times.items()
    }
