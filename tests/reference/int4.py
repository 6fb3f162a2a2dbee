"""INT4 codes, and rows as INT4 products see them."""

import numpy as np

# So many neighbouring inputs have a scale of INT8.
BLOCK = 32


def codes_of(qweight: np.ndarray) -> np.ndarray:
    """[N, K / 2] uint8 to codes [N, K], -8 to 7: two to a byte, the low nibble first."""
    codes = np.empty((qweight.shape[0], 2 * qweight.shape[1]), dtype=np.int64)
    codes[:, 0::2], codes[:, 1::2] = qweight % 16, qweight // 16
    return codes - 8


def spread(scales: np.ndarray, columns: int) -> np.ndarray:
    """The scale of each of a row's columns: [N, columns], of groups [N, G]."""
    return np.repeat(scales.astype(np.float64), columns // scales.shape[1], axis=1)


def unpacked(qweight: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Code times scale: [N, K], of [N, K / 2] and [N, G]."""
    codes = codes_of(qweight)
    return codes * spread(scales, codes.shape[1])


def rounded(row: np.ndarray) -> np.ndarray:
    """Inputs [K] rounded to INT8: of each block the largest magnitude is 127 steps.

    In float32, as the kernels are to do it: there it is decided on which side of the edge between
    two codes a value lies.
    """
    out = np.empty(len(row))
    for at in range(0, len(row), BLOCK):
        block = row[at : at + BLOCK].astype(np.float32)
        largest = np.abs(block).max()
        if largest == 0:
            out[at : at + BLOCK] = 0
            continue
        codes = np.round(block * (np.float32(127) / largest))
        out[at : at + BLOCK] = codes.astype(np.float64) * float(largest / np.float32(127))
    return out
