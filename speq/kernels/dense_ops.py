"""Ops over compact dense matrices [N, K] of bfloat16: attention, MLPs, the head, embeddings.

`speq.kernels.reference_dense` defines what the ops compute. Products are bit-identical to
`ops.linear` with plain weights. For few input rows a kernel decodes weights on the fly; for many, a
plain copy exists for the duration of the product.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speq.kernels import library, many_rows
from speq.kernels.checks import EXACT_DTYPES, FLOAT_DTYPES, check_int4, check_tensor
from speq.kernels.compact_layout import CompactLayout
from speq.kernels.ops import Int4Pair, linear_rows
from speq.kernels.records import check_records, encode_whole

WORD = torch.bfloat16


@dataclass(frozen=True, slots=True)
class _Coded:
    """A matrix [rows, columns] in a record, over the codes in `pair`, if any."""

    rows: int
    columns: int
    record: Tensor
    pair: Int4Pair | None = None

    @property
    def codec(self) -> str:
        return "lossless" if self.pair is None else "residual"

    @property
    def codes(self) -> tuple[Tensor, ...]:
        """Arguments of ops after the record."""
        return self.pair or ()

    @property
    def sized(self) -> tuple[Tensor | int, ...]:
        """Arguments of ops that need the number of rows as well."""
        return self.pair or (self.rows,)


def encode_dense_lossless(
    weight: Tensor, prepare: Callable[[Tensor], None] = lambda record: None
) -> Tensor:
    """Encode a matrix losslessly into a record [R] uint8.

    weight   [N, K] bfloat16, on the CPU
    prepare  is given the record before it is written

    Raises SpeqError if it has more escapes than a record can index.
    """
    layout = _layout_of("weight", weight, lossless=True)
    return encode_whole("encode_dense_lossless", layout, weight, prepare=prepare)


def encode_dense_residual(
    weight: Tensor, pair: Int4Pair, prepare: Callable[[Tensor], None] = lambda record: None
) -> Tensor:
    """Encode a matrix's residual over its codes into a record [R] uint8; otherwise as
    `encode_dense_lossless`.

    pair  qweight [N, K / 2] uint8 and scales [N, K / group_size] float16, in the order of weight
    """
    layout = _layout_of("weight", weight, lossless=False)
    _check_pair(pair, weight.shape, weight.device)
    return encode_whole("encode_dense_residual", layout, weight, *pair, prepare=prepare)


def decode_dense_lossless(record: Tensor, weight_out: Tensor) -> None:
    """Decode a record into a matrix [N, K] of bfloat16."""
    _layout_of("weight_out", weight_out, lossless=True)
    rows, columns = weight_out.shape
    _decode(_lossless(record, rows, columns), weight_out)


def decode_dense_residual(record: Tensor, pair: Int4Pair, weight_out: Tensor) -> None:
    """Decode a record over its codes into a matrix [N, K] of bfloat16."""
    _layout_of("weight_out", weight_out, lossless=False)
    _check_pair(pair, weight_out.shape, record.device)
    _decode(_residual(record, pair), weight_out)


def linear_lossless(
    inputs: Tensor, record: Tensor, outputs: int, bias: Tensor | None = None
) -> Tensor:
    """Multiply inputs [..., K] by the matrix [outputs, K] of a record and add bias: [..., outputs].

    inputs  float32, float64, bfloat16 or float16, also the dtype of bias and result

    More than `linear_rows` rows, and float64, take `product_scratch_bytes` while they run. Raises
    ValueError, naming the argument, for any other dtype, shape, device or layout.
    """
    return _linear(inputs, _lossless(record, outputs, _columns(inputs)), bias)


def linear_residual(
    inputs: Tensor, record: Tensor, pair: Int4Pair, bias: Tensor | None = None
) -> Tensor:
    """Run `linear_lossless` over a residual record and its codes, whose rows are the outputs."""
    _check_pair(pair, (pair[0].shape[0], _columns(inputs)), record.device)
    return _linear(inputs, _residual(record, pair), bias)


def rows_lossless(record: Tensor, rows: int, columns: int, ids: Tensor) -> Tensor:
    """Look up rows ids [...], int64, of the matrix [rows, columns] of a record: [..., columns]
    bfloat16.

    Raises IndexError for an id out of range; on a GPU, which is not waited for, its row is NaN.
    """
    return _rows(_lossless(record, rows, columns), ids)


def rows_residual(record: Tensor, pair: Int4Pair, ids: Tensor) -> Tensor:
    """Run `rows_lossless` over a residual record and its codes."""
    _check_pair(pair, _shape_of(pair), record.device)
    return _rows(_residual(record, pair), ids)


def product_scratch_bytes(outputs: int, columns: int, dtype: torch.dtype) -> int:
    """Scratch bytes of a product of many rows of `dtype` by one matrix.

    They hold a plain copy, and another in the dtype of the product if that is not bfloat16. A
    product in blocks may sum in another order than the whole, so nothing less does.
    """
    wide = 0 if dtype == WORD else _product_dtype(dtype).itemsize
    return outputs * columns * (WORD.itemsize + wide)


def _columns(inputs: Tensor) -> int:
    if inputs.dim() == 0:
        raise ValueError("inputs has shape []; it must be [..., K]")
    return inputs.shape[-1]


def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of a product by bfloat16 weights, which are widened and never rounded."""
    return dtype if dtype == WORD else torch.promote_types(dtype, torch.float32)


