"""Conversion between codes with scales and plain weights, in plain torch.

A weight is its code's value times its scale, both in float32, rounded to bfloat16, as
transformers dequantizes such a checkpoint.
"""

from itertools import pairwise

import torch
from torch import Tensor

from speq.kernels.scaled_layout import (
    FP8_BLOCK,
    MXFP4_BLOCK,
    NVFP4_BLOCK,
    ZERO_ROWS,
    Section,
    blocks_of,
)

# Values of MXFP4 codes: e2m1, the highest bit is the sign.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Half of the least scale is 2^-128, a subnormal float32 with exponent 0.
LEAST_HALF, MANTISSA_BITS = 1 << 21, 23
# Rows whose products are in float32 at a time.
ROWS = 512
# Largest values of codes.
E4M3_MOST, E2M1_MOST = 448.0, 6.0
# The largest power of 2 of e4m3, and the inverse of the least.
E4M3_MOST_POWER, E4M3_LEAST_PART = 256.0, 512.0
E8M0_BIAS, E8M0_MOST = 127, 254
# The INT4 code of 0 where there are no zero points, and the largest difference from it.
INT4_ZERO, INT4_MOST = 8, 7


def fp8_words(
    codes: Tensor, scales: Tensor, block_rows: int = FP8_BLOCK, block_columns: int = FP8_BLOCK
) -> Tensor:
    """Dequantize codes [N, K] float8_e4m3fn, or their bytes, to [N, K] bfloat16.

    scales  [N / block_rows, K / block_columns] float32, rounded up: scales of blocks of rows and
            columns, of which the last may be shorter; a block of 0 has all of them
    """
    codes = codes.view(torch.float8_e4m3fn)
    rows, columns = codes.shape
    words = torch.empty(rows, columns, dtype=torch.bfloat16, device=codes.device)
    across = scales.float().repeat_interleave(block_columns or columns, dim=1)[:, :columns]
    for first in range(0, rows, ROWS):
        at = torch.arange(first, min(first + ROWS, rows), device=codes.device)
        spread = across[at // (block_rows or rows)]
        words[first : first + ROWS] = codes[first : first + ROWS].float() * spread
    return words


def mxfp4_words(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantize codes [N, K / 2] uint8, two per byte, the low half first, to [N, K] bfloat16.

    scales  [N, K / block] uint8: exponents of 2, with a bias of 127
    """
    rows, words = codes.shape[0], []
    for first in range(0, rows, ROWS):
        part, exponents = codes[first : first + ROWS], scales[first : first + ROWS]
        doubled = 2 * e2m1_values(part).unflatten(1, (scales.shape[1], -1))
        spread = doubled * e8m0_halves(exponents).unsqueeze(2)
        words.append(spread.flatten(1).bfloat16())
    return torch.cat(words)


def int4_words(
    codes: Tensor, scales: Tensor, zeros: Tensor | None = None, order: Tensor | None = None
) -> Tensor:
    """Dequantize codes [N, K / 2] uint8, two per byte, the low half first, to [N, K] bfloat16.

    scales  [N, K / G] bfloat16 or float16, of groups of G neighbours
    zeros   [N / 8, K / G] int32, rounded up: codes that stand for 0, of eight rows, the first in
            the lowest bits; None: all are 8
    order   [K] int32, the group of each column; None: groups are of neighbours
    """
    rows = codes.shape[0]
    words = torch.empty(rows, 2 * codes.shape[1], dtype=torch.bfloat16, device=codes.device)
    groups = slice(None) if order is None else order.long()
    for first in range(0, rows, ROWS):
        part, of_rows = codes[first : first + ROWS], scales[first : first + ROWS, groups]
        values = torch.stack([part & 0xF, part >> 4], dim=2).flatten(1).float()
        by_group = values.unflatten(1, (of_rows.shape[1], -1))
        if zeros is None:
            by_group -= INT4_ZERO
        else:
            at = torch.arange(first, first + len(part), device=codes.device)
            shifts = (at % ZERO_ROWS * 4).unsqueeze(1)
            of_groups = zeros[at // ZERO_ROWS].long() >> shifts & 0xF
            by_group -= of_groups[:, groups].unsqueeze(2)
        words[first : first + ROWS] = (by_group * of_rows.float().unsqueeze(2)).flatten(1)
    return words


def nvfp4_words(codes: Tensor, scales: Tensor, of_matrix: Tensor, divides: bool) -> Tensor:
    """Dequantize codes [N, K / 2] uint8, two per byte, the low half first, to [N, K] bfloat16.

    scales     [N, K / 16] float8_e4m3fn, or their bytes
    of_matrix  float32, by which scales are multiplied; divides: by which they are divided
    """
    of_matrix, rows, words = of_matrix.reshape(()), codes.shape[0], []
    for first in range(0, rows, ROWS):
        part = codes[first : first + ROWS]
        of_rows = scales[first : first + ROWS].view(torch.float8_e4m3fn).float()
        of_rows = of_rows / of_matrix if divides else of_rows * of_matrix
        by_block = e2m1_values(part).unflatten(1, (scales.shape[1], -1))
        words.append((by_block * of_rows.unsqueeze(2)).flatten(1).bfloat16())
    return torch.cat(words)


def e2m1_values(codes: Tensor) -> Tensor:
    """Values [N, K] float32 of codes [N, K / 2] uint8, two per byte, the low half first."""
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=codes.device)
    return values[torch.stack([codes & 0xF, codes >> 4], dim=2).flatten(1).long()]


def e8m0_halves(scales: Tensor) -> Tensor:
    """Halves of the powers of 2 of scales [...] uint8, in float32, which cannot hold the largest
    power.
    """
    exponents = scales.int()
    bits = torch.where(exponents < 2, LEAST_HALF << exponents, exponents - 1 << MANTISSA_BITS)
    return bits.view(torch.float32)


def fp8_codes(
    words: Tensor, block_rows: int = FP8_BLOCK, block_columns: int = FP8_BLOCK
) -> tuple[Tensor, Tensor]:
    """Quantize weights [N, K] to the nearest codes [N, K] uint8, with powers of 2 as block
    scales; a block of 0 has all rows, or columns.
    """
    rows, columns = words.shape
    scales = torch.ones(blocks_of(rows, block_rows), blocks_of(columns, block_columns))
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    down, over = block_rows or rows, block_columns or columns
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(i * down, (i + 1) * down), slice(j * over, (j + 1) * over)
            values = words[part].float()
            scale = power_of_2(values.abs().amax() / E4M3_MOST)
            scales[i, j] = scale
            codes[part] = (values / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, scales


def mxfp4_codes(words: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize weights [N, K] to the nearest codes [N, K / 2] uint8 and scales [N, K / 32]
    uint8.
    """
    values = words.float().unflatten(1, (-1, MXFP4_BLOCK))
    factors = power_of_2(values.abs().amax(2) / E2M1_MOST)
    scales = (factors.log2().round() + E8M0_BIAS).clamp(0, E8M0_MOST)
    return e2m1_codes((values / factors.unsqueeze(2)).flatten(1)), scales.to(torch.uint8)


def nvfp4_codes(words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize weights [N, K] to the nearest codes [N, K / 2] uint8, scales [N, K / 16] float8 and
    a scale of the matrix [1] float32; scales are powers of 2, by which it is multiplied.
    """
    values = words.float().unflatten(1, (-1, NVFP4_BLOCK))
    factors = power_of_2(values.abs().amax(2) / E2M1_MOST)
    # Of its powers of 2, e4m3 has those from 2^-9 to 2^8.
    of_matrix = factors.max().reshape(1) / E4M3_MOST_POWER
    scales = (factors / of_matrix).clamp(min=1 / E4M3_LEAST_PART)
    scaled = (values / (scales * of_matrix).unsqueeze(2)).flatten(1)
    return e2m1_codes(scaled), scales.to(torch.float8_e4m3fn), of_matrix


def e2m1_codes(scaled: Tensor) -> Tensor:
    """Nearest codes [N, K / 2] uint8 of values [N, K], two per byte, the low half first."""
    magnitudes, codes = scaled.abs(), scaled.signbit().to(torch.uint8) * 8
    # Several times faster than a search in sorted values.
    for value, above in pairwise(E2M1_VALUES):
        codes += magnitudes > (value + above) / 2
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def int4_codes(words: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Quantize weights [N, K] to codes [N, K / 2] uint8, with powers of 2 as scales [N, K / G]
    bfloat16; without zero points.
    """
    values = words.float().unflatten(1, (-1, group_size))
    factors = power_of_2(values.abs().amax(2) / INT4_MOST)
    codes = (values / factors.unsqueeze(2)).round() + INT4_ZERO
    codes = codes.flatten(1).to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), factors.bfloat16()


def power_of_2(values: Tensor) -> Tensor:
    """Round up to powers of 2; 0 becomes 1."""
    mantissas, exponents = values.frexp()
    exponents = exponents - (mantissas == 0.5).int()
    return torch.where(values > 0, torch.ones_like(values).ldexp(exponents), 1.0)


def part_of(record: Tensor, section: Section) -> Tensor:
    """View the bytes of a section."""
    return record[section.at : section.at + section.nbytes]


def tensor_of(record: Tensor, section: Section) -> Tensor:
    """View a section as what it is."""
    return part_of(record, section).view(section.dtype).view(section.shape)
