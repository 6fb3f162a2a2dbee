"""The ops over experts published as codes with scales, for their callers.

`speq.kernels.reference_scaled` defines what they compute.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from speq.kernels import library, reference_scaled
from speq.kernels.checks import activation_numbers, check_expert, check_rows, check_tensor
from speq.kernels.ops import Activation, ExpertBiases, gate_up_rows, pair_of, row_blocks
from speq.kernels.scaled_layout import (
    Fp8Layout,
    Int4GroupsLayout,
    Mxfp4Layout,
    Nvfp4Layout,
    ScaledLayout,
)

# What ops of a format take behind the width of experts, and its layout behind both sizes:
#   fp8    block_rows, block_columns: that share a scale; 0: all of a matrix
#   int4   group_size; has_zeros: whether it has zero points; has_halves: whether scales are
#          float16, not bfloat16
#   nvfp4  divides: whether scales of matrices do
Numbers = tuple[int, ...]
LAYOUTS: dict[str, Callable[..., ScaledLayout]] = {
    "fp8": Fp8Layout,
    "mxfp4": Mxfp4Layout,
    "int4": Int4GroupsLayout,
    "nvfp4": lambda hidden_size, width, _, gated: Nvfp4Layout(hidden_size, width, gated=gated),
}
REFERENCES: dict[str, Callable[..., None]] = {
    "fp8": reference_scaled.moe_grouped_fp8_out,
    "mxfp4": reference_scaled.moe_grouped_mxfp4_out,
    "int4": reference_scaled.moe_grouped_int4_out,
    "nvfp4": reference_scaled.moe_grouped_nvfp4_out,
}


def decode(
    form: str, record: Tensor, numbers: Numbers, gate_up_proj: Tensor, down_proj: Tensor
) -> None:
    """Decode a record of a format, or a slot that holds one, into bfloat16 matrices.

    record  [R] uint8; gate_up_proj [2F, H], gate over up, and down_proj [H, F]. In MXFP4 rows of
            gate and up are interleaved
    """
    hidden_size, width, gated = check_expert(gate_up_proj, down_proj)
    _check_records("record", record, 1, LAYOUTS[form](hidden_size, width, *numbers, gated=gated))
    library.call(f"decode_{form}", record, *numbers, gate_up_proj, down_proj)


def moe_grouped(
    form: str,
    hidden_states: Tensor,
    topk_ids: Tensor,
    slot_table: Tensor,
    slots: Tensor,
    expert_width: int,
    numbers: Numbers,
    activation: Activation,
    out: Tensor,
    biases: ExpertBiases | None = None,
) -> None:
    """Run `moe_grouped_*` of `reference_scaled` over records of a format, with the blocks and
    errors of `ops.moe_grouped`.
    """
    gated = activation.gated
    layout = LAYOUTS[form](hidden_states.shape[-1], expert_width, *numbers, gated=gated)
    check_rows(hidden_states, topk_ids, slot_table, out)
    _check_records("slots", slots, 2, layout)
    limit = activation_numbers(activation)
    outputs = gate_up_rows(activation, expert_width)
    added = pair_of(biases, hidden_states, slot_table, outputs)
    held = slot_table, slots, expert_width, *numbers
    if hidden_states.dtype == torch.float64:
        REFERENCES[form](hidden_states, topk_ids, *held, activation, out, *added)
        return
    for part, ids, target in row_blocks(topk_ids.shape[1], hidden_states, topk_ids, out):
        library.call(f"moe_grouped_{form}", part, ids, *held, *limit, target, *added)


def _check_records(name: str, records: Tensor, dims: int, layout: ScaledLayout) -> None:
    """Raise ValueError unless `records`, one or slots of them, can hold such a record."""
    shape = (None,) * dims
    check_tensor(name, records, shape, (torch.uint8,), records.device, strided=dims == 2)
    if records.shape[-1] < layout.nbytes:
        raise ValueError(
            f"{name} has {records.shape[-1]} bytes to a record; those of this shape have "
            f"{layout.nbytes}"
        )
