"""The ops over experts published as codes with scales, for their callers.

`speq.kernels.reference_scaled` defines what they compute.
"""

from collections.abc import Callable

from torch import Tensor

from speq.kernels import library
from speq.kernels.checks import check_expert, check_rows
from speq.kernels.ops import Activation, ExpertBiases, gate_up_rows, run_grouped
from speq.kernels.records import check_records
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


def decode(
    form: str, record: Tensor, numbers: Numbers, gate_up_proj: Tensor, down_proj: Tensor
) -> None:
    """Decode a record of a format, or a slot that holds one, into bfloat16 matrices.

    record  [R] uint8; gate_up_proj [2F, H], gate over up, and down_proj [H, F]. An MXFP4 record has
            rows of gate and up in turns
    """
    hidden_size, width, gated = check_expert(gate_up_proj, down_proj)
    layout = LAYOUTS[form](hidden_size, width, *numbers, gated=gated)
    check_records("record", record, 1, layout.nbytes)
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
    check_records("slots", slots, 2, layout.nbytes)
    rows, held = (hidden_states, topk_ids, slot_table), (slots, expert_width, *numbers)
    outputs = gate_up_rows(activation, expert_width)
    run_grouped(f"moe_grouped_{form}", *rows, held, activation, out, biases, outputs)
