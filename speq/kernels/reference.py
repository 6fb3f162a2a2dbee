"""Plain torch versions of every kernel, with the same names: readable before fast.

They are the oracle of the tests, and run if there is no native kernel.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

INT4_ZERO_POINT = 8
INT4_MAX = 7
# Factor of the first of two INT4 planes, which hold all numbers from -136 to 119.
PLANE = 16
PLANES_MAX = PLANE * INT4_MAX + INT4_MAX
# Neighbours that share a scale when the INT4 kernels round their inputs to INT8.
INT8_BLOCK = 32
INT8_MAX = 127
# A block below it counts as zero: the inverse of its scale would overflow.
INT8_SMALLEST = 1e-30
# Rows dequantised at a time: a float32 copy of a whole expert would be larger than the expert.
UNPACK_ROWS = 512

# The activation of gpt_oss, and the slope of its sigmoid.
CLAMPED = "clamped"
CLAMP_ALPHA = 1.702
# silu of a gate that is clamped after it.
SILU_BEFORE_LIMIT = "silu_before_limit"

# Activations between an expert's projections, of gate and up [..., F], or of up alone.
ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "swish": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_pytorch_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "relu": lambda gate, up: F.relu(gate) * up,
    CLAMPED: lambda gate, up: (up + 1) * (gate * torch.sigmoid(gate * CLAMP_ALPHA)),
    "relu2": lambda up: F.relu(up).square(),
    SILU_BEFORE_LIMIT: lambda gate, up: gate * up,
}
# Those of experts without a gate.
UNGATED = {"relu2"}
# Activations that a config.json may name; the others belong to families.
HIDDEN_ACTS = tuple(
    name for name in ACTIVATIONS if name not in {CLAMPED, SILU_BEFORE_LIMIT, *UNGATED}
)


class Activation(NamedTuple):
    """What comes between the projections of a layer's experts.

    name   one of ACTIVATIONS
    limit  gate is clamped above it before the activation (SILU_BEFORE_LIMIT: after silu), and up on
           both sides; infinity: neither is. Experts without a gate have none.
    """

    name: str
    limit: float = math.inf

    @property
    def gated(self) -> bool:
        return self.name not in UNGATED


def gate_up_rows(activation: Activation, expert_width: int) -> int:
    """Rows of gate and up in one matrix, of experts with that activation."""
    return 2 * expert_width if activation.gated else expert_width


def activate(activation: Activation, gate_up: Tensor) -> Tensor:
    """Run an activation on gate and up side by side, or up alone: [..., F]."""
    name, limit = activation
    if not activation.gated:
        return ACTIVATIONS[name](gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if name == SILU_BEFORE_LIMIT:
        gate = F.silu(gate)
    if limit <= torch.finfo(gate.dtype).max:  # above it nothing but infinity would be clamped
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ACTIVATIONS[name](gate, up)


def matrices_of(gate_up_proj: Tensor, down_proj: Tensor) -> list[Tensor]:
    """Split an expert, gate_up [2F, H] or up [F, H] and down [H, F], into gate, up and down, or up
    and down.
    """
    return [*gate_up_proj.split(down_proj.shape[1]), down_proj]


def empty_expert(
    hidden_size: int, width: int, activation: Activation, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Allocate the bfloat16 matrices gate_up and down of an expert."""
    shapes = (gate_up_rows(activation, width), hidden_size), (hidden_size, width)
    gate_up, down = (torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
    return gate_up, down


def quantize_int4(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Round a matrix to symmetric INT4, with one scale per `group_size` neighbours of a row.

    weight   [N, K], any float dtype; K a multiple of group_size, group_size even
    returns  qweight [N, K / 2] uint8, two codes per byte, low nibble first, zero point 8; scales
             [N, K / group_size] float16
    """
    groups = weight.float().unflatten(1, (-1, group_size))
    largest = torch.finfo(torch.float16).max
    scales = (groups.abs().amax(2) / INT4_MAX).clamp(max=largest).to(torch.float16)
    # Divide by the scale as stored. If it rounds to zero, so do the weights.
    divisor = scales.float().where(scales > 0, torch.inf)
    codes = (groups / divisor.unsqueeze(2)).round().clamp(-INT4_ZERO_POINT, INT4_MAX)
    codes = (codes + INT4_ZERO_POINT).to(torch.uint8).flatten(1)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales


def quantize_int4_out(weight: Tensor, group_size: int, qweight: Tensor, scales: Tensor) -> None:
    """Run `quantize_int4` into tensors of its results' shapes."""
    for out, result in zip((qweight, scales), quantize_int4(weight, group_size), strict=True):
        out.copy_(result)


def quantize_int4_planes(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Round a matrix to eight bits in two planes of INT4: 16 * high + low, both from -8 to 7.

    weight   [N, K], see `quantize_int4`
    returns  qweight [2N, K / 2] and scales [2N, K / group_size], the high plane over the low one
    """
    groups = weight.float().unflatten(1, (-1, group_size))
    largest = torch.finfo(torch.float16).max / PLANE
    scales = (groups.abs().amax(2) / PLANES_MAX).clamp(max=largest).to(torch.float16)
    divisor = scales.float().where(scales > 0, torch.inf)
    values = (groups / divisor.unsqueeze(2)).round().clamp(-PLANES_MAX, PLANES_MAX).flatten(1)
    high = ((values + INT4_ZERO_POINT) / PLANE).floor()
    codes = torch.cat([high, values - PLANE * high]).add_(INT4_ZERO_POINT).to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), torch.cat([PLANE * scales, scales])


def unpack_int4(qweight: Tensor, scales: Tensor) -> Tensor:
    """Dequantise [N, K / 2] codes and [N, K / group_size] scales to [N, K] float32, exactly."""
    codes = torch.stack([qweight & 0xF, qweight >> 4], dim=2).flatten(1)
    values = (codes.float() - INT4_ZERO_POINT).unflatten(1, (scales.shape[1], -1))
    return (values * scales.float().unsqueeze(2)).flatten(1)


def round_to_int8(inputs: Tensor) -> Tensor:
    """Round rows [R, K] as the INT4 kernels do: INT8 codes times the float32 scale of their block.

    A block is 32 columns, the last one may be fewer; its scale is its largest magnitude / 127. A
    block with an infinity or a NaN is all NaN.
    """
    columns = inputs.shape[1]
    blocks = F.pad(inputs.float(), (0, -columns % INT8_BLOCK)).unflatten(1, (-1, INT8_BLOCK))
    largest = blocks.abs().amax(2, keepdim=True)
    # Tensors on both sides: torch divides a number by a tensor in two roundings instead of one.
    inverse = torch.full_like(largest, INT8_MAX) / largest
    codes = (blocks * inverse).round().where(largest >= INT8_SMALLEST, 0)
    scales = (largest / INT8_MAX).where(largest < torch.inf, torch.nan)
    return (codes * scales).flatten(1)[:, :columns]


def linear_int4_out(
    inputs: Tensor, qweight: Tensor, scales: Tensor, input_perm: Tensor | None, out: Tensor
) -> None:
    """Multiply rows, rounded to INT8, by an INT4 matrix, into `out`.

    inputs      [R, K], any float dtype; computed in float32
    qweight     [N, K / 2] uint8, two codes per byte, low nibble first, zero point 8
    scales      [N, K / group_size] float16
    input_perm  [K] int32 or None: column c of the matrix is for input input_perm[c] (desc_act)
    out         [R, N], any float dtype
    """
    rows = inputs.float()
    if input_perm is not None:
        rows = rows[:, input_perm.long()]
    rows = round_to_int8(rows)
    blocks = zip(
        qweight.split(UNPACK_ROWS),
        scales.split(UNPACK_ROWS),
        out.split(UNPACK_ROWS, dim=1),
        strict=True,
    )
    for codes, steps, target in blocks:
        target.copy_(F.linear(rows, unpack_int4(codes, steps)))


def moe_int4_out(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    base_slots: Tensor,
    gate_up_qweight: Tensor,
    gate_up_scales: Tensor,
    down_qweight: Tensor,
    down_scales: Tensor,
    input_perm: Tensor | None,
    activation: Activation,
    out: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> None:
    """Run rows through INT4 experts and sum them (MoE-SpeQ 3.4.3).

    hidden_states  [T, H]; topk_ids [T, K] int64, topk_weights [T, K] float32
    base_slots     [E] int64: base slot of each expert's codes
    gate_up_*      qweight [N, 2F, H / 2] and scales [N, 2F, H / group_size] of N base slots;
                   without a gate they have F rows, here and below
    down_*         qweight [N, H, F / 2] and scales [N, H, F / group_size]
    input_perm     [N, H] int32 or None: order of inputs of gate_up. (down needs none: rows of
                   gate_up are packed in its order.)
    out            [T, H]; accumulated in float32, over the places of a route in their order
    *_bias         [E, 2F] and [E, H] or None, in any float dtype: added to the projections' outputs

    Raises IndexError if an id names no expert, or its base slot does not exist.
    """
    num_rows, top_k = topk_ids.shape
    check_ids("topk_ids", topk_ids, base_slots.shape[0], "experts of base_slots")
    outputs = torch.empty(num_rows, top_k, out.shape[1], device=out.device)
    for expert in topk_ids.unique().tolist():
        slot = int(base_slots[expert])
        check_ids("base_slots", base_slots[expert], gate_up_qweight.shape[0], "base slots")
        rows, ranks = torch.where(topk_ids == expert)
        gate_up = outputs.new_empty(len(rows), gate_up_qweight.shape[1])
        perm = None if input_perm is None else input_perm[slot]
        linear_int4_out(
            hidden_states[rows], gate_up_qweight[slot], gate_up_scales[slot], perm, gate_up
        )
        inner = activate(activation, add_bias(gate_up, gate_up_bias, expert))
        down = outputs.new_empty(len(rows), out.shape[1])
        linear_int4_out(inner, down_qweight[slot], down_scales[slot], None, down)
        outputs[rows, ranks] = add_bias(down, down_bias, expert)
    out.copy_(combine(outputs, topk_weights, out.dtype))


def linear_out(inputs: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Multiply inputs [R, K] by weight [N, K] and add bias [N], into out [R, N] of their dtype or
    of float32; accumulated in float32.
    """
    inputs, weight = inputs.to(out.dtype), weight.to(out.dtype)
    out.copy_(F.linear(inputs, weight, None if bias is None else bias.to(out.dtype)))


def add_bias(rows: Tensor, biases: Tensor | None, expert: int) -> Tensor:
    """Add an expert's bias, one of [E, N], to rows [R, N]; None: there are none."""
    return rows if biases is None else rows + biases[expert].to(rows.dtype)


def swiglu(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    activation: Activation,
    expert: int = 0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Run one expert: down(act(gate(x)) * up(x)), of x [R, H], gate_up [2F, H] and down [H, F].
    Without a gate, gate_up is up [F, H], and the expert down(act(up(x))).

    expert  index of its biases in [E, 2F] and [E, H], if there are any: each is added to the
            rounded product, as in transformers
    """
    gate_up = add_bias(F.linear(hidden_states, gate_up_proj), gate_up_bias, expert)
    inner = activate(activation, gate_up)
    return add_bias(F.linear(inner, down_proj), down_bias, expert)


def moe_grouped_out(
    hidden_states: Tensor,
    topk_ids: Tensor,
    slot_table: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    activation: Activation,
    out: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> None:
    """Run rows through the exact experts in slots, grouped by expert (MoE-SpeQ 3.4.4).

    hidden_states  [T, H]
    topk_ids       [T, K] int64
    slot_table     [E] int64: the slot of each expert, negative if it is in none
    gate_up_proj   [S, 2F, H] in the checkpoint's dtype; converted, expert by expert, to
    down_proj      [S, H, F]  that of hidden_states
    out            [T, K, H]: row (t, j) is the unweighted output of expert topk_ids[t, j]; rows
                   whose expert is in no slot are not written
    *_bias         [E, 2F] and [E, H] of hidden_states' dtype, or None

    Each product is accumulated in float32 at least, and rounded to the dtype of hidden_states as in
    transformers: after each projection, its bias, and each step of the activation.

    Raises IndexError if an id names no expert, or its slot does not exist.
    """

    def words_of(expert: int, slot: int) -> tuple[Tensor, Tensor]:
        return gate_up_proj[slot], down_proj[slot]

    places = slot_table, gate_up_proj.shape[0]
    biases = gate_up_bias, down_bias
    run_experts(hidden_states, topk_ids, *places, words_of, activation, out, *biases)


def run_experts(
    hidden_states: Tensor,
    topk_ids: Tensor,
    slot_table: Tensor,
    slots: int,
    words_of: Callable[[int, int], tuple[Tensor, ...]],
    activation: Activation,
    out: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> None:
    """Run the experts of a route that are in slots; see `moe_grouped_out`.

    words_of  gate_up_proj and down_proj of an expert in a slot, and the order of inputs if it is
              not that of hidden_states
    """
    check_ids("topk_ids", topk_ids, slot_table.shape[0], "experts of slot_table")
    for expert in topk_ids.unique().tolist():
        slot = int(slot_table[expert])
        if slot < 0:
            continue
        check_ids("slot_table", slot_table[expert], slots, "slots")
        rows, ranks = torch.where(topk_ids == expert)
        gate_up, down, *order = words_of(expert, slot)
        inputs = hidden_states[rows]
        for columns in order:
            inputs = inputs[:, columns.long()]
        gate_up, down = gate_up.to(inputs.dtype), down.to(inputs.dtype)
        biases = gate_up_bias, down_bias
        out[rows, ranks] = swiglu(inputs, gate_up, down, activation, expert, *biases)


def grouped_records(decode: Callable[..., None], numbers: int) -> Callable[..., None]:
    """Make a `moe_grouped_*`: `moe_grouped_out` over records in slots [S, slot_bytes] uint8.

    decode   decodes one, behind so many numbers of its format
    numbers  which the op takes behind expert_width
    """

    def run(
        hidden_states: Tensor,
        topk_ids: Tensor,
        slot_table: Tensor,
        slots: Tensor,
        expert_width: int,
        *arguments: Any,
    ) -> None:
        own, (activation, *others) = arguments[:numbers], arguments[numbers:]

        def words_of(expert: int, slot: int) -> tuple[Tensor, Tensor]:
            words = empty_expert(hidden_states.shape[1], expert_width, activation, slots.device)
            decode(slots[slot], *own, *words)
            return words

        places = slot_table, len(slots)
        run_experts(hidden_states, topk_ids, *places, words_of, activation, *others)

    return run


def combine(outputs: Tensor, topk_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Weighted sum over the experts of each route: [T, K, H], [T, K] -> [T, H].

    Accumulated in float32 at least, in the order of the route and not in that of loading, so the
    result does not depend on which experts were in slots.
    """
    wide = torch.promote_types(outputs.dtype, torch.float32)
    return (outputs.to(wide) * topk_weights.to(wide).unsqueeze(2)).sum(1).to(dtype)


def read_sum_out(words: Tensor, out: Tensor) -> None:
    """Write the sum of words [N] int64, wrapped to 64 bits, to out [1].

    It is a plain read of memory, to measure the other kernels against.
    """
    out.copy_(words.sum())


def check_ids(name: str, ids: Tensor, count: int, what: str) -> None:
    """Raise an IndexError that names the argument if ids are outside [0, count)."""
    wrong = ids[(ids < 0) | (ids >= count)]
    if wrong.numel():
        raise IndexError(f"{name} holds {int(wrong.flatten()[0])}; there are {count} {what}")