def _linear(inputs: Tensor, matrix: _Coded, bias: Tensor | None) -> Tensor:
    device = matrix.record.device
    any_shape = (None,) * (inputs.dim() - 1)
    inputs = inputs.contiguous()  # slices of states may not be contiguous
    check_tensor("inputs", inputs, (*any_shape, matrix.columns), FLOAT_DTYPES, device)
    if bias is not None:
        check_tensor("bias", bias, (matrix.rows,), (inputs.dtype,), device)
    rows = inputs.numel() // matrix.columns
    if rows > linear_rows(inputs) or inputs.dtype not in EXACT_DTYPES:
        return _product_of_many(inputs, matrix, bias)
    out = inputs.new_empty(*inputs.shape[:-1], matrix.rows)
    if rows:
        flat, target = inputs.view(rows, -1), out.view(rows, -1)
        library.call(f"linear_{matrix.codec}", flat, matrix.record, *matrix.codes, bias, target)
    return out


def _product_of_many(inputs: Tensor, matrix: _Coded, bias: Tensor | None) -> Tensor:
    words = inputs.new_empty(matrix.rows, matrix.columns, dtype=WORD)
    _decode(matrix, words)
    dtype = _product_dtype(inputs.dtype)
    added = None if bias is None else bias.to(dtype)
    return many_rows.linear(inputs.to(dtype), words.to(dtype), added).to(inputs.dtype)


def _decode(matrix: _Coded, weight: Tensor) -> None:
    library.call(f"decode_dense_{matrix.codec}", matrix.record, *matrix.sized, 0, weight)


def _rows(matrix: _Coded, ids: Tensor) -> Tensor:
    device = matrix.record.device
    check_tensor("ids", ids, (None,) * ids.dim(), (torch.int64,), device)
    out = torch.empty(*ids.shape, matrix.columns, dtype=WORD, device=device)
    flat, target = ids.flatten(), out.view(-1, matrix.columns)
    library.call(f"rows_{matrix.codec}", matrix.record, *matrix.sized, flat, target)
    return out


def _lossless(record: Tensor, rows: int, columns: int) -> _Coded:
    layout = CompactLayout.of_matrix((rows, columns), lossless=True)
    check_records("record", record, 1, layout.fixed_bytes)
    return _Coded(rows, columns, record)


def _residual(record: Tensor, pair: Int4Pair) -> _Coded:
    rows, columns = _shape_of(pair)
    layout = CompactLayout.of_matrix((rows, columns), lossless=False)
    check_records("record", record, 1, layout.fixed_bytes)
    return _Coded(rows, columns, record, pair)


def _layout_of(name: str, weight: Tensor, lossless: bool) -> CompactLayout:
    check_tensor(name, weight, (None, None), (WORD,), weight.device)
    return CompactLayout.of_matrix(weight.shape, lossless)


def _shape_of(pair: Int4Pair) -> tuple[int, int]:
    return pair[0].shape[0], pair[0].shape[1] * 2


def _check_pair(pair: Int4Pair, shape: Sequence[int], device: torch.device) -> None:
    qweight, scales = pair
    check_tensor("qweight", qweight, (None, None), (torch.uint8,), device)
    check_tensor("scales", scales, (None, None), (torch.float16,), device)
    rows, columns = shape
    check_int4("", qweight, scales, rows, columns)
