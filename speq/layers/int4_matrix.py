"""A dense matrix in INT4 codes, or in two planes of codes, which make eight bits.

    weight = scale * code              code from -8 to 7
    weight = scale * (16 * high + low)  both from -8 to 7: numbers from -136 to 119

The planes are one INT4 matrix of twice the rows, those of the high plane first with 16 times the
scales, so that the INT4 kernel runs both. It rounds inputs to INT8 in blocks, so more than eight
bits of weights would be lost.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from speq.errors import Broken
from speq.kernels import ops
from speq.kernels.ops import Int4Pair, Int4Weight


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """A draft's matrix [N, K].

    weight  codes [N, K], or [2N, K], the high plane above the low one
    planes  1 or 2
    """

    weight: Int4Weight
    planes: int = 1

    def __post_init__(self) -> None:
        if self.planes not in (1, 2) or self.weight.outputs % self.planes:
            raise ValueError(f"{self.weight.outputs} rows are not {self.planes} planes of codes")

    @property
    def outputs(self) -> int:
        return self.weight.outputs // self.planes

    @property
    def columns(self) -> int:
        return self.weight.columns

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def words(self) -> Tensor:
        """Decode to float32, with inputs in the model's order."""
        planes = ops.unpack_int4(self.weight.qweight, self.weight.scales).chunk(self.planes)
        words = torch.stack(planes).sum(0)
        if self.weight.input_perm is None:
            return words
        return torch.empty_like(words).index_copy_(1, self.weight.input_perm.long(), words)

    @property
    def pair(self) -> Int4Pair:
        """Codes and scales of a matrix of one plane, which an exact matrix may be a residual of."""
        if self.planes != 1:
            raise Broken(f"codes of one plane were requested from a matrix of {self.planes}")
        return self.weight.qweight, self.weight.scales

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply inputs [..., K], rounded to INT8, by the matrix and add bias [N]: [..., N] of
        the inputs' dtype.
        """
        rows = inputs.reshape(-1, inputs.shape[-1])
        if self.planes == 1:
            outputs = ops.linear_of(rows, self.weight, inputs.dtype)
        else:
            high, low = ops.linear_of(rows, self.weight, torch.float32).chunk(2, dim=1)
            outputs = torch.add(high, low).to(inputs.dtype)
        if bias is not None:
            outputs += bias
        return outputs.view(*inputs.shape[:-1], -1)
