"""Dense layers and embeddings, as they are held."""

import pytest
import torch
from torch import Tensor, nn

from speq.kernels import dense_ops, ops
from speq.layers.dense_linear import DenseLinear
from speq.layers.dense_matrix import LosslessMatrix, RawMatrix, ResidualMatrix
from speq.layers.offloaded_experts import BankSwitch
from speq.models.dense import held_bytes, hold_dense
from speq.routing import Route


class Bank:
    """Experts that add nothing."""

    def __init__(self, drafts: bool) -> None:
        self.drafts = drafts

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        return torch.zeros_like(hidden_states)


def test_modules_of_torch_are_replaced_and_those_derived_from_them_are_not() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 6), Special(6, 8), nn.Linear(8, 5))
    model[3].weight = model[0].weight
    ids = torch.tensor([[4, 0, 1]])
    with torch.no_grad():
        before = model(ids)
        nbytes = sum(tensor.nbytes for tensor in model.parameters())
        hold_dense(model, BankSwitch(), {})
        torch.testing.assert_close(model(ids), before)
    kinds = [type(layer).__name__ for layer in model]
    assert kinds == ["DenseEmbedding", "DenseLinear", "Special", "DenseLinear"]
    assert model[0].table is model[3].exact
    assert held_bytes(model) + sum(tensor.nbytes for tensor in model.parameters()) == nbytes


def test_a_draft_has_matrices_of_its_own() -> None:
    exact, draft = RawMatrix(torch.eye(4)), RawMatrix(2 * torch.eye(4))
    switch, inputs = BankSwitch(), torch.ones(1, 4)
    layer = DenseLinear(exact, torch.ones(4), switch)

    def under(bank: Bank | None) -> float:
        switch.turn(bank)
        return float(layer(inputs)[0, 0])

    banks = [None, Bank(drafts=False), Bank(drafts=True)]
    assert [under(bank) for bank in banks] == [2, 2, 2]
    layer.draft = draft
    assert [under(bank) for bank in banks] == [2, 2, 3]


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_products_by_records_are_those_by_words(rows: int) -> None:
    generator = torch.Generator().manual_seed(18)
    words = torch.randn(24, 64, generator=generator).bfloat16()
    inputs = torch.randn(2, rows, 64, generator=generator).bfloat16()
    bias = torch.randn(24, generator=generator).bfloat16()
    ids = torch.tensor([[0, 23], [7, 7]])
    pair = ops.quantize_int4(words.float(), 32)
    records = (
        LosslessMatrix(dense_ops.encode_dense_lossless(words), *words.shape),
        ResidualMatrix(dense_ops.encode_dense_residual(words, pair), pair),
    )
    raw = RawMatrix(words)
    for matrix in records:
        assert (matrix.outputs, matrix.columns) == (raw.outputs, raw.columns) == (24, 64)
        assert torch.equal(matrix.words(), words)
        assert torch.equal(matrix.rows(ids), words[ids])
        for added in (bias, None):
            assert torch.equal(matrix.product(inputs, added), raw.product(inputs, added))
