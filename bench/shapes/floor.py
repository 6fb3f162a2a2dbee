"""The least that tokens can take on a machine, from shapes and measured rates alone.

A token reads the weights outside the experts, those of its experts and the KV of its context from
memory, in the fewest bits that there is a codec for. Experts that a clairvoyant cache misses come
over the link meanwhile. A prompt computes its products at the rate of the machine's matrices.
"""

import time
from dataclasses import dataclass

import torch

from speq.bench.shapes.checkpoint import ShapedModel
from speq.bench.shapes.routes import clairvoyant_misses, drawn_routes, popularity
from speq.config import DEFAULT_READER_THREADS
from speq.experts.codec import LosslessCodec
from speq.kernels.many_rows import has_native_product
from speq.measure.link import long_link_bytes_per_s
from speq.measure.memory_read import READ_BYTES, MemoryRead, step_times
from speq.models.attention import elements
from speq.models.bounds import EMBEDDING
from speq.models.opened import Opened

# Routes that a clairvoyant cache is tried on.
TOKENS = 384
MATRIX, TIMES = 2048, 9
CPU = torch.device("cpu")
WORD_BYTES = 2


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """A machine's rates. flops_per_s: of products of large matrices in bfloat16, or in float32
    where torch has no kernels for bfloat16
    """

    memory_bytes_per_s: float
    link_bytes_per_s: float
    flops_per_s: float

    @classmethod
    def of(cls, opened: Opened) -> "MeasuredRates":
        """Measure this machine's, the fastest of a few, and the link to the model's experts."""
        read, matrix = MemoryRead(READ_BYTES["cpu"], CPU), torch.randn(MATRIX, MATRIX)
        if has_native_product(torch.bfloat16):
            matrix = matrix.bfloat16()

        def multiply() -> None:
            torch.mm(matrix, matrix)

        read_s, multiply_s = (
            min(step_times([step] * TIMES, CPU, time.perf_counter)) for step in (read, multiply)
        )
        link = long_link_bytes_per_s(opened.store, DEFAULT_READER_THREADS)
        return cls(read.nbytes / read_s, link, 2 * MATRIX**3 / multiply_s)


@dataclass(frozen=True, slots=True)
class Floor:
    """What a token and a prompt take at least. read_bytes: of memory; moved_bytes: over the link"""

    read_bytes: float
    moved_bytes: float
    tpot_s: float
    ttft_s: float


def floor_of(model: ShapedModel, rates: MeasuredRates, budget_bytes: int, context: int) -> Floor:
    """Compute the floor of a token behind a context, and of a prompt as long."""
    shape = model.model_spec.shape
    experts, layers = shape.experts, len(shape.experts.layers)
    held = HeldBytes.of(model)
    kept = [each for each in map(elements, shape.kv_layers) if each]
    kv_bytes = sum(
        each * min(context, window) * WORD_BYTES
        for each, window in zip(kept, windows(model), strict=True)
    )
    slots = max((budget_bytes - held.dense - kv_bytes) / held.expert, 0.0)
    read_bytes = held.read_dense + layers * shape.top_k * held.expert + kv_bytes
    of_layer = min(int(-(-slots // layers)), experts.num_experts)
    routes = drawn_routes(experts.num_experts, shape.top_k, TOKENS, model.seed)
    moved_bytes = layers * clairvoyant_misses(routes, of_layer) * held.expert
    tpot_s = max(read_bytes / rates.memory_bytes_per_s, moved_bytes / rates.link_bytes_per_s)

    embedding = shape.embedding[0] * shape.embedding[1]
    of_token = shape.resident_weights - embedding * (1 if shape.tied else 2)
    of_token += layers * shape.top_k * experts.weights
    flops = 2 * of_token * context + sum(
        2 * attended_pairs(context, window) * attention_width(model) for window in windows(model)
    )
    chosen = popularity(experts.num_experts, shape.top_k)
    distinct = layers * float((1 - (1 - chosen) ** context).sum())
    loaded_bytes = max(distinct - slots, 0.0) * held.expert
    whole_bytes = held.read_dense + distinct * held.expert
    ttft_s = max(
        flops / rates.flops_per_s,
        whole_bytes / rates.memory_bytes_per_s,
        loaded_bytes / rates.link_bytes_per_s,
    )
    return Floor(read_bytes, moved_bytes, tpot_s, ttft_s)


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Bytes of weights in the fewest bits: words lossless, and codes as published.

    expert      of one
    dense       of all tensors outside the experts; read_dense: of those that each token reads
    """

    expert: float
    dense: float
    read_dense: float

    @classmethod
    def of(cls, model: ShapedModel) -> "HeldBytes":
        experts, tied = model.model_spec.shape.experts, model.model_spec.shape.tied
        lossless = (LosslessCodec.usual_bits or 16.0) / 16
        of_experts = dense = rows = 0.0
        for tensor in model.tensors:
            held = tensor.nbytes * (lossless if tensor.dtype == torch.bfloat16 else 1.0)
            if experts.names.is_expert(tensor.name):
                of_experts += held
                continue
            dense += held
            if EMBEDDING.search(tensor.name) and not tied:
                rows += held
        return cls(of_experts / len(experts.layers) / experts.num_experts, dense, dense - rows)


def windows(model: ShapedModel) -> list[float]:
    """Tokens that each layer with KV attends over at most."""
    shape, window = model.model_spec.shape, model.text.get("sliding_window")
    kinds = (
        kind for layer, kind in enumerate(model.layer_types) if layer not in shape.states.layers
    )
    return [
        window if window and kind == "sliding_attention" else float("inf")
        for kind, kv_shapes in zip(kinds, shape.kv_layers, strict=True)
        if elements(kv_shapes)
    ]


def attended_pairs(context: int, window: float) -> float:
    """Pairs of a token and one that it sees, itself included."""
    seen = min(context, window)
    return seen * (seen + 1) / 2 + (context - seen) * seen


def attention_width(model: ShapedModel) -> int:
    """Widths of all heads' keys and values together, as a prompt computes them."""
    config = model.text
    heads = int(config["num_attention_heads"])
    if "kv_lora_rank" in config:
        keys = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        return heads * int(keys + config["v_head_dim"])
    return heads * 2 * int(config.get("head_dim") or config["hidden_size"] // heads)
