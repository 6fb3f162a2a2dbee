"""An embedding whose rows are read from the checkpoint's file, as tokens ask for them.

A token needs one row, and a table of a real vocabulary takes 0.5 to 2 GB: experts get that memory.
Rows come through the page cache (`speq.files.row_table`).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from speq.files.row_table import RowTable, TablePart
from speq.layers.dense_linear import DenseEmbedding
from speq.models.resident import MappedWeights


class RowsOnDisk:
    """A matrix [outputs, columns] of a file, of which rows are read."""

    nbytes = 0

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self.outputs, self.columns = table.rows, table.width

    def rows(self, ids: Tensor) -> Tensor:
        return self._table.read(ids)

    def words(self) -> Tensor:
        return self.rows(torch.arange(self.outputs))

    def product(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(inputs, self.words(), bias)

    def close(self) -> None:
        self._table.close()


def leave_table(model: nn.Module, mapped: MappedWeights) -> dict[str, RowsOnDisk]:
    """Leave the embedding of a model that was just loaded on disk: by its module's name, what gives
    its rows. Empty where no file has them as they are computed with.
    """
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    place = mapped.whole(embedding.weight.data)
    if place is None:
        return {}
    file, info = place
    rows, width = info.shape
    table = RowTable([TablePart(file, info.offset, rows)], width, info.dtype)
    embedding.weight.data = embedding.weight.new_empty(0)
    name = next(name for name, module in model.named_modules() if module is embedding)
    return {name: RowsOnDisk(table)}


def close_table(model: nn.Module) -> None:
    """End the threads that read a model's embedding."""
    for module in model.modules():
        if isinstance(module, DenseEmbedding) and isinstance(module.table, RowsOnDisk):
            module.table.close()
