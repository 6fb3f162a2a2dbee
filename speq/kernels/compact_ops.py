"""The ops over compact experts, for their callers.

`speq.kernels.reference_compact` defines what they compute.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from speq.errors import NoRoom
from speq.kernels import library, records
from speq.kernels.checks import (
    check_expert,
    check_int4,
    check_rows,
    check_tensor,
)
from speq.kernels.compact_layout import CompactLayout
from speq.kernels.ops import (
    Activation,
    ExpertBiases,
    Int4Pair,
    Int4Slots,
    gate_up_rows,
    run_grouped,
)
from speq.kernels.records import check_records, encode_whole


class Part(NamedTuple):
    """Which of gate, up and down are encoded, where they come one after another.

    first, end  the first of them, and the one behind the last
    nbytes      what was returned for those before
    """

    first: int = 0
    end: int = 3
    nbytes: int = 0


WHOLE = Part()


def encode(gate_up_proj: Tensor, down_proj: Tensor, *codes: Int4Pair) -> Tensor:
    """Encode one expert losslessly, or its residual over codes, into a record [R] uint8.

    gate_up_proj  [2F, H], or [F, H] without a gate, and down_proj [H, F], bfloat16, on the CPU, in
                  the order of the codes
    codes         none, or codes and scales of both matrices
    """
    op, layout, parts = _encoding(gate_up_proj, down_proj, codes)
    return encode_whole(op, layout, *parts)


def encode_into(
    gate_up_proj: Tensor,
    down_proj: Tensor,
    slot: Tensor,
    *codes: Int4Pair,
    part: Part = WHOLE,
) -> int:
    """Encode into a slot [slot_bytes] uint8 and return the record's bytes.

    part  of an expert whose later matrices have not come; the slot has the record, of so many
          bytes, once the last is encoded

    Raises SpeqError if the slot is too small, with the last part. What has no room is not written.
    """
    op, layout, parts = _encoding(gate_up_proj, down_proj, codes)
    nbytes = records.encode_into(op, layout, slot, *parts, part=part)
    if part.end == WHOLE.end and nbytes > len(slot):
        raise NoRoom(
            f"an expert takes {nbytes} bytes encoded, and slots were made for {len(slot)}; pack "
            "the model with `speq pack`, which measures every expert"
        )
    return nbytes


def decode(record: Tensor, gate_up_proj: Tensor, down_proj: Tensor, *codes: Int4Pair) -> None:
    """Decode a record over its codes, or a slot that holds one, into bfloat16 matrices."""
    layout = _layout(gate_up_proj, down_proj, codes)
    check_records("record", record, 1, layout.fixed_bytes)
    parts = [part for pair in codes for part in pair]
    library.call(f"decode_{codec_over(codes)}", record, *parts, gate_up_proj, down_proj)


def moe_grouped_lossless(
    hidden_states: Tensor,
    topk_ids: Tensor,
    slot_table: Tensor,
    slots: Tensor,
    expert_width: int,
    activation: Activation,
    out: Tensor,
    biases: ExpertBiases | None = None,
) -> None:
    """Run `reference_compact.moe_grouped_lossless_out`, with the blocks and errors of
    `ops.moe_grouped`.
    """
    layout = CompactLayout.of_expert(
        hidden_states.shape[1], expert_width, lossless=True, gated=activation.gated
    )
    check_rows(hidden_states, topk_ids, slot_table, out)
    check_records("slots", slots, 2, layout.fixed_bytes)
    rows, held = (hidden_states, topk_ids, slot_table), (slots, expert_width)
    outputs = gate_up_rows(activation, expert_width)
    run_grouped("moe_grouped_lossless", *rows, held, activation, out, biases, outputs)


def moe_grouped_residual(
    hidden_states: Tensor,
    topk_ids: Tensor,
    slot_table: Tensor,
    slots: Tensor,
    base_slots: Tensor,
    experts: Int4Slots,
    activation: Activation,
    out: Tensor,
    biases: ExpertBiases | None = None,
) -> None:
    """Run `reference_compact.moe_grouped_residual_out` over INT4 experts, otherwise as
    `ops.moe_grouped`.
    """
    outputs = experts.gate_up_rows(activation)
    layout = CompactLayout.of_expert(
        experts.hidden_size, experts.expert_width, lossless=False, gated=activation.gated
    )
    check_rows(hidden_states, topk_ids, slot_table, out)
    if hidden_states.shape[1] != experts.hidden_size:
        raise ValueError(
            f"hidden_states has {hidden_states.shape[1]} columns; the INT4 experts take "
            f"{experts.hidden_size}"
        )
    check_tensor("base_slots", base_slots, slot_table.shape, (torch.int64,), slots.device)
    check_records("slots", slots, 2, layout.fixed_bytes)
    rows = hidden_states, topk_ids, slot_table
    held = slots, base_slots, *experts.gate_up, *experts.down, experts.input_perm
    run_grouped("moe_grouped_residual", *rows, held, activation, out, biases, outputs)


def codec_over(codes: tuple[Int4Pair, ...]) -> str:
    return "residual" if codes else "lossless"


def _encoding(
    gate_up_proj: Tensor, down_proj: Tensor, codes: tuple[Int4Pair, ...]
) -> tuple[str, CompactLayout, list[Tensor]]:
    """The op that encodes, what it makes and what it takes."""
    layout = _layout(gate_up_proj, down_proj, codes)
    parts = [gate_up_proj, down_proj, *(part for pair in codes for part in pair)]
    return f"encode_{codec_over(codes)}", layout, parts


def _layout(gate_up_proj: Tensor, down_proj: Tensor, codes: tuple[Int4Pair, ...]) -> CompactLayout:
    hidden_size, width, gated = check_expert(gate_up_proj, down_proj)
    matrices = (("gate_up", gate_up_proj), ("down", down_proj))
    for (name, matrix), (qweight, scales) in zip(matrices, codes, strict=bool(codes)):
        check_tensor(f"{name}_qweight", qweight, (None, None), (torch.uint8,), matrix.device)
        check_tensor(f"{name}_scales", scales, (None, None), (torch.float16,), matrix.device)
        check_int4(name, qweight, scales, *matrix.shape)
    return CompactLayout.of_expert(hidden_size, width, not codes, gated)
