"""The ops over compact experts, for their callers.

`speq.kernels.reference_compact` defines what they compute.
"""

import torch
from torch import Tensor

from speq.errors import NoRoom
from speq.kernels import library
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
from speq.kernels.records import check_records, encode_into, encode_whole


def encode_lossless(gate_up_proj: Tensor, down_proj: Tensor) -> Tensor:
    """Encode one expert losslessly into a record [R] uint8.

    gate_up_proj  [2F, H], or [F, H] without a gate, and down_proj [H, F], bfloat16, on the CPU
    """
    layout = _layout(gate_up_proj, down_proj, lossless=True)
    return encode_whole("encode_lossless", layout, gate_up_proj, down_proj)


def encode_lossless_into(gate_up_proj: Tensor, down_proj: Tensor, slot: Tensor) -> int:
    """Encode into a slot [slot_bytes] uint8 and return the record's bytes.

    Raises SpeqError if the slot is too small. Nothing is then written to it.
    """
    layout = _layout(gate_up_proj, down_proj, lossless=True)
    return _encode_into_slot("encode_lossless", layout, slot, gate_up_proj, down_proj)


def decode_lossless(record: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> None:
    """Decode a record, or a slot that holds one, into bfloat16 matrices."""
    layout = _layout(gate_up_proj, down_proj, lossless=True)
    check_records("record", record, 1, layout.fixed_bytes)
    library.call("decode_lossless", record, gate_up_proj, down_proj)


def encode_residual(
    gate_up_proj: Tensor, down_proj: Tensor, gate_up: Int4Pair, down: Int4Pair
) -> Tensor:
    """Encode one expert's residual over its codes into a record [R] uint8.

    gate_up_proj  [2F, H] and down_proj [H, F], bfloat16, on the CPU, in the order of the codes
    gate_up, down codes and scales of the same matrices
    """
    layout = _residual_layout(gate_up_proj, down_proj, gate_up, down)
    return encode_whole("encode_residual", layout, gate_up_proj, down_proj, *gate_up, *down)


def encode_residual_into(
    gate_up_proj: Tensor, down_proj: Tensor, gate_up: Int4Pair, down: Int4Pair, slot: Tensor
) -> int:
    """Encode into a slot [slot_bytes] uint8, as `encode_lossless_into` does."""
    layout = _residual_layout(gate_up_proj, down_proj, gate_up, down)
    return _encode_into_slot(
        "encode_residual", layout, slot, gate_up_proj, down_proj, *gate_up, *down
    )


def decode_residual(
    record: Tensor, gate_up: Int4Pair, down: Int4Pair, gate_up_proj: Tensor, down_proj: Tensor
) -> None:
    """Decode a record over its codes into bfloat16 matrices."""
    layout = _residual_layout(gate_up_proj, down_proj, gate_up, down)
    check_records("record", record, 1, layout.fixed_bytes)
    library.call("decode_residual", record, *gate_up, *down, gate_up_proj, down_proj)


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


def _layout(gate_up_proj: Tensor, down_proj: Tensor, lossless: bool) -> CompactLayout:
    hidden_size, width, gated = check_expert(gate_up_proj, down_proj)
    return CompactLayout.of_expert(hidden_size, width, lossless, gated)


def _residual_layout(
    gate_up_proj: Tensor, down_proj: Tensor, gate_up: Int4Pair, down: Int4Pair
) -> CompactLayout:
    layout = _layout(gate_up_proj, down_proj, lossless=False)
    for name, (qweight, scales), matrix in (
        ("gate_up", gate_up, gate_up_proj),
        ("down", down, down_proj),
    ):
        check_tensor(f"{name}_qweight", qweight, (None, None), (torch.uint8,), matrix.device)
        check_tensor(f"{name}_scales", scales, (None, None), (torch.float16,), matrix.device)
        check_int4(name, qweight, scales, *matrix.shape)
    return layout


def _encode_into_slot(op: str, layout: CompactLayout, slot: Tensor, *parts: Tensor) -> int:
    nbytes = encode_into(op, layout, slot, *parts)
    if nbytes > len(slot):
        raise NoRoom(
            f"an expert takes {nbytes} bytes encoded, and slots were made for {len(slot)}; pack "
            "the model with `speq pack`, which measures every expert"
        )
    return nbytes
