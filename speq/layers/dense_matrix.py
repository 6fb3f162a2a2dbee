"""Forms of dense matrices: plain weights, or records that decode to the same weights
(`speq.kernels.dense_ops`), by which products are bit-identical.
"""

from typing import Protocol

from torch import Tensor
from torch.nn import functional

from speq.kernels import ops


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
