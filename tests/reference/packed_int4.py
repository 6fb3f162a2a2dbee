"""What INT4 stands for, and how publishers pack it, in numpy.

A number of 32 bits holds eight codes, the first in its lowest bits. Codes of compressed-tensors
(`pack-quantized`) are signed numbers of 4 bits plus 8. Zero points are packed likewise along the
rows. GPTQ has all of it transposed, and in its first format 1 less in each zero point. AWQ packs
codes along the rows as well, and eight of them in an order of its own (`gemm`).
"""

import numpy as np

from tests.reference.scaled import bfloat16_bits

CODES, OFFSET = 8, 8
# From https://github.com/casper-hansen/AutoAWQ: what is in each four bits, from the lowest up.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed(codes: np.ndarray) -> np.ndarray:
    """Codes [N, K] from 0 to 15 as [N, K / 8] int32, rounded up."""
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns // CODES) * CODES), dtype=np.uint32)
    padded[:, :columns] = codes
    shifts = 4 * np.arange(CODES, dtype=np.uint32)
    numbers = (padded.reshape(rows, -1, CODES) << shifts).sum(2, dtype=np.uint32)
    return numbers.view(np.int32)


def packed_gptq(codes: np.ndarray, zeros: np.ndarray, less: int) -> tuple[np.ndarray, np.ndarray]:
    """qweight [K / 8, N] and qzeros [G, N / 8] of codes [N, K] and zero points [N, G].

    less  what each zero point is stored less; whole numbers are subtracted, with their borrows
    """
    words = packed(zeros.T).view(np.uint32).astype(np.int64) - less * 0x11111111
    return packed(codes).T.copy(), (words % (1 << 32)).astype(np.uint32).view(np.int32)


def packed_awq(codes: np.ndarray, zeros: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """qweight [K, N / 8] and qzeros [G, N / 8] of codes [N, K] and zero points [N, G]."""
    made = []
    for each in (codes.T, zeros.T):
        words = np.zeros((len(each), each.shape[1] // CODES), dtype=np.uint32)
        for place, output in enumerate(AWQ_ORDER):
            words |= each[:, output::CODES].astype(np.uint32) << np.uint32(4 * place)
        made.append(words.view(np.int32))
    return made[0], made[1]


def unpacked(numbers: np.ndarray, columns: int) -> np.ndarray:
    """The codes [N, columns] of numbers [N, columns / 8] int32."""
    shifts = 4 * np.arange(CODES, dtype=np.uint32)
    codes = numbers.view(np.uint32)[..., None] >> shifts & 15
    return codes.reshape(len(numbers), -1)[:, :columns].astype(np.int64)


def words(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> np.ndarray:
    """The bfloat16 words, uint16, of codes [N, K].

    scales  [N, G] float32 that 16 bits hold, of groups of K / G neighbours
    zeros   [N, G]: codes that stand for 0; None: all are 8
    """
    group = codes.shape[1] // scales.shape[1]
    by = OFFSET if zeros is None else zeros.repeat(group, 1)
    values = (codes - by).astype(np.float32) * scales.repeat(group, 1)
    return bfloat16_bits(values)
