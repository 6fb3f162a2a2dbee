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
class RecordMatrix:
    """A matrix [outputs, columns] in a record [R] uint8: without codes lossless, about 11 bits a
    weight; over codes its residual, under 9 bits.

    pair  qweight [N, K / 2] uint8 and scales [N, K / group_size] float16, in the order of weights;
          their bytes are counted for the draft's matrix

    Raises ValueError, naming the argument, for any other dtype, shape, device or layout.
    """

    record: Tensor
    outputs: int
    columns: int
    pair: Int4Pair | None = None

    def __post_init__(self) -> None:
        shape = self.outputs, self.columns
        if self.pair is not None:
            _check_pair(self.pair, shape, self.record.device)
        layout = CompactLayout.of_matrix(shape, lossless=self.pair is None)
        check_records("record", self.record, 1, layout.fixed_bytes)

    @property
    def nbytes(self) -> int:
        return self.record.nbytes

    @property
    def codec(self) -> str:
        return "lossless" if self.pair is None else "residual"

    @property
    def sized(self) -> tuple[Tensor | int, ...]:
        """Arguments of ops that need the number of rows as well as codes."""
        return self.pair or (self.outputs,)

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply inputs [..., columns] by the matrix and add bias [outputs]: [..., outputs].

        inputs  float32, float64, bfloat16 or float16, also the dtype of bias and result

        More than `linear_rows` rows, and float64, take `product_scratch_bytes` while they run.
        Raises ValueError, naming the argument, for any other dtype, shape, device or layout, and
        the op's RuntimeError for few rows of bfloat16, which it checks itself.
        """
        rows, most = inputs.numel() // self.columns, linear_rows(inputs)
        if not 0 < rows <= most or inputs.dtype != WORD:  # the op checks what drafts give it
            self._check(inputs, bias)
        if rows > most or inputs.dtype not in EXACT_DTYPES:
            dtype = _product_dtype(inputs.dtype)
            added = None if bias is None else bias.to(dtype)
            words = self.words().to(dtype)
            return many_rows.linear(inputs.to(dtype), words, added).to(inputs.dtype)
        out = inputs.new_empty(*inputs.shape[:-1], self.outputs)
        if rows:
            # Slices of states may not be contiguous.
            flat, target = inputs.contiguous().view(rows, -1), out.view(rows, -1)
            library.call(
                f"linear_{self.codec}", flat, self.record, *(self.pair or ()), bias, target
            )
        return out

    def _check(self, inputs: Tensor, bias: Tensor | None) -> None:
        device = self.record.device
        shape = (*(None,) * (inputs.dim() - 1), self.columns)
        check_tensor("inputs", inputs.contiguous(), shape, FLOAT_DTYPES, device)
        if bias is not None:
            check_tensor("bias", bias, (self.outputs,), (inputs.dtype,), device)

    def words(self) -> Tensor:
        """Decode the matrix to bfloat16."""
        words = self.record.new_empty(self.outputs, self.columns, dtype=WORD)
        self.decode(words)
        return words

    def decode(self, words: Tensor) -> None:
        """Decode the matrix into `words`, bfloat16."""
        check_tensor("words", words, (self.outputs, self.columns), (WORD,), self.record.device)
        library.call(f"decode_dense_{self.codec}", self.record, *self.sized, 0, words)

    def rows(self, ids: Tensor) -> Tensor:
        """Look up rows [..., columns] bfloat16 by their ids [...] int64.

        Raises IndexError for an id out of range; on a GPU, which is not waited for, its row is NaN.
        """
        device = self.record.device
        check_tensor("ids", ids, (None,) * ids.dim(), (torch.int64,), device)
        out = torch.empty(*ids.shape, self.columns, dtype=WORD, device=device)
        flat, target = ids.flatten(), out.view(-1, self.columns)
        library.call(f"rows_{self.codec}", self.record, *self.sized, flat, target)
        return out


def encode_dense(
    weight: Tensor,
    pair: Int4Pair | None = None,
    prepare: Callable[[Tensor], None] = lambda record: None,
) -> Tensor:
    """Encode a matrix losslessly, or its residual over codes, into a record [R] uint8.

    weight   [N, K] bfloat16, on the CPU; pair: see `RecordMatrix`
    prepare  is given the record before it is written

    Raises SpeqError if it has more escapes than a record can index.
    """
    check_tensor("weight", weight, (None, None), (WORD,), weight.device)
    layout = CompactLayout.of_matrix(weight.shape, lossless=pair is None)
    if pair is None:
        return encode_whole("encode_dense_lossless", layout, weight, prepare=prepare)
    _check_pair(pair, weight.shape, weight.device)
    return encode_whole("encode_dense_residual", layout, weight, *pair, prepare=prepare)


def product_scratch_bytes(outputs: int, columns: int, dtype: torch.dtype) -> int:
    """Scratch bytes of a product of many rows of `dtype` by one matrix.

    They hold a plain copy, and another in the dtype of the product if that is not bfloat16. A
    product in blocks may sum in another order than the whole, so nothing less does.
    """
    wide = 0 if dtype == WORD else _product_dtype(dtype).itemsize
    return outputs * columns * (WORD.itemsize + wide)


def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of a product by bfloat16 weights, which are widened and never rounded."""
    return dtype if dtype == WORD else torch.promote_types(dtype, torch.float32)


def _check_pair(pair: Int4Pair, shape: Sequence[int], device: torch.device) -> None:
    qweight, scales = pair
    check_tensor("qweight", qweight, (None, None), (torch.uint8,), device)
    check_tensor("scales", scales, (None, None), (torch.float16,), device)
    rows, columns = shape
    check_int4("", qweight, scales, rows, columns)
