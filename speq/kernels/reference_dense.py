"""Plain torch versions of the ops over compact dense matrices [N, K].

A dense matrix has a record of its own, with the sections that an expert's matrices have.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from speq.kernels.compact_layout import CompactLayout
from speq.kernels.reference import check_ids
from speq.kernels.reference_compact import (
    decode_lossless_matrices,
    decode_residual_matrices,
    encode_lossless_matrices,
    encode_residual_matrices,
)


def encode_dense_lossless_out(weight: Tensor, record: Tensor, nbytes: Tensor) -> None:
    """Encode a matrix losslessly into `record`, if it has room.

    weight  [N, K] bfloat16
    record  [R] uint8; nbytes [1] int64: bytes of the record, whether it fits or not
    """
    layout = CompactLayout.of_matrix(weight.shape, lossless=True)
    encode_lossless_matrices(layout, [weight], record, nbytes)


def encode_dense_residual_out(
    weight: Tensor, qweight: Tensor, scales: Tensor, record: Tensor, nbytes: Tensor
) -> None:
    """Encode a matrix's residual over INT4 codes into `record`, if it has room.

    qweight, scales  codes of the same matrix, see `linear_int4`
    """
    layout = CompactLayout.of_matrix(weight.shape, lossless=False)
    encode_residual_matrices(layout, [weight], [(qweight, scales)], record, nbytes)


def decode_dense_lossless_out(record: Tensor, rows: int, first: int, weight: Tensor) -> None:
    """Decode rows from `first` on of a matrix of `rows` rows, bit-exactly, into weight [n, K].

    first  a multiple of 4; so is first + n, unless it is `rows`
    """
    weight.copy_(lossless_words(record, rows, weight.shape[1])[first : first + len(weight)])


def decode_dense_residual_out(
    record: Tensor, qweight: Tensor, scales: Tensor, first: int, weight: Tensor
) -> None:
    """Decode rows of a residual record over its codes, as above."""
    weight.copy_(residual_words(record, qweight, scales)[first : first + len(weight)])


def linear_lossless_out(inputs: Tensor, record: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Multiply inputs [R, K] by the matrix [N, K] of a record and add bias [N], into out [R, N].

    Inputs, bias and out have one dtype. Weights are widened, which is exact, products accumulated
    in float32 at least, and sums with the bias rounded once.
    """
    _linear(inputs, lossless_words(record, out.shape[1], inputs.shape[1]), bias, out)


def linear_residual_out(
    inputs: Tensor,
    record: Tensor,
    qweight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out: Tensor,
) -> None:
    """Run `linear_lossless_out` over a residual record and its codes."""
    _linear(inputs, residual_words(record, qweight, scales), bias, out)


def rows_lossless_out(record: Tensor, rows: int, ids: Tensor, out: Tensor) -> None:
    """Write row ids[i] of a matrix of `rows` rows to row i of out [n, K], bfloat16.

    Raises IndexError if an id names no row.
    """
    check_ids("ids", ids, rows, "rows")
    out.copy_(lossless_words(record, rows, out.shape[1])[ids])


def rows_residual_out(
    record: Tensor, qweight: Tensor, scales: Tensor, ids: Tensor, out: Tensor
) -> None:
    """Run `rows_lossless_out` over a residual record and its codes."""
    check_ids("ids", ids, len(qweight), "rows")
    out.copy_(residual_words(record, qweight, scales)[ids])


def lossless_words(record: Tensor, rows: int, columns: int) -> Tensor:
    """Decode a lossless record to [rows, columns] bfloat16."""
    words = torch.empty(rows, columns, dtype=torch.bfloat16, device=record.device)
    layout = CompactLayout.of_matrix(words.shape, lossless=True)
    decode_lossless_matrices(layout, record, [words])
    return words


def residual_words(record: Tensor, qweight: Tensor, scales: Tensor) -> Tensor:
    """Decode a residual record over its codes to [N, K] bfloat16."""
    rows, columns = qweight.shape[0], qweight.shape[1] * 2
    words = torch.empty(rows, columns, dtype=torch.bfloat16, device=record.device)
    layout = CompactLayout.of_matrix(words.shape, lossless=False)
    decode_residual_matrices(layout, record, [(qweight, scales)], [words])
    return words


def _linear(inputs: Tensor, words: Tensor, bias: Tensor | None, out: Tensor) -> None:
    wide = torch.promote_types(inputs.dtype, torch.float32)
    added = None if bias is None else bias.to(wide)
    out.copy_(F.linear(inputs.to(wide), words.to(wide), added))
