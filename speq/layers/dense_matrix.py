"""Forms of dense matrices: plain weights, or packed ones that decode to the same weights.

Products by packed matrices are bit-identical to those by plain weights. `speq.kernels.dense_ops`
has the formats.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from speq.kernels import dense_ops, library, ops
from speq.kernels.ops import Int4Pair, linear_rows


class DenseMatrix(Protocol):
    """A matrix [outputs, columns] of a dense layer."""

    @property
    def outputs(self) -> int: ...

    @property
    def columns(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are not counted for another matrix."""

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply inputs [..., columns] by the matrix and add bias [outputs]: [..., outputs]."""

    def words(self) -> Tensor:
        """Decode the matrix to the model's dtype; possibly a view."""


class ExactMatrix(DenseMatrix, Protocol):
    """A matrix of the checkpoint, possibly an embedding's."""

    def rows(self, ids: Tensor) -> Tensor:
        """Look up rows [..., columns] by their ids [...] int64."""


class RawMatrix:
    """Plain weights in the model's dtype, [outputs, columns]."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.outputs, self.columns = weight.shape
        self._linear = ops.linear if weight.is_cpu else functional.linear

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        return self._linear(inputs, self.weight, bias)

    def words(self) -> Tensor:
        return self.weight

    def rows(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight)


@dataclass(frozen=True, slots=True)
class LosslessMatrix:
    """A losslessly packed matrix: about 11 bits a bfloat16 weight; record [R] uint8."""

    record: Tensor
    outputs: int
    columns: int

    @property
    def nbytes(self) -> int:
        return self.record.nbytes

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        rows = inputs.numel() // self.columns
        if not 0 < rows <= linear_rows(inputs) or inputs.dtype != torch.bfloat16:
            return dense_ops.linear_lossless(inputs, self.record, self.outputs, bias)
        # The op's checks of a record and of inputs are known to hold here.
        out = inputs.new_empty(*inputs.shape[:-1], self.outputs)
        flat = inputs.contiguous().view(rows, -1)
        library.call("linear_lossless", flat, self.record, bias, out.view(rows, -1))
        return out

    def words(self) -> Tensor:
        shape, device = (self.outputs, self.columns), self.record.device
        words = torch.empty(shape, dtype=torch.bfloat16, device=device)
        dense_ops.decode_dense_lossless(self.record, words)
        return words

    def rows(self, ids: Tensor) -> Tensor:
        return dense_ops.rows_lossless(self.record, self.outputs, self.columns, ids)


@dataclass(frozen=True, slots=True)
class ResidualMatrix:
    """A residual over INT4 codes: under 9 bits a bfloat16 weight; record [R] uint8.

    pair  the codes, whose bytes are counted for the draft's matrix
    """

    record: Tensor
    pair: Int4Pair

    @property
    def outputs(self) -> int:
        return self.pair[0].shape[0]

    @property
    def columns(self) -> int:
        return 2 * self.pair[0].shape[1]

    @property
    def nbytes(self) -> int:
        return self.record.nbytes

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        return dense_ops.linear_residual(inputs, self.record, self.pair, bias)

    def words(self) -> Tensor:
        shape, device = (self.outputs, self.columns), self.record.device
        words = torch.empty(shape, dtype=torch.bfloat16, device=device)
        dense_ops.decode_dense_residual(self.record, self.pair, words)
        return words

    def rows(self, ids: Tensor) -> Tensor:
        return dense_ops.rows_residual(self.record, self.pair, ids)
