"""Matrices outside the experts, as they are held: words, or records that give back the words.

Products by records are bit for bit those by the words. `speq.kernels.dense_ops` has the formats.
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
        """Bytes of memory that no other matrix is charged with."""

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """inputs [..., columns] by the matrix, plus bias [outputs]: [..., outputs]."""

    def words(self) -> Tensor:
        """The matrix in the model's dtype, perhaps as a view of what is held."""


class ExactMatrix(DenseMatrix, Protocol):
    """A matrix of the checkpoint, which may be an embedding's."""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows [..., columns] by their ids [...] int64."""


class RawMatrix:
    """Words in the model's dtype, [outputs, columns]."""

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
    """About 11 bits a bfloat16 weight; record [R] uint8."""

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
        # What the op checks of a record and of a layer's inputs is known here.
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
    """What INT4 codes do not say of a bfloat16 matrix: under 9 bits a weight; record [R] uint8.

    pair  the codes, which a draft's matrix holds and is charged with
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
