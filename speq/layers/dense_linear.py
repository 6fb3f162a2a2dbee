"""The modules that take the place of a model's dense layers, and of its embedding."""

from torch import Tensor, nn

from speq.layers.dense_matrix import DenseMatrix, ExactMatrix
from speq.layers.offloaded_experts import ActiveBackend


class DenseLinear(nn.Module):
    """An nn.Linear over a matrix as it is held.

    exact   the checkpoint's matrix
    bias    [outputs] or None, of both
    draft   in its place while a bank that drafts is under way; None: the exact one is
    switch  knows which bank is under way

    None of these is a parameter: what a forward pass asks for lies in the instance itself.
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
    """An nn.Embedding over a table as it is held.

    scale  what its rows are multiplied by, in their dtype; None: by nothing
    """

    def __init__(self, table: ExactMatrix, scale: Tensor | None = None) -> None:
        super().__init__()
        self.table = table
        self.scale = scale if scale is None else nn.Buffer(scale, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table.rows(ids)
        return rows if self.scale is None else rows * self.scale.to(rows.dtype)


def dense_linears(model: nn.Module) -> dict[str, DenseLinear]:
    """The dense layers of a model by the names of their modules, which are those on disk."""
    return {name: each for name, each in model.named_modules() if isinstance(each, DenseLinear)}
