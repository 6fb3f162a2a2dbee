"""The ops over experts published as codes with scales, for their callers.

`speq.kernels.reference_scaled` defines what they compute.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speq.kernels import library, reference_scaled
from speq.kernels.checks import activation_numbers, check_expert, check_rows, check_tensor
from speq.kernels.ops import Activation, ExpertBiases, gate_up_rows, pair_of, row_blocks
from speq.kernels.scaled_layout import (
    FP8_COLUMNS,
    FP8_ROWS,
    INT4_COLUMNS,
    NVFP4_COLUMNS,
    Fp8Layout,
    Int4GroupsLayout,
    Mxfp4Layout,
    Nvfp4Layout,
    ScaledLayout,
)

REFERENCES: dict[str, Callable[..., None]] = {
    "fp8": reference_scaled.moe_grouped_fp8_out,
    "mxfp4": reference_scaled.moe_grouped_mxfp4_out,
    "int4": reference_scaled.moe_grouped_int4_out,
    "nvfp4": reference_scaled.moe_grouped_nvfp4_out,
}


def decode_fp8(
    record: Tensor, block_rows: int, block_columns: int, gate_up_proj: Tensor, down_proj: Tensor
) -> None:
    """Decode an FP8 record, or a slot that holds one, into bfloat16 matrices.

    record  [R] uint8; gate_up_proj [2F, H], gate over up, and down_proj [H, F]
    block_rows, block_columns  that share a scale; 0: all of a matrix
    """
    blocks = block_rows, block_columns
    hidden_size, width, gated = check_expert(gate_up_proj, down_proj)
    _check_records("record", record, 1, fp8_layout(hidden_size, width, *blocks, gated))
    library.call("decode_fp8", record, *blocks, gate_up_proj, down_proj)


def decode_mxfp4(record: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> None:
    """Decode an MXFP4 record, in which rows of gate and up are interleaved; as `decode_fp8`."""
    _check_records("record", record, 1, mxfp4_layout(*check_expert(gate_up_proj, down_proj)))
    library.call("decode_mxfp4", record, gate_up_proj, down_proj)


def decode_int4(
    record: Tensor,
    group_size: int,
    has_zeros: bool,
    has_halves: bool,
    gate_up_proj: Tensor,
    down_proj: Tensor,
) -> None:
    """Decode an INT4 record of groups of that size; as `decode_fp8`.

    has_zeros  whether it has zero points; has_halves: whether scales are float16, not bfloat16
    """
    groups = group_size, has_zeros, has_halves
    hidden_size, width, gated = check_expert(gate_up_proj, down_proj)
    _check_records("record", record, 1, int4_layout(hidden_size, width, *groups, gated))
    library.call("decode_int4", record, *groups, gate_up_proj, down_proj)


def decode_nvfp4(record: Tensor, divides: bool, gate_up_proj: Tensor, down_proj: Tensor) -> None:
    """Decode an NVFP4 record; as `decode_fp8`. divides: whether scales of matrices do"""
    _check_records("record", record, 1, nvfp4_layout(*check_expert(gate_up_proj, down_proj)))
    library.call("decode_nvfp4", record, divides, gate_up_proj, down_proj)


def moe_grouped_fp8(
    hidden_states: Tensor,
    topk_ids: Tensor,
    slot_table: Tensor,
    slots: Tensor,
    expert_width: int,
    block_rows: int,
    block_columns: int,
    activation: Activation,
    out: Tensor,
    biases: ExpertBiases | None = None,
) -> None:
    """Run `reference_scaled.moe_grouped_fp8_out`, with the blocks and errors of
    `ops.moe_grouped`.
    """
    held = ScaledSlots(slot_table, slots, expert_width)
    blocks = block_rows, block_columns
    gated = activation.gated
    layout = fp8_layout(hidden_states.shape[-1], expert_width, *blocks, gated)
    _moe_grouped("fp8", layout, hidden_states, topk_ids, held, blocks, activation, out, biases)


def moe_grouped_mxfp4(
    hidden_states: Tensor,
    topk_ids: Tensor,
    slot_table: Tensor,
    slots: Tensor,
    expert_width: int,
    activation: Activation,
    out: Tensor,
    biases: ExpertBiases | None = None,
) -> None:
    """Run `reference_scaled.moe_grouped_mxfp4_out`, with the blocks and errors of
    `ops.moe_grouped`.
    """
    held = ScaledSlots(slot_table, slots, expert_width)
    layout = mxfp4_layout(hidden_states.shape[-1], expert_width, activation.gated)
    _moe_grouped("mxfp4", layout, hidden_states, topk_ids, held, (), activation, out, biases)


def moe_grouped_int4(
    hidden_states: Tensor,
    topk_ids: Tensor,
    slot_table: Tensor,
    slots: Tensor,
    expert_width: int,
    group_size: int,
    has_zeros: bool,
    has_halves: bool,
    activation: Activation,
    out: Tensor,
    biases: ExpertBiases | None = None,
) -> None:
    """Run `reference_scaled.moe_grouped_int4_out`, with the blocks and errors of
    `ops.moe_grouped`.
    """
    held = ScaledSlots(slot_table, slots, expert_width)
    groups = group_size, has_zeros, has_halves
    gated = activation.gated
    layout = int4_layout(hidden_states.shape[-1], expert_width, *groups, gated)
    _moe_grouped("int4", layout, hidden_states, topk_ids, held, groups, activation, out, biases)


def moe_grouped_nvfp4(
    hidden_states: Tensor,
    topk_ids: Tensor,
    slot_table: Tensor,
    slots: Tensor,
    expert_width: int,
    divides: bool,
    activation: Activation,
    out: Tensor,
    biases: ExpertBiases | None = None,
) -> None:
    """Run `reference_scaled.moe_grouped_nvfp4_out`, with the blocks and errors of
    `ops.moe_grouped`.
    """
    held = ScaledSlots(slot_table, slots, expert_width)
    layout = nvfp4_layout(hidden_states.shape[-1], expert_width, activation.gated)
    own = (divides,)
    _moe_grouped("nvfp4", layout, hidden_states, topk_ids, held, own, activation, out, biases)


class ScaledSlots(NamedTuple):
    """Places of records, as the ops take them."""

    slot_table: Tensor
    slots: Tensor
    expert_width: int


def _moe_grouped(
    form: str,
    layout: ScaledLayout,
    hidden_states: Tensor,
    topk_ids: Tensor,
    held: ScaledSlots,
    groups: tuple[Any, ...],
    activation: Activation,
    out: Tensor,
    biases: ExpertBiases | None,
) -> None:
    """Run the op `moe_grouped_*` of a format. groups: arguments of its own"""
    check_rows(hidden_states, topk_ids, held.slot_table, out)
    _check_records("slots", held.slots, 2, layout)
    numbers = activation_numbers(activation)
    outputs = gate_up_rows(activation, held.expert_width)
    added = pair_of(biases, hidden_states, held.slot_table, outputs)
    if hidden_states.dtype == torch.float64:
        REFERENCES[form](hidden_states, topk_ids, *held, *groups, activation, out, *added)
        return
    for part, ids, target in row_blocks(topk_ids.shape[1], hidden_states, topk_ids, out):
        library.call(f"moe_grouped_{form}", part, ids, *held, *groups, *numbers, target, *added)


def fp8_layout(
    hidden_size: int, expert_width: int, block_rows: int, block_columns: int, gated: bool = True
) -> Fp8Layout:
    """Layout of FP8 experts. Raises ValueError for blocks that kernels do not know."""
    whole = block_rows >= 0 and block_columns >= 0 and block_columns % FP8_COLUMNS == 0
    if not whole or (block_rows % FP8_ROWS and block_rows != 1):
        raise ValueError(
            f"blocks of FP8 are {block_rows} by {block_columns}, and must be of 1 row or multiples "
            f"of {FP8_ROWS}, and of multiples of {FP8_COLUMNS} columns"
        )
    return Fp8Layout(hidden_size, expert_width, block_rows, block_columns, gated)


def int4_layout(
    hidden_size: int,
    expert_width: int,
    group_size: int,
    has_zeros: bool,
    has_halves: bool,
    gated: bool = True,
) -> Int4GroupsLayout:
    """Layout of INT4 experts. Raises ValueError for groups that widths are no multiples of."""
    if group_size < 1 or any(
        size % group_size or group_size % INT4_COLUMNS for size in (hidden_size, expert_width)
    ):
        raise ValueError(
            f"experts are {hidden_size} by {expert_width} in groups of {group_size}; of INT4 both "
            f"are multiples of a group, and that is a multiple of {INT4_COLUMNS}"
        )
    return Int4GroupsLayout(hidden_size, expert_width, group_size, has_zeros, has_halves, gated)


def mxfp4_layout(hidden_size: int, expert_width: int, gated: bool = True) -> Mxfp4Layout:
    """Layout of MXFP4 experts. Raises ValueError for widths that are not whole blocks, and without
    a gate, whose rows are in turns with those of up.
    """
    block = Mxfp4Layout.block
    if not gated:
        raise ValueError("experts have no gate; those of MXFP4 must have one")
    if hidden_size % block or expert_width % block:
        raise ValueError(
            f"experts are {hidden_size} by {expert_width}; of MXFP4 both are multiples of {block}"
        )
    return Mxfp4Layout(hidden_size, expert_width)


def nvfp4_layout(hidden_size: int, expert_width: int, gated: bool = True) -> Nvfp4Layout:
    """Layout of NVFP4 experts. Raises ValueError for widths that are not whole pairs of blocks."""
    if hidden_size % NVFP4_COLUMNS or expert_width % NVFP4_COLUMNS:
        raise ValueError(
            f"experts are {hidden_size} by {expert_width}; of NVFP4 both are multiples of "
            f"{NVFP4_COLUMNS}"
        )
    return Nvfp4Layout(hidden_size, expert_width, gated)


def _check_records(name: str, records: Tensor, dims: int, layout: ScaledLayout) -> None:
    """Raise ValueError unless `records`, one or slots of them, can hold such a record."""
    shape = (None,) * dims
    check_tensor(name, records, shape, (torch.uint8,), records.device, strided=dims == 2)
    if records.shape[-1] < layout.nbytes:
        raise ValueError(
            f"{name} has {records.shape[-1]} bytes to a record; those of this shape have "
            f"{layout.nbytes}"
        )
