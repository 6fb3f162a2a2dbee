"""Matrices of a draft head: eight bits a weight in runs of 16 bits, the file's weights in others.

A pass of a head is bound by the reading of its weights. In eight bits it may draft another token;
every accepted token is the exact model's.
"""

from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from speq.experts.int4 import group_size_of, round_into
from speq.kernels import ops
from speq.kernels.ops import Int4Weight
from speq.layers.int4_matrix import Int4Matrix

HeadMatrix = Tensor | Int4Matrix
# Columns that the kernel rounds inputs by, and rows below which a matrix is not worth it.
BLOCK, LEAST_ROWS = 32, 64
PLANES = 2  # of four bits


def is_coded(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """True for the matrices that a run in `dtype` holds in eight bits."""
    large = len(shape) == 2 and shape[0] >= LEAST_ROWS and shape[1] % BLOCK == 0
    return large and dtype.itemsize == 2


def held_sizes(shape: tuple[int, ...], dtype: torch.dtype, looked_up: bool = False) -> list[int]:
    """Bytes of each tensor that `hold` makes of a weight. looked_up: row by row, so never coded."""
    if looked_up or not is_coded(shape, dtype):
        return [prod(shape) * dtype.itemsize]
    rows, columns = shape
    groups = PLANES * rows * (columns // group_size_of(columns))
    return [PLANES * rows * columns // 2, groups * torch.float16.itemsize]


def hold(weight: Tensor, dtype: torch.dtype, device: torch.device) -> HeadMatrix:
    """Hold a weight on a device for a run in `dtype`."""
    if not is_coded(tuple(weight.shape), dtype):
        return weight.to(device, dtype)
    rows, columns = weight.shape
    group_size = group_size_of(columns)
    codes = torch.empty(PLANES * rows, columns // 2, dtype=torch.uint8)
    scales = torch.empty(PLANES * rows, columns // group_size, dtype=torch.float16)
    round_into(weight, PLANES, group_size, codes, scales)
    return Int4Matrix(Int4Weight(codes, scales).to(device), PLANES)


def multiply(inputs: Tensor, weight: HeadMatrix) -> Tensor:
    """Multiply [..., K] by [N, K]. The kernels for few rows have no gradients."""
    if isinstance(weight, Int4Matrix):
        return weight.product(inputs.contiguous(), None)
    linear = functional.linear if weight.requires_grad else ops.linear
    return linear(inputs, weight)
