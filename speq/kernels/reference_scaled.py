"""Plain torch versions of the ops over experts published as codes with scales.

csrc/scaled.h has the layout of records, speq/kernels/scaled_layout.py their sizes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from speq.kernels.reference import Activation, check_ids, empty_expert, matrices_of, moe_grouped_out
from speq.kernels.scaled_layout import Fp8Layout, Int4GroupsLayout, Mxfp4Layout, Nvfp4Layout
from speq.kernels.scaled_words import fp8_words, int4_words, mxfp4_words, nvfp4_words, part_of


def decode_fp8_out(
    record: Tensor, block_rows: int, block_columns: int, gate_up_proj: Tensor, down_proj: Tensor
) -> None:
    """Decode an FP8 record of blocks of that size into gate_up_proj [2F, H] and down_proj [H, F],
    bfloat16.
    """
    hidden_size, width = down_proj.shape
    targets = matrices_of(gate_up_proj, down_proj)
    layout = Fp8Layout(hidden_size, width, block_rows, block_columns, len(targets) > 2)
    for target, codes, scales in zip(targets, layout.codes, layout.scales, strict=True):
        of_blocks = part_of(record, scales).view(torch.float32).view(scales.shape)
        of_codes = part_of(record, codes).view(codes.shape)
        target.copy_(fp8_words(of_codes, of_blocks, block_rows, block_columns))


def decode_mxfp4_out(record: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> None:
    """Decode an MXFP4 record, in which rows of gate and up are interleaved; as `decode_fp8_out`."""
    hidden_size, width = down_proj.shape
    layout = Mxfp4Layout(hidden_size, width)
    gate_up, down = (
        mxfp4_words(
            part_of(record, codes).view(codes.shape), part_of(record, scales).view(scales.shape)
        )
        for codes, scales in zip(layout.codes, layout.scales, strict=True)
    )
    gate_up_proj.copy_(torch.cat([gate_up[0::2], gate_up[1::2]]))
    down_proj.copy_(down)


def decode_int4_out(
    record: Tensor,
    group_size: int,
    has_zeros: bool,
    has_halves: bool,
    gate_up_proj: Tensor,
    down_proj: Tensor,
) -> None:
    """Decode an INT4 record of groups of that size; as `decode_fp8_out`."""
    hidden_size, width = down_proj.shape
    dtype = torch.float16 if has_halves else torch.bfloat16
    targets = matrices_of(gate_up_proj, down_proj)
    layout = Int4GroupsLayout(
        hidden_size, width, group_size, has_zeros, has_halves, len(targets) > 2
    )
    zeros = [part_of(record, each).view(torch.int32).view(each.shape) for each in layout.zeros]
    for at, (target, codes, scales) in enumerate(
        zip(targets, layout.codes, layout.scales, strict=True)
    ):
        of_groups = part_of(record, scales).view(dtype).view(scales.shape)
        packed = part_of(record, codes).view(codes.shape)
        target.copy_(int4_words(packed, of_groups, zeros[at] if zeros else None))


def decode_nvfp4_out(
    record: Tensor, divides: bool, gate_up_proj: Tensor, down_proj: Tensor
) -> None:
    """Decode an NVFP4 record; as `decode_fp8_out`. divides: whether matrices' scales do"""
    hidden_size, width = down_proj.shape
    targets = matrices_of(gate_up_proj, down_proj)
    layout = Nvfp4Layout(hidden_size, width, len(targets) > 2)
    for target, sections in zip(targets, layout.parts, strict=True):
        codes, scales, of_matrix = (
            part_of(record, each).view(each.shape[0], -1) for each in sections
        )
        target.copy_(nvfp4_words(codes, scales, of_matrix.view(torch.float32), divides))


def moe_grouped_fp8_out(
    hidden_states: Tensor,
    topk_ids: Tensor,
    slot_table: Tensor,
    slots: Tensor,
    expert_width: int,
    block_rows: int,
    block_columns: int,
    activation: Activation,
    out: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> None:
    """Run `moe_grouped_out` over FP8 records in slots [S, slot_bytes] uint8."""

    def decode(record: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> None:
        decode_fp8_out(record, block_rows, block_columns, gate_up_proj, down_proj)

    rows = hidden_states, topk_ids, slot_table, slots, expert_width
    _run_slots(decode, *rows, activation, out, gate_up_bias, down_bias)


def moe_grouped_mxfp4_out(
    hidden_states: Tensor,
    topk_ids: Tensor,
    slot_table: Tensor,
    slots: Tensor,
    expert_width: int,
    activation: Activation,
    out: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> None:
    """Run `moe_grouped_out` over MXFP4 records in slots [S, slot_bytes] uint8."""
    rows = hidden_states, topk_ids, slot_table, slots, expert_width
    _run_slots(decode_mxfp4_out, *rows, activation, out, gate_up_bias, down_bias)


def moe_grouped_int4_out(
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
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> None:
    """Run `moe_grouped_out` over INT4 records in slots [S, slot_bytes] uint8."""

    def decode(record: Tensor, *words: Tensor) -> None:
        decode_int4_out(record, group_size, has_zeros, has_halves, *words)

    rows = hidden_states, topk_ids, slot_table, slots, expert_width
    _run_slots(decode, *rows, activation, out, gate_up_bias, down_bias)


def moe_grouped_nvfp4_out(
    hidden_states: Tensor,
    topk_ids: Tensor,
    slot_table: Tensor,
    slots: Tensor,
    expert_width: int,
    divides: bool,
    activation: Activation,
    out: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> None:
    """Run `moe_grouped_out` over NVFP4 records in slots [S, slot_bytes] uint8."""

    def decode(record: Tensor, *words: Tensor) -> None:
        decode_nvfp4_out(record, divides, *words)

    rows = hidden_states, topk_ids, slot_table, slots, expert_width
    _run_slots(decode, *rows, activation, out, gate_up_bias, down_bias)


def _run_slots(
    decode: Callable[..., None],
    hidden_states: Tensor,
    topk_ids: Tensor,
    slot_table: Tensor,
    slots: Tensor,
    expert_width: int,
    activation: Activation,
    out: Tensor,
    *biases: Tensor | None,
) -> None:
    """Decode the experts of a route that are in slots, one after another, and run each."""
    for expert, slot in _experts_in_slots(topk_ids, slot_table, slots):
        words = empty_expert(hidden_states.shape[1], expert_width, activation, slots.device)
        decode(slots[slot], *words)
        _run_expert(hidden_states, topk_ids, expert, words, activation, out, *biases)


def _experts_in_slots(topk_ids: Tensor, slot_table: Tensor, slots: Tensor) -> list[tuple[int, int]]:
    """Find the experts of a route that are in slots, with their slots."""
    check_ids("topk_ids", topk_ids, slot_table.shape[0], "experts of slot_table")
    held = []
    for expert in topk_ids.unique().tolist():
        slot = int(slot_table[expert])
        if slot >= 0:
            check_ids("slot_table", slot_table[expert], slots.shape[0], "slots")
            held.append((expert, slot))
    return held


def _run_expert(
    hidden_states: Tensor,
    topk_ids: Tensor,
    expert: int,
    words: tuple[Tensor, Tensor],
    activation: Activation,
    out: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> None:
    only = torch.full((int(topk_ids.max()) + 1,), -1, device=topk_ids.device)
    only[expert] = 0
    gate_up, down = (matrix.unsqueeze(0) for matrix in words)
    held = only, gate_up, down
    biases = gate_up_bias, down_bias
    moe_grouped_out(hidden_states, topk_ids, *held, activation, out, *biases)
