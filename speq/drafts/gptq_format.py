"""GPTQ's packing of a linear layer, as AutoGPTQ, GPTQModel and optimum write it, and its
conversion to the layout of the INT4 kernels. Four bits only; pure functions of tensors.

A layer of K inputs and N outputs in groups of G inputs, eight codes to a word, lowest bits first:

    qweight  [K / 8, N] int32: inputs 8i to 8i + 7 of an output
    qzeros   [K / G, N / 8] int32: the zero points of outputs 8j to 8j + 7
    scales   [K / G, N] float16
    g_idx    [K] int32: the group of each input; k // G where it is absent or empty
    weight[n, k] = scales[g_idx[k], n] * (code[k, n] - zero[g_idx[k], n])

The checkpoint format `gptq` (AutoGPTQ's) stores zero points less one, `gptq_v2` as they are.
Frantar et al., arXiv:2210.17323; https://github.com/AutoGPTQ/AutoGPTQ,
https://github.com/ModelCloud/GPTQModel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FORMATS = ("gptq", "gptq_v2")
CODES_PER_WORD = 8
# Zero point of symmetric codes, as in the kernels.
SYMMETRIC_ZERO = 8
# A 1 in each zero point of a word. It is subtracted from the whole word, so a zero point of 0
# borrows from the next; adding it to the word undoes that.
ONES = 0x11111111


@dataclass(frozen=True, slots=True)
class GptqMatrix:
    """A packed linear layer; shapes at the top of this file. scales may be of any float dtype."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """A packed linear layer in the kernels' layout.

    qweight     [N, K / 2] uint8, two codes to a byte, low nibble first, zero point 8
    scales      [N, K / G] float16
    input_perm  [K] int64 or None: column c is for input input_perm[c]
    """

    qweight: Tensor
    scales: Tensor
    input_perm: Tensor | None = None

    def reorder_rows(self, order: Tensor) -> "Int4Linear":
        """Reorder rows: row r becomes row order[r]."""
        qweight, scales = (part.index_select(0, order) for part in (self.qweight, self.scales))
        return Int4Linear(qweight, scales, self.input_perm)


def pack_codes(codes: Tensor) -> Tensor:
    """Pack codes [K, N] of 0 to 15, any integer dtype, into qweight [K / 8, N] int32."""
    words = torch.zeros(codes.shape[0] // CODES_PER_WORD, codes.shape[1], dtype=torch.int32)
    for place in range(CODES_PER_WORD):
        words |= codes[place::CODES_PER_WORD].to(torch.int32) << 4 * place
    return words


def unpack_codes(qweight: Tensor) -> Tensor:
    """Unpack qweight [K / 8, N] int32 into codes [K, N] uint8."""
    return _unpack(qweight.unsqueeze(1), dim=1).flatten(0, 1)


def pack_zeros(zeros: Tensor, checkpoint_format: str) -> Tensor:
    """Pack zero points [K / G, N] of 0 to 15, any integer dtype, into qzeros [K / G, N / 8]
    int32.
    """
    # The subtraction wraps, as the words do.
    return pack_codes(zeros.t()).t().contiguous() - _zero_offset(checkpoint_format)


def unpack_zeros(qzeros: Tensor, checkpoint_format: str) -> Tensor:
    """Unpack qzeros [K / G, N / 8] int32 into zero points [K / G, N] uint8."""
    words = qzeros + _zero_offset(checkpoint_format)
    return _unpack(words.unsqueeze(2), dim=2).flatten(1, 2)


def _zero_offset(checkpoint_format: str) -> int:
    if checkpoint_format not in FORMATS:
        raise ValueError(
            f"checkpoint_format {checkpoint_format!r} must be one of {', '.join(FORMATS)}"
        )
    return ONES if checkpoint_format == "gptq" else 0


def _shifts(dim: int) -> Tensor:
    """Bit shift of each code of a word, along dimension `dim` of three."""
    shape = [1, 1, 1]
    shape[dim] = CODES_PER_WORD
    return torch.arange(0, 32, 4, dtype=torch.int32).view(shape)


def _unpack(words: Tensor, dim: int) -> Tensor:
    return ((words >> _shifts(dim)) & 0xF).to(torch.uint8)


def concatenate(matrices: list[GptqMatrix]) -> GptqMatrix:
    """Concatenate the outputs of layers over the same inputs.

    Raises ValueError if their g_idx differ: one order of inputs must serve all.
    """
    first, *others = matrices
    for other in others:
        if (first.g_idx is None) != (other.g_idx is None) or (
            first.g_idx is not None
            and other.g_idx is not None
            and not torch.equal(first.g_idx, other.g_idx)
        ):
            raise ValueError("have different g_idx, and must share one order of inputs")
    if not others:
        return first
    return GptqMatrix(
        torch.cat([matrix.qweight for matrix in matrices], 1),
        torch.cat([matrix.qzeros for matrix in matrices], 1),
        torch.cat([matrix.scales for matrix in matrices], 1),
        first.g_idx,
    )


def check_zeros(qzeros: Tensor, checkpoint_format: str) -> None:
    """Raise ValueError unless every zero point is 8."""
    zeros = unpack_zeros(qzeros, checkpoint_format)
    wrong = zeros[zeros != SYMMETRIC_ZERO]
    if wrong.numel():
        raise ValueError(
            f"holds the zero point {int(wrong[0])} where symmetric codes have {SYMMETRIC_ZERO}"
        )


def float16_scales(scales: Tensor) -> Tensor:
    """Convert scales of any float dtype to float16. Raises ValueError if that would change one."""
    if not bool(scales.isfinite().all()):
        raise ValueError("holds an infinity or a NaN")
    halves = scales.to(torch.float16)
    changed = scales[halves.to(scales.dtype) != scales]
    if changed.numel():
        raise ValueError(
            f"holds {changed[0].item()!r} in {scales.dtype}, which float16, as the kernels take "
            "scales, cannot hold exactly"
        )
    return halves


def input_perm_of(g_idx: Tensor | None, columns: int, group_size: int) -> Tensor | None:
    """Order of inputs [K] int64 by group; None if they are in that order already.

    Raises ValueError unless each of the K / group_size groups has group_size inputs.
    """
    if g_idx is None:
        return None
    groups = g_idx.to(torch.int64)
    wanted = torch.arange(columns) // group_size
    if torch.equal(groups, wanted):
        return None
    ordered, order = groups.sort(stable=True)
    if not torch.equal(ordered, wanted):
        raise ValueError(
            f"must name each of {columns // group_size} groups for {group_size} of the {columns} "
            "inputs"
        )
    return order


def to_int4(matrix: GptqMatrix, group_size: int) -> Int4Linear:
    """Convert a symmetric layer with checked zero points to the kernels' layout: bit-identical
    weights, columns sorted by group. Raises as `float16_scales` and `input_perm_of` do.
    """
    scales = float16_scales(matrix.scales).t().contiguous()
    order = input_perm_of(matrix.g_idx, CODES_PER_WORD * matrix.qweight.shape[0], group_size)
    if order is not None:
        return Int4Linear(reorder_codes(matrix.qweight, order), scales, order)
    # A little-endian word's bytes hold neighbouring inputs in the kernels' order.
    return Int4Linear(matrix.qweight.t().contiguous().view(torch.uint8), scales)


def dequantise(matrix: GptqMatrix, rows: Tensor) -> Tensor:
    """Dequantise rows `rows` [R] int64 of a symmetric layer, inputs in the model's order: [R, K]
    float32.
    """
    codes = unpack_codes(matrix.qweight[:, rows])
    columns, groups = codes.shape[0], matrix.scales.shape[0]
    g_idx = torch.arange(columns) // (columns // groups) if matrix.g_idx is None else matrix.g_idx
    scales = matrix.scales[:, rows].float()[g_idx.to(torch.int64)]
    return ((codes.float() - SYMMETRIC_ZERO) * scales).t()


def reorder_codes(qweight: Tensor, order: Tensor) -> Tensor:
    """Convert qweight [K / 8, N] int32 to rows of codes [N, K / 2] uint8, two per byte, low nibble
    first; column c is input order[c].
    """
    # Inputs along the first dimension, so whole rows are moved: [K / 2, N] bytes.
    pairs = qweight.view(torch.uint8).unflatten(1, (-1, 4)).transpose(1, 2).flatten(0, 1)

    def codes(inputs: Tensor) -> Tensor:
        shifts = (4 * (inputs % 2)).to(torch.uint8).unsqueeze(1)
        return (pairs.index_select(0, inputs // 2) >> shifts) & 0xF

    return (codes(order[0::2]) | (codes(order[1::2]) << 4)).t().contiguous()
