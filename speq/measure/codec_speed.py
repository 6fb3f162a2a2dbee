"""Measures how fast codecs encode experts, and how fast kernels compute with them in slots.

Speeds are bytes of an expert's uncompressed weights per second, whatever the record's size.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from statistics import median

import torch
from torch import Tensor

from speq.experts.codec import ExpertCodec, Matrices
from speq.experts.int4 import Int4Arena, Int4Expert, Int4Layout
from speq.experts.random_expert import random_expert
from speq.experts.slots import SlotExperts
from speq.files.alignment import allocate_aligned
from speq.governor.roofline import Points
from speq.kernels import library
from speq.kernels.grouping import Grouping
from speq.kernels.ops import Activation
from speq.models.shape import ModelShape
from speq.units import Clock

# Weights of the layer that calls are timed on: more than caches hold.
LAYER_BYTES = 192 << 20
CALLS = 24
# Of an expert that a GPU's host computes.
HOST_ROWS = (1, 2, 4, 8, 16)
# Experts that each thread encodes.
ENCODED = 8


def encode_bytes_per_s(codec: ExpertCodec, readers: int, clock: Clock) -> float:
    """Speed at which `readers` threads together encode experts from memory."""
    shape = codec.shape
    words = random_expert(shape, torch.Generator().manual_seed(1))
    base = None
    if codec.needs_draft:
        layout = Int4Layout(shape.hidden_size, shape.expert_width, gated=shape.gated)
        base = Int4Expert.round(layout, *words)
    rooms = list(allocate_aligned(readers, codec.slot_bytes))

    def encode(room: Tensor) -> None:
        for _ in range(ENCODED):
            codec.encode(words, base, room)

    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(encode, rooms))  # wakes threads, and takes the memory
        start_s = clock()
        list(pool.map(encode, rooms))
        spent_s = clock() - start_s
    return readers * ENCODED * shape.nbytes / spent_s


@torch.inference_mode()
def compute_bytes_per_s(
    codec: ExpertCodec, model: ModelShape, device: torch.device, dtype: torch.dtype, clock: Clock
) -> float:
    """Speed of one token's experts in slots of a layer of the model's shape."""
    shape, top_k = codec.shape, model.top_k
    held = max(min(LAYER_BYTES // shape.nbytes, model.experts.num_experts), 2 * top_k)
    layout = Int4Layout(shape.hidden_size, shape.expert_width, gated=shape.gated)
    arena = Int4Arena(layout, 1, held, device) if codec.needs_draft else None
    generator = torch.Generator().manual_seed(1)

    def pairs() -> Iterator[tuple[Matrices, Int4Expert | None]]:
        for at in range(held):
            words, base = random_expert(shape, generator), None
            if arena is not None:
                base = Int4Expert.round(layout, *words)
                arena.put(at, base)
            yield words, base

    experts = in_slots(codec, pairs(), arena, device)
    routes = torch.arange(CALLS * top_k, device=device).remainder(held).view(CALLS, 1, top_k)
    hidden_states = torch.randn(1, shape.hidden_size, generator=generator).to(device, dtype)
    spent_s = [
        pass_s(experts, held, hidden_states, topk_ids, model.activation, clock)
        for topk_ids in routes
    ]
    return top_k * shape.nbytes / median(spent_s[1:])


@torch.inference_mode()
def host_expert_points(
    codec: ExpertCodec, model: ModelShape, dtype: torch.dtype, clock: Clock
) -> Points:
    """Seconds of one expert on the processor, by its rows, in the order of sums that it shares with
    a GPU. Experts are taken in turns, so that caches hold none.
    """
    shape, cpu = codec.shape, torch.device("cpu")
    held = max(LAYER_BYTES // shape.nbytes, 2)
    generator = torch.Generator().manual_seed(1)
    pairs = ((random_expert(shape, generator), None) for _ in range(held))
    experts = in_slots(codec, pairs, None, cpu)
    turns, points = cycle(range(held)), []
    with library.ordered_sums():
        for rows in HOST_ROWS:
            hidden_states = torch.randn(rows, shape.hidden_size, generator=generator).to(dtype)
            spent_s = [
                pass_s(
                    *(experts, held, hidden_states, torch.full((rows, 1), expert)),
                    *(model.activation, clock),
                )
                for expert in islice(turns, CALLS)
            ]
            points.append((float(rows), median(spent_s[1:])))
    return tuple(points)


def in_slots(
    codec: ExpertCodec,
    pairs: Iterable[tuple[Matrices, Int4Expert | None]],
    arena: Int4Arena | None,
    device: torch.device,
) -> SlotExperts:
    """Put experts in slots as large as the largest record; pairs: (weights, INT4 codes or None).

    arena  all experts' codes, if the codec needs a draft
    """
    room = allocate_aligned(1, codec.slot_bytes)[0]
    records = [room[: codec.encode(words, base, room)].clone() for words, base in pairs]
    codec = codec.with_slot_bytes(max(map(len, records)))
    slots = allocate_aligned(len(records), codec.slot_bytes, device)
    for slot, record in zip(slots, records, strict=True):
        slot[: len(record)] = record.to(device)
    return codec.experts(slots, arena)


def pass_s(
    experts: SlotExperts,
    num_experts: int,
    hidden_states: Tensor,
    topk_ids: Tensor,
    activation: Activation,
    clock: Clock,
) -> float:
    """Time one pass through the experts of layer 0, where expert n is in slot n.

    hidden_states [T, H], topk_ids [T, K] of `num_experts`
    """
    table = torch.arange(num_experts, device=hidden_states.device)
    slots = {expert: expert for expert in range(num_experts)}
    grouping = Grouping.of(topk_ids, topk_ids.cpu())
    out = hidden_states.new_empty(*topk_ids.shape, hidden_states.shape[1])
    start_s = clock()
    experts.run(0, hidden_states, grouping, slots, table, activation, out)
    if hidden_states.device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start_s
