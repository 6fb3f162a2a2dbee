"""The least times that a machine can take for a model, of shapes and of measured rates alone."""

from dataclasses import dataclass

from speq.bench.shapes.routes import clairvoyant_misses, routes_of
from speq.models.shape import ModelShape

# Bits of a bfloat16 weight in the best codec: eleven and a third, as records of trained and of
# random weights take.
LOSSLESS_BITS = 11.3
WORD_BYTES = 2


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Measured in the run itself.

    memory_bytes_per_s  of a plain read
    link_bytes_per_s    of experts from the disk into slots
    flops_per_s         of a product of large bfloat16 matrices
    """

    memory_bytes_per_s: float
    link_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Floor:
    """Least times and bytes.

    token_s      of an output token at a context
    prompt_s     of a prompt of as many tokens
    moved_bytes  for an output token, by a cache that knows the future
    """

    token_s: float
    prompt_s: float
    moved_bytes: float


def floor_of(shape: ModelShape, budget_bytes: float, context: int, rates: MachineRates) -> Floor:
    """The floor under a budget.

    A token reads all dense weights, the experts that it chooses and its KV, from memory; experts
    that no slot holds come over the link meanwhile. A prompt computes with as many weights for each
    of its tokens, and every expert comes once.
    """
    expert = 3 * shape.experts.expert_width * shape.hidden_size
    moe_layers, experts = len(shape.experts.layers), shape.experts.num_experts
    packed = LOSSLESS_BITS / 8
    vocabulary = shape.vocab_size * shape.hidden_size
    dense = sum(rows * columns for rows, columns in shape.dense) + sum(shape.other_sizes)
    # One row of the embedding is read, and all of the head.
    read = dense - (0 if shape.tied else vocabulary)
    chosen = moe_layers * shape.top_k * expert
    kv_bytes = context * WORD_BYTES * kv_elements(shape)
    slots = (budget_bytes - dense * packed - kv_bytes) / (moe_layers * expert * packed)
    held = min(max(int(slots), 0), experts)
    routes = routes_of(experts, shape.top_k)
    misses = 0.0 if held == experts else moe_layers * clairvoyant_misses(routes, held)
    moved = misses * expert * packed
    memory_s = ((read + chosen) * packed + kv_bytes) / rates.memory_bytes_per_s
    flops = 2 * context * (read - vocabulary + chosen) + attention_flops(shape, context)
    absent = (experts - held) * moe_layers * expert * packed
    return Floor(
        max(memory_s, moved / rates.link_bytes_per_s),
        max(flops / rates.flops_per_s, absent / rates.link_bytes_per_s),
        moved,
    )


def kv_elements(shape: ModelShape) -> int:
    """Of one token, in all layers."""
    (key_heads, key_width), (value_heads, value_width) = shape.attention.kv_shapes
    return shape.num_layers * (key_heads * key_width + value_heads * value_width)


def attention_flops(shape: ModelShape, context: int) -> float:
    """Of a prompt: each query with half of the keys and values."""
    return 2.0 * shape.num_layers * context * context * shape.attention.query_width
