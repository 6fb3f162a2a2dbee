"""The ops for their callers: arguments are checked once, here, and outputs allocated.

`speq.kernels.library` chooses what runs them. `speq.kernels.reference` defines what they compute.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speq.kernels import library, many_rows, reference
from speq.kernels.checks import (
    EXACT_DTYPES,
    FLOAT_DTYPES,
    activation_numbers,
    check_int4,
    check_rows,
    check_tensor,
)
from speq.kernels.grouping import Grouping
from speq.kernels.reference import (
    ACTIVATIONS,
    CLAMP_ALPHA,
    CLAMPED,
    HIDDEN_ACTS,
    SILU_BEFORE_LIMIT,
    UNGATED,
    Activation,
    activate,
    combine,
    gate_up_rows,
    matrices_of,
    quantize_int4_planes,
    unpack_int4,
)

__all__ = [
    "ACTIVATIONS",
    "CLAMPED",
    "CLAMP_ALPHA",
    "HIDDEN_ACTS",
    "SILU_BEFORE_LIMIT",
    "UNGATED",
    "Activation",
    "ExpertBiases",
    "Int4Pair",
    "Int4Slots",
    "Int4Weight",
    "PlainExpert",
    "activate",
    "combine",
    "gate_up_rows",
    "linear",
    "linear_int4",
    "linear_of",
    "linear_rows",
    "matrices_of",
    "moe_by_expert",
    "moe_grouped",
    "moe_int4",
    "moe_int4_unfused",
    "pair_of",
    "quantize_int4",
    "quantize_int4_planes",
    "read_sum",
    "row_blocks",
    "run_grouped",
    "unpack_int4",
]

# Most rows of the native dense product: enough for a draft's tree and the pending token, whose rows
# are then independent of one another. torch's product is made for more.
MAX_LINEAR_ROWS = 64

# Codes of a matrix: (qweight [N, K / 2] uint8, scales [N, K / group_size] float16).
Int4Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Int4Slots:
    """INT4 experts in N base slots. The constructor checks shapes; without a gate, gate_up has F
    rows.

    gate_up     (qweight [N, 2F, H / 2] uint8, scales [N, 2F, H / group_size] float16)
    down        (qweight [N, H, F / 2] uint8, scales [N, H, F / group_size] float16)
    input_perm  [N, H] int32 or None: order of inputs of gate_up (desc_act). For down, rows of
                gate_up are packed in the order of down's inputs.
    """

    gate_up: Int4Pair
    down: Int4Pair
    input_perm: Tensor | None = None

    def __post_init__(self) -> None:
        slots = self.gate_up[0].shape[0]
        for name, pair in (("gate_up", self.gate_up), ("down", self.down)):
            for part, tensor, dtype in zip(
                ("qweight", "scales"), pair, (torch.uint8, torch.float16), strict=True
            ):
                check_tensor(f"{name}_{part}", tensor, (slots, None, None), (dtype,), self.device)
        hidden_size, rows = self.down[0].shape[1], self.gate_up[0].shape[1]
        width = rows if rows == 2 * self.down[0].shape[2] else rows // 2
        check_int4("gate_up", *self.gate_up, rows if rows == width else 2 * width, hidden_size)
        check_int4("down", *self.down, hidden_size, width)
        if self.input_perm is not None:
            shape = (slots, hidden_size)
            check_tensor("input_perm", self.input_perm, shape, (torch.int32,), self.device)
            if not _is_index(self.input_perm, hidden_size):
                raise ValueError(f"input_perm has inputs outside the {hidden_size} there are")

    @property
    def device(self) -> torch.device:
        return self.gate_up[0].device

    @property
    def hidden_size(self) -> int:
        return self.down[0].shape[1]

    @property
    def expert_width(self) -> int:
        return self.down[0].shape[2] * 2

    def gate_up_rows(self, activation: Activation) -> int:
        """Rows of gate_up. Raises ValueError if an activation is of experts with other rows."""
        rows = self.gate_up[0].shape[1]
        if rows != gate_up_rows(activation, self.expert_width):
            raise ValueError(f"activation {activation!r} is not of experts of that shape")
        return rows

    def expert(self, base_slot: int) -> tuple[Int4Pair, Int4Pair, Tensor | None]:
        """View gate_up, down and input_perm of one base slot."""
        gate_up, down = ((q[base_slot], s[base_slot]) for q, s in (self.gate_up, self.down))
        return gate_up, down, None if self.input_perm is None else self.input_perm[base_slot]


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """One INT4 matrix [N, K]. The constructor checks it, so products need not.

    qweight     [N, K / 2] uint8; scales [N, K / group_size] float16
    input_perm  [K] int32 or None: column c is for input input_perm[c] (desc_act)
    """

    qweight: Tensor
    scales: Tensor
    input_perm: Tensor | None = None

    def __post_init__(self) -> None:
        device, columns = self.qweight.device, self.columns
        check_tensor("qweight", self.qweight, (None, None), (torch.uint8,), device)
        check_tensor("scales", self.scales, (None, None), (torch.float16,), device)
        check_int4("", self.qweight, self.scales, self.outputs, columns)
        if self.input_perm is not None:
            check_tensor("input_perm", self.input_perm, (columns,), (torch.int32,), device)
            if not _is_index(self.input_perm, columns):
                raise ValueError(f"input_perm has inputs outside the {columns} there are")

    def to(self, device: torch.device) -> "Int4Weight":
        perm = self.input_perm
        return Int4Weight(
            self.qweight.to(device),
            self.scales.to(device),
            None if perm is None else perm.to(device),
        )

    @property
    def outputs(self) -> int:
        return self.qweight.shape[0]

    @property
    def columns(self) -> int:
        return 2 * self.qweight.shape[-1]

    @property
    def nbytes(self) -> int:
        parts = (self.qweight, self.scales, self.input_perm)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class ExpertBiases:
    """Biases of a layer's experts: gate_up [E, 2F], gate before up, and down [E, H].

    Both have the dtype of the rows that they are added to.
    """

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class PlainExpert:
    """One exact expert in plain weights.

    gate_up_proj  [2F, H], gate over up, and down_proj [H, F], in any float dtype
    input_perm    [H] int32 or None: column c of gate_up_proj is for input input_perm[c] (desc_act)
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    input_perm: Tensor | None = None


