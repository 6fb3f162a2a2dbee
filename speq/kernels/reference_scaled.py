"""Plain torch versions of the ops over experts published as codes with scales.

csrc/scaled.h has the layout of records, speq/kernels/scaled_layout.py their sizes.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from speq.kernels.reference import grouped_records, matrices_of
from speq.kernels.scaled_layout import (
    Fp8Layout,
    Int4GroupsLayout,
    Mxfp4Layout,
    Nvfp4Layout,
    ScaledLayout,
)
from speq.kernels.scaled_words import fp8_words, int4_words, mxfp4_words, nvfp4_words, tensor_of


def decode_fp8_out(
    record: Tensor, block_rows: int, block_columns: int, gate_up_proj: Tensor, down_proj: Tensor
) -> None:
    """Decode an FP8 record of blocks of that size into gate_up_proj [2F, H] and down_proj [H, F],
    bfloat16.
    """
    hidden_size, width = down_proj.shape
    words, gated = (gate_up_proj, down_proj), is_gated(gate_up_proj, down_proj)
    layout = Fp8Layout(hidden_size, width, block_rows, block_columns, gated=gated)
    words_of = partial(fp8_words, block_rows=block_rows, block_columns=block_columns)
    _decode(record, layout, words_of, matrices_of(*words))


def decode_mxfp4_out(record: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> None:
    """Decode an MXFP4 record, in which rows of gate and up are interleaved; as `decode_fp8_out`."""
    in_turns = torch.empty_like(gate_up_proj)
    _decode(record, Mxfp4Layout(*down_proj.shape), mxfp4_words, (in_turns, down_proj))
    gate_up_proj.copy_(torch.cat([in_turns[0::2], in_turns[1::2]]))


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
    words, gated = (gate_up_proj, down_proj), is_gated(gate_up_proj, down_proj)
    groups = group_size, has_zeros, has_halves
    layout = Int4GroupsLayout(hidden_size, width, *groups, gated=gated)
    _decode(record, layout, int4_words, matrices_of(*words))


def decode_nvfp4_out(
    record: Tensor, divides: bool, gate_up_proj: Tensor, down_proj: Tensor
) -> None:
    """Decode an NVFP4 record; as `decode_fp8_out`. divides: whether matrices' scales do"""
    words = gate_up_proj, down_proj
    layout = Nvfp4Layout(*down_proj.shape, gated=is_gated(*words))
    _decode(record, layout, partial(nvfp4_words, divides=divides), matrices_of(*words))


def is_gated(gate_up_proj: Tensor, down_proj: Tensor) -> bool:
    """True if gate_up_proj is [2F, H], and not [F, H]."""
    return gate_up_proj.shape[0] != down_proj.shape[1]


def _decode(
    record: Tensor,
    layout: ScaledLayout,
    words_of: Callable[..., Tensor],
    targets: Sequence[Tensor],
) -> None:
    for target, sections in zip(targets, layout.parts, strict=True):
        target.copy_(words_of(*(tensor_of(record, section) for section in sections)))


moe_grouped_fp8_out = grouped_records(decode_fp8_out, 2)
moe_grouped_mxfp4_out = grouped_records(decode_mxfp4_out, 0)
moe_grouped_int4_out = grouped_records(decode_int4_out, 3)
moe_grouped_nvfp4_out = grouped_records(decode_nvfp4_out, 1)
