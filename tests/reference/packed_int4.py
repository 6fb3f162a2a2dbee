"""What INT4 stands for as compressed-tensors packs it (`pack-quantized`), in numpy.

A number of 32 bits holds eight codes, the first in its lowest bits. Codes are signed numbers of 4
bits plus 8. Zero points are packed likewise along the rows.
"""

import numpy as np

from tests.reference.scaled import bfloat16_bits

CODES, OFFSET = 8, 8


def packed(codes: np.ndarray) -> np.ndarray:
    """Codes [N, K] from 0 to 15 as [N, K / 8] int32, rounded up."""
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns // CODES) * CODES), dtype=np.uint32)
    padded[:, :columns] = codes
    shifts = 4 * np.arange(CODES, dtype=np.uint32)
    numbers = (padded.reshape(rows, -1, CODES) << shifts).sum(2, dtype=np.uint32)
    return numbers.view(np.int32)


def unpacked(numbers: np.ndarray, columns: int) -> np.ndarray:
    """The codes [N, columns] of numbers [N, columns / 8] int32."""
    shifts = 4 * np.arange(CODES, dtype=np.uint32)
    codes = numbers.view(np.uint32)[..., None] >> shifts & 15
    return codes.reshape(len(numbers), -1)[:, :columns].astype(np.int64)


def words(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
    """The bfloat16 words, uint16, of codes [N, K].

    scales  [N, G] float32 that bfloat16 holds, of groups of K / G neighbours
    zeros   [N, G]: codes that stand for 0; None: all are 8
    """
    group = codes.shape[1] // scales.shape[1]
    by = OFFSET if zeros is None else zeros.repeat(group, 1)
    values = (codes - by).astype(np.float32) * scales.repeat(group, 1)
    return bfloat16_bits(values)
