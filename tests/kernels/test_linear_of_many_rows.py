"""Products of many rows through float32, block by block, beside double precision."""

import pytest
import torch
from torch import Tensor

from speq.kernels import dense_ops, many_rows, ops

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(params=ROUNDING, ids=str)
def without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """A dtype that torch is said to have no products of, in blocks that no shape fits."""
    monkeypatch.setattr(many_rows, "has_native_product", lambda dtype: dtype == torch.float32)
    monkeypatch.setattr(many_rows, "ROWS", 7)
    monkeypatch.setattr(many_rows, "WEIGHTS", 100)
    dtype: torch.dtype = request.param
    return dtype


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("rows", "columns", "outputs"), [((17,), 33, 20), ((3, 11), 8, 1), ((40,), 128, 13)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_rounded_once(
    without: torch.dtype, rows: tuple[int, ...], columns: int, outputs: int, biased: bool
) -> None:
    inputs = normal(*rows, columns, seed=1).to(without)
    weight = normal(outputs, columns, seed=2).to(without)
    bias = normal(outputs, seed=3).to(without) if biased else None
    found = ops.linear(inputs, weight, bias)
    wanted = torch.nn.functional.linear(
        inputs.double(), weight.double(), None if bias is None else bias.double()
    )
    assert found.dtype == without and found.shape == wanted.shape
    # A rounding, and what float32 sums are off by.
    most = wanted.abs() * ROUNDING[without] * 1.001 + 1e-4 * columns**0.5
    assert bool(((found.double() - wanted).abs() <= most).all())


def test_records_give_the_bits_of_their_words(without: torch.dtype) -> None:
    if without != torch.bfloat16:
        pytest.skip("records hold bfloat16 words")
    weight = (normal(64, 256, seed=4) * 0.02).bfloat16()
    inputs = normal(30, 256, seed=5).bfloat16()
    record = dense_ops.encode_dense(weight)
    by_record = dense_ops.RecordMatrix(record, 64, 256).product(inputs, None)
    assert torch.equal(by_record, ops.linear(inputs, weight))


def test_torch_runs_what_it_has_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_rows, "has_native_product", lambda dtype: True)
    inputs, weight = normal(20, 16, seed=6).bfloat16(), normal(5, 16, seed=7).bfloat16()
    assert torch.equal(ops.linear(inputs, weight), torch.nn.functional.linear(inputs, weight))


def test_what_it_takes_beside_inputs_and_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(20, 33), (1, 8)]
    assert many_rows.scratch_bytes(5, shapes, torch.float32) == 0
    monkeypatch.setattr(many_rows, "has_native_product", lambda dtype: False)
    monkeypatch.setattr(many_rows, "ROWS", 7)
    monkeypatch.setattr(many_rows, "WEIGHTS", 100)
    # Three outputs of 33 columns at a time, and five rows of inputs and of results.
    assert many_rows.scratch_bytes(5, shapes, torch.bfloat16) == 4 * (3 * 33 + 5 * (33 + 3))
    # Seven rows at a time; a matrix smaller than a block is taken whole.
    assert many_rows.scratch_bytes(9, [(2, 8)], torch.float16) == 4 * (16 + 7 * 10)
