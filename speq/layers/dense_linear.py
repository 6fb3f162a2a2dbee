"""Modules that replace a model's dense layers and its embedding."""

from torch import Tensor, nn

from speq.layers.dense_matrix import DenseMatrix, ExactMatrix
from speq.layers.offloaded_experts import ActiveBackend


class DenseLinear(nn.Module):
    """An nn.Linear over a matrix in any form.

    exact   the checkpoint's matrix
    bias    [outputs] or None, of both matrices
    draft   used instead in passes of a draft backend; None: the exact one is
    switch  knows the current backend

    None of these is a parameter: plain attributes are faster to read in a pass.
    """

    draft: DenseMatrix | None

    def __init__(self, exact: ExactMatrix, bias: Tensor | None, switch: ActiveBackend) -> None:
        super().__init__()
        self.exact = exact
        self.bias = bias
        self.draft = None
        self.switch = switch

    def forward(self, inputs: Tensor) -> Tensor:
        if self.draft is not None and self.switch.drafting:
            return self.draft.product(inputs, self.bias)
        return self.exact.product(inputs, self.bias)

    def extra_repr(self) -> str:
        return f"{self.exact.columns}, {self.exact.outputs}, {type(self.exact).__name__}"


class DenseEmbedding(nn.Module):
    """An nn.Embedding over a table in any form.

    scale  factor of its rows, a tensor in their dtype; None: no scaling
    """

    def __init__(self, table: ExactMatrix, scale: Tensor | float | None = None) -> None:
        super().__init__()
        self.table = table
        if isinstance(scale, Tensor):
            scale = nn.Buffer(scale, persistent=False)
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        rows, scale = self.table.rows(ids), self.scale
        if scale is None:
            return rows
        return rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)


def dense_linears(model: nn.Module) -> dict[str, DenseLinear]:
    """Dense layers of a model by module name, which is also their name on disk."""
    return {name: each for name, each in model.named_modules() if isinstance(each, DenseLinear)}
