"""Products of many rows in 16 bits, for processors without such kernels in torch.

Without AVX-512, torch multiplies bfloat16 and float16 several times slower than float32. There,
weights are widened block by block and multiplied in float32. Sums are in float32 either way, and
results are rounded once.
"""

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

# Sizes widened at a time: rows of inputs, and elements and rows of weights.
ROWS, WEIGHTS, OUTPUTS = 256, 1 << 19, 512


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `torch.nn.functional.linear` of inputs [..., K] by weight [N, K], plus bias [N]."""
    if not inputs.is_cpu or weight.dtype != inputs.dtype or has_native_product(inputs.dtype):
        return functional.linear(inputs, weight, bias)
    rows = inputs.reshape(-1, inputs.shape[-1])
    out = inputs.new_empty(rows.shape[0], weight.shape[0])
    outputs = outputs_at_a_time(*weight.shape)
    for at in range(0, weight.shape[0], outputs):
        words = weight[at : at + outputs].float()
        added = None if bias is None else bias[at : at + outputs].float()
        for first in range(0, rows.shape[0], ROWS):
            block = rows[first : first + ROWS].float()
            out[first : first + ROWS, at : at + outputs] = functional.linear(block, words, added)
    return out.view(*inputs.shape[:-1], weight.shape[0])


def scratch_bytes(rows: int, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int:
    """Most scratch bytes of products of `rows` rows by matrices [N, K]."""
    if has_native_product(dtype):
        return 0
    most, rows = 0, min(rows, ROWS)
    for size, columns in shapes:
        outputs = outputs_at_a_time(size, columns)
        most = max(most, outputs * columns + rows * (columns + outputs))
    return most * torch.float32.itemsize


def outputs_at_a_time(outputs: int, columns: int) -> int:
    """Rows of a weight [outputs, columns] that are widened at a time."""
    return max(1, min(WEIGHTS // columns, OUTPUTS, outputs))


@cache
def has_native_product(dtype: torch.dtype) -> bool:
    """True if torch has its own kernels for products of this dtype on this processor."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True
