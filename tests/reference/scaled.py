"""What codes under scales stand for where models are published in FP8, MXFP4 or NVFP4."""

import numpy as np

# Rows and columns of FP8 that have a scale together.
FP8_BLOCK = 128
# Neighbours of MXFP4 that have one.
MXFP4_BLOCK = 32
# The same of NVFP4.
NVFP4_BLOCK = 16
# What the codes 0 to 7 of both (e2m1) stand for; those from 8 on are the same below zero.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def e4m3_values() -> np.ndarray:
    """What each of the 256 codes stands for, in float32."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    normal = (1 + mantissas / 8) * 2.0 ** (exponents - 7.0)
    values = np.where(exponents > 0, normal, mantissas / 8 * 2.0**-6)
    values[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes > 127, -values, values).astype(np.float32)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """The bits of float32 values rounded to bfloat16, ties to even."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def fp8_words(
    codes: np.ndarray, scales: np.ndarray, blocks: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK)
) -> np.ndarray:
    """The bfloat16 words, uint16, of codes [N, K] uint8 under scales of their blocks, float32.

    blocks  of so many rows and columns; 0: of all
    """
    rows, columns = codes.shape
    down, across = blocks[0] or rows, blocks[1] or columns
    spread = scales.repeat(down, 0)[:rows].repeat(across, 1)[:, :columns]
    return bfloat16_bits(e4m3_values()[codes] * spread)


def mxfp4_values(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[N, K] of codes [N, K / 2] uint8, the low nibble first, under exponents [N, K / 32] uint8
    that are 127 too large.
    """
    scale = np.repeat(2.0 ** (scales.astype(np.float64) - 127), MXFP4_BLOCK, axis=1)
    return e2m1_values(packed).astype(np.float64) * scale


def e2m1_values(packed: np.ndarray) -> np.ndarray:
    """[N, K] float32 of codes [N, K / 2] uint8, the low nibble first."""
    codes = np.empty((packed.shape[0], 2 * packed.shape[1]), dtype=np.int64)
    codes[:, 0::2], codes[:, 1::2] = packed % 16, packed // 16
    return np.where(codes < 8, E2M1[codes % 8], -E2M1[codes % 8])


def nvfp4_words(
    packed: np.ndarray, scales: np.ndarray, of_matrix: np.float32, divides: bool
) -> np.ndarray:
    """The bfloat16 words, uint16, of codes [N, K / 2] uint8, the low nibble first.

    scales     [N, K / 16] uint8: codes of e4m3, which are first multiplied by of_matrix, or divided
    """
    values = e4m3_values()[scales]
    by = values / of_matrix if divides else values * of_matrix
    return bfloat16_bits(e2m1_values(packed) * by.repeat(NVFP4_BLOCK, 1))