def linear(
    inputs: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Multiply inputs [..., K] by weight [N, K] and add bias [N]: [..., N], all in one dtype.

    dtype  of the results: float32, or that of inputs; None: the latter

    The native kernel runs few rows on the CPU, which are bound by reading the weights. Its rows do
    not depend on one another. torch runs more rows, other devices and float64.
    """
    shape = inputs.shape
    rows = shape[0] if len(shape) == 2 else math.prod(shape[:-1])
    few = 0 < rows <= MAX_LINEAR_ROWS and inputs.is_cpu
    if not few or inputs.dtype not in EXACT_DTYPES or weight.dtype != inputs.dtype:
        if dtype is not None:
            inputs, weight = inputs.to(dtype), weight.to(dtype)
        return many_rows.linear(inputs, weight, bias)
    out = inputs.new_empty(rows, weight.shape[0], dtype=dtype)
    if len(shape) == 2 and inputs.is_contiguous():
        library.call("linear", inputs, weight, bias, out)
        return out
    library.call("linear", inputs.reshape(rows, shape[-1]), weight, bias, out)
    return out.view(*shape[:-1], -1)


def linear_rows(tensor: Tensor) -> int:
    """Most rows of dense products that native kernels run on the device of a tensor."""
    return min(MAX_LINEAR_ROWS, library.kernels_for(tensor).max_rows)


def quantize_int4(weight: Tensor, group_size: int) -> Int4Pair:
    """Run `reference.quantize_int4` on a matrix [N, K] of finite values.

    The native kernel runs contiguous matrices on the CPU. torch runs others, and float64.
    """
    if not weight.is_cpu or not weight.is_contiguous() or weight.dtype not in EXACT_DTYPES:
        return reference.quantize_int4(weight, group_size)
    rows, columns = weight.shape
    qweight = torch.empty(rows, columns // 2, dtype=torch.uint8)
    scales = torch.empty(rows, columns // group_size, dtype=torch.float16)
    library.call("quantize_int4", weight, group_size, qweight, scales)
    return qweight, scales


def linear_int4(
    inputs: Tensor, qweight: Tensor, scales: Tensor, input_perm: Tensor | None = None
) -> Tensor:
    """Run `reference.linear_int4_out` into a new tensor [R, N] of inputs' dtype; see there for
    shapes.

    Raises ValueError, naming the argument, for any other dtype, shape, device or layout.
    """
    check_tensor("inputs", inputs, (None, None), FLOAT_DTYPES, qweight.device)
    check_int4("", qweight, scales, qweight.shape[0], inputs.shape[1])
    return linear_of(inputs, Int4Weight(qweight, scales, input_perm), inputs.dtype)


def linear_of(inputs: Tensor, weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """Multiply inputs [R, K], contiguous, of any float dtype, by an INT4 matrix: [R, N] of `dtype`.

    Nothing is checked: a draft calls it for each layer, token by token.
    """
    qweight, scales, perm = weight.qweight, weight.scales, weight.input_perm
    out = inputs.new_empty(inputs.shape[0], qweight.shape[0], dtype=dtype)
    blocks = [(inputs, out)] if inputs.shape[0] == 1 else row_blocks(1, inputs, out)
    for rows, target in blocks:
        library.call("linear_int4", rows, qweight, scales, perm, target)
    return out


def moe_int4(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    base_slots: Tensor,
    experts: Int4Slots,
    activation: Activation,
    biases: ExpertBiases | None = None,
) -> Tensor:
    """Run `reference.moe_int4_out` into a new tensor [T, H] of hidden_states' dtype; see there for
    shapes.

    Raises ValueError, naming the argument, for any other dtype, shape, device or layout, and
    IndexError for ids out of range; on a GPU, which is not waited for, their rows are NaN.
    """
    device = hidden_states.device
    check_tensor("hidden_states", hidden_states, (None, experts.hidden_size), FLOAT_DTYPES, device)
    _check_route(topk_ids, topk_weights, hidden_states)
    check_tensor("base_slots", base_slots, (None,), (torch.int64,), device)
    if experts.device != device:
        raise ValueError(f"the INT4 experts are on {experts.device} and hidden_states on {device}")
    numbers = activation_numbers(activation)
    outputs = experts.gate_up_rows(activation)
    added: tuple[Tensor, ...] = pair_of(biases, hidden_states, base_slots, outputs)
    if hidden_states.dtype == torch.float64:
        added = tuple(bias.float() for bias in added)
    weights = topk_weights.float()
    out = torch.empty_like(hidden_states)
    top_k = topk_ids.shape[1]
    for rows, ids, part, target in row_blocks(top_k, hidden_states, topk_ids, weights, out):
        library.call(
            "moe_int4",
            rows,
            ids,
            part,
            base_slots,
            *experts.gate_up,
            *experts.down,
            experts.input_perm,
            *numbers,
            target,
            *added,
        )
    return out


def moe_int4_unfused(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    base_slots: Tensor,
    experts: Int4Slots,
    activation: Activation,
    biases: ExpertBiases | None = None,
) -> Tensor:
    """Compute `moe_int4` with one `linear_int4` for each expert and projection.

    It is the baseline of MoE-SpeQ's Figure 12 and of its ablation.
    """
    _check_route(topk_ids, topk_weights, hidden_states)
    reference.check_ids("topk_ids", topk_ids, base_slots.shape[0], "experts of base_slots")
    outputs = hidden_states.new_empty(*topk_ids.shape, hidden_states.shape[1], dtype=torch.float32)
    inputs = hidden_states.float()
    of_gate_up, of_down = (None, None) if biases is None else (biases.gate_up, biases.down)
    for expert in topk_ids.unique().tolist():
        slot = int(base_slots[expert])
        rows, ranks = torch.where(topk_ids == expert)
        perm = None if experts.input_perm is None else experts.input_perm[slot]
        codes, scales = experts.gate_up
        gate_up = linear_int4(inputs[rows], codes[slot], scales[slot], perm)
        inner = activate(activation, reference.add_bias(gate_up, of_gate_up, expert))
        codes, scales = experts.down
        down = linear_int4(inner, codes[slot], scales[slot])
        outputs[rows, ranks] = reference.add_bias(down, of_down, expert)
    return combine(outputs, topk_weights, hidden_states.dtype)


def moe_grouped(
    hidden_states: Tensor,
    topk_ids: Tensor,
    slot_table: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    activation: Activation,
    out: Tensor,
    biases: ExpertBiases | None = None,
) -> None:
    """Run `reference.moe_grouped_out`; see there for shapes. The reference runs float64 rows; only
    tests use them.

    A GPU's kernel takes few rows, so more go in blocks. `moe_by_expert` is faster for very many.

    Raises ValueError, naming the argument, for any other dtype, shape, device or layout, and
    IndexError for ids out of range; on a GPU, which is not waited for, their rows are NaN.
    """
    check_rows(hidden_states, topk_ids, slot_table, out)
    hidden_size, device = hidden_states.shape[1], hidden_states.device
    dtypes = FLOAT_DTYPES if hidden_states.dtype == torch.float64 else EXACT_DTYPES
    check_tensor(
        "gate_up_proj", gate_up_proj, (None, None, hidden_size), dtypes, device, strided=True
    )
    slots, rows_given = gate_up_proj.shape[:2]
    width = rows_given // 2 if activation.gated else rows_given
    check_tensor(
        "down_proj",
        down_proj,
        (slots, hidden_size, width),
        (gate_up_proj.dtype,),
        device,
        strided=True,
    )
    rows = hidden_states, topk_ids, slot_table
    run_grouped(
        "moe_grouped", *rows, (gate_up_proj, down_proj), activation, out, biases, rows_given
    )


def run_grouped(
    op: str,
    hidden_states: Tensor,
    topk_ids: Tensor,
    slot_table: Tensor,
    held: tuple[Any, ...],
    activation: Activation,
    out: Tensor,
    biases: ExpertBiases | None,
    outputs: int,
) -> None:
    """Run a `moe_grouped*`, whose other arguments are checked, block by block.

    held  its arguments behind slot_table; outputs: of gate_up
    """
    numbers = activation_numbers(activation)
    added = pair_of(biases, hidden_states, slot_table, outputs)
    if hidden_states.dtype == torch.float64:
        given = hidden_states, topk_ids, slot_table
        library.OPS[op][1](*given, *held, *numbers, out, *added)
        return
    for part, ids, target in row_blocks(topk_ids.shape[1], hidden_states, topk_ids, out):
        library.call(op, part, ids, slot_table, *held, *numbers, target, *added)


def moe_by_expert(
    hidden_states: Tensor,
    grouping: Grouping,
    slots: dict[int, int],
    plain: Callable[[int, int], PlainExpert],
    activation: Activation,
    out: Tensor,
    biases: ExpertBiases | None = None,
) -> None:
    """Run `reference.moe_grouped_out` expert by expert, with torch's products for many rows.

    The host knows which rows and experts to run, so it does not wait for the device.

    hidden_states  [T, H]; grouping: of their routes, with an index; out [T, K, H]
    slots          the slot of each expert to run
    plain          decodes an expert in a slot; valid until its next call
    """
    check_tensor("hidden_states", hidden_states, (None, None), FLOAT_DTYPES, hidden_states.device)
    shape = (*grouping.topk_ids.shape, hidden_states.shape[1])
    check_tensor("out", out, shape, (hidden_states.dtype,), hidden_states.device)
    activation_numbers(activation)
    outputs = out.flatten(0, 1)
    for expert, slot in slots.items():
        if expert in grouping.spans:
            rows, places = grouping.of_expert(expert)
            words = plain(expert, slot)
            # The gathered rows have no name, or they would live on beside the next expert's.
            results = _swiglu(
                hidden_states.index_select(0, rows), words, activation, expert, biases
            )
            outputs.index_copy_(0, places, results)
            del results


def read_sum(words: Tensor) -> int:
    """Sum of [N] int64 words, wrapped to 64 bits: a plain read of memory, for benchmarks."""
    check_tensor("words", words, (None,), (torch.int64,), words.device)
    out = words.new_empty(1)
    library.call("read_sum", words, out)
    return int(out)


def row_blocks(top_k: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Split tensors into blocks of as many rows as a kernel takes, each row with top_k places."""
    rows = max(library.kernels_for(tensors[0]).call_rows(top_k), 1)
    if tensors[0].shape[0] <= rows:
        return [tensors]
    return list(zip(*(tensor.split(rows) for tensor in tensors), strict=True))


def pair_of(
    biases: ExpertBiases | None, rows: Tensor, experts: Tensor, outputs: int
) -> tuple[Tensor, Tensor] | tuple[()]:
    """Return biases as the last arguments of ops. Raises ValueError if they do not match the
    experts.

    rows  [T, H]; experts: a table of them [E]; outputs: of gate_up
    """
    if biases is None:
        return ()
    count, dtypes = experts.shape[0], (rows.dtype,)
    check_tensor("gate_up_bias", biases.gate_up, (count, outputs), dtypes, rows.device)
    check_tensor("down_bias", biases.down, (count, rows.shape[1]), dtypes, rows.device)
    return biases.gate_up, biases.down


def _swiglu(
    inputs: Tensor,
    words: PlainExpert,
    activation: Activation,
    expert: int,
    biases: ExpertBiases | None,
) -> Tensor:
    """Run inputs [R, H] through an expert whose weights are converted to their dtype."""
    if words.input_perm is not None:
        inputs = inputs.index_select(1, words.input_perm)
    gate_up, down = words.gate_up_proj.to(inputs.dtype), words.down_proj.to(inputs.dtype)
    if biases is None:
        return reference.swiglu(inputs, gate_up, down, activation)
    added = biases.gate_up, biases.down
    return reference.swiglu(inputs, gate_up, down, activation, expert, *added)


def _check_route(topk_ids: Tensor, topk_weights: Tensor, hidden_states: Tensor) -> None:
    rows, device = hidden_states.shape[0], hidden_states.device
    check_tensor("topk_ids", topk_ids, (rows, None), (torch.int64,), device)
    check_tensor("topk_weights", topk_weights, tuple(topk_ids.shape), FLOAT_DTYPES, device)


def _is_index(perm: Tensor, count: int) -> bool:
    """True if all of perm is in [0, count)."""
    return bool(((perm >= 0) & (perm < count)).all())
