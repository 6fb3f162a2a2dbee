"""Compact dense matrices: every bit comes back, products are those of plain words, damage stays
inside.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from speq.errors import SpeqError
from speq.kernels import dense_ops, library, ops, reference_dense
from speq.kernels.compact_layout import STREAMS_END, CompactLayout
from speq.kernels.dense_ops import RecordMatrix, encode_dense
from speq.kernels.ops import Int4Pair, quantize_int4
from tests.helpers.backends import poisoned_memory
from tests.helpers.pairwise import covering

CODECS = ("lossless", "residual")
# Rows and columns: whole blocks, parts of them, rows that are no whole quads, the smallest.
SHAPES = ((7, 8), (1, 2), (130, 66), (33, 130), (16, 192))
KINDS = ("normal", "planted", "any bits")
SEED = 21


def weight_of(rows: int, columns: int, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    if kind == "any bits":
        bits = torch.randint(-(1 << 15), 1 << 15, (rows, columns), generator=generator)
        return bits.to(torch.int16).view(torch.bfloat16)
    weight = torch.randn(rows, columns, generator=generator).mul_(0.02)
    if kind == "planted":  # words that no class and no code tells, here and there
        rare = torch.rand(rows, columns, generator=generator) < 0.05
        steps = torch.randint(-90, 8, (rows, columns), generator=generator)
        weight = torch.where(rare, weight.sign() * 2.0**steps, weight)
    return weight.bfloat16()


@dataclass(frozen=True)
class Matrix:
    """A matrix in plain words, and in a record over its codes or without them."""

    weight: Tensor
    codec: str
    pair: Int4Pair
    record: Tensor

    @classmethod
    @cache
    def made(cls, codec: str, rows: int, columns: int, kind: str) -> "Matrix":
        weight = weight_of(rows, columns, kind)
        group = 32 if columns % 32 == 0 else columns
        if kind == "any bits":
            generator = torch.Generator().manual_seed(SEED)
            codes = torch.randint(256, (rows, columns // 2), generator=generator).byte()
            steps = torch.randn(rows, columns // group, generator=generator).mul_(0.01)
            pair = codes, steps.half()
        else:
            pair = quantize_int4(weight_of(rows, columns, "normal"), group)
        return cls(weight, codec, pair, encode_dense(weight, None if codec == "lossless" else pair))

    @property
    def layout(self) -> CompactLayout:
        return CompactLayout.of_matrix(self.weight.shape, self.codec == "lossless")

    def held(self, record: Tensor | None = None) -> RecordMatrix:
        """The record as the product has it, or another of the matrix."""
        pair = None if self.codec == "lossless" else self.pair
        return RecordMatrix(self.record if record is None else record, *self.weight.shape, pair)


def bits_of(matrix: Tensor) -> Tensor:
    return matrix.view(torch.int16)


def of_reference(matrix: Matrix) -> Tensor:
    record = torch.zeros(matrix.layout.most_bytes, dtype=torch.uint8)
    nbytes = torch.zeros(1, dtype=torch.int64)
    if matrix.codec == "lossless":
        reference_dense.encode_dense_lossless_out(matrix.weight, record, nbytes)
    else:
        reference_dense.encode_dense_residual_out(matrix.weight, *matrix.pair, record, nbytes)
    return record[: int(nbytes)]


def inputs_of(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(SEED + rows)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def plain_product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product by words that are widened: of float16, what float32 gives, rounded once."""
    if inputs.dtype == torch.float16:
        added = None if bias is None else bias.float()
        return ops.linear(inputs.float(), weight.float(), added).half()
    return ops.linear(inputs, weight.to(inputs.dtype), bias)


@pytest.mark.parametrize(("codec", "shape", "kind"), covering(CODECS, SHAPES, KINDS))
def test_every_bit_comes_back(codec: str, shape: tuple[int, int], kind: str) -> None:
    matrix = Matrix.made(codec, *shape, kind)
    assert torch.equal(matrix.record, of_reference(matrix))
    assert matrix.layout.fixed_bytes <= len(matrix.record) <= matrix.layout.most_bytes
    best = library.isa()
    try:
        for name in library.supported_isas():
            library.limit_isa(name)
            assert torch.equal(bits_of(matrix.held().words()), bits_of(matrix.weight))
    finally:
        library.limit_isa(best)
    whole = (
        reference_dense.lossless_words(matrix.record, *shape)
        if codec == "lossless"
        else reference_dense.residual_words(matrix.record, *matrix.pair)
    )
    assert torch.equal(bits_of(whole), bits_of(matrix.weight))


@pytest.mark.parametrize("codec", CODECS)
def test_rows_of_a_matrix_are_decoded_alone(codec: str) -> None:
    matrix = Matrix.made(codec, 33, 130, "planted")
    parts = (matrix.record, 33) if codec == "lossless" else (matrix.record, *matrix.pair)
    for first, end in ((0, 4), (8, 20), (28, 33), (32, 33)):
        for run in (
            lambda *given: library.call(f"decode_dense_{codec}", *given),
            getattr(reference_dense, f"decode_dense_{codec}_out"),
        ):
            out = torch.zeros(end - first, 130).bfloat16()
            run(*parts, first, out)
            assert torch.equal(bits_of(out), bits_of(matrix.weight[first:end]))


DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
ROWS = (1, 2, 3, 4, 5, 6, 7, 16, 17, 64, 65)


@pytest.mark.parametrize(
    ("codec", "shape", "dtype", "rows"),
    covering(CODECS, SHAPES, DTYPES, ROWS),
)
def test_products_are_those_of_plain_words(
    isa: str, codec: str, shape: tuple[int, int], dtype: torch.dtype, rows: int
) -> None:
    matrix = Matrix.made(codec, *shape, "planted")
    inputs = inputs_of(rows, shape[1], dtype)
    for bias in (None, inputs_of(1, shape[0], dtype)[0]):
        found = matrix.held().product(inputs, bias)
        wanted = plain_product(inputs, matrix.weight, bias)
        assert torch.equal(found, wanted)
        assert found.dtype == dtype and bool(found.isfinite().all()) and bool(found.any())
    if rows <= ops.MAX_LINEAR_ROWS and dtype != torch.float64:
        # A row does not depend on others of the call.
        assert torch.equal(matrix.held().product(inputs[-1:], bias), found[-1:])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_of_words_that_are_no_numbers(isa: str, codec: str, dtype: torch.dtype) -> None:
    """NaN and infinities come out where plain words have them come out, and nowhere else."""
    matrix = Matrix.made(codec, 130, 66, "any bits")
    inputs = inputs_of(3, 66, dtype)
    found = matrix.held().product(inputs, None)
    wanted = plain_product(inputs, matrix.weight, None)
    assert bool(wanted.isnan().any())
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("codec", CODECS)
def test_products_agree_with_double_precision(codec: str) -> None:
    matrix = Matrix.made(codec, 33, 130, "planted")
    inputs, bias = inputs_of(4, 130, torch.float32), inputs_of(1, 33, torch.float32)[0]
    wanted = inputs.double().numpy() @ matrix.weight.double().numpy().T + bias.double().numpy()
    torch.testing.assert_close(
        matrix.held().product(inputs, bias), torch.from_numpy(wanted).float(), rtol=1e-4, atol=1e-5
    )
    out = torch.empty(4, 33)
    parts = (matrix.record,) if codec == "lossless" else (matrix.record, *matrix.pair)
    getattr(reference_dense, f"linear_{codec}_out")(inputs, *parts, bias, out)
    torch.testing.assert_close(out, torch.from_numpy(wanted).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(2, 0, 66), (66,), (2, 3, 66), (1, 17, 66), (0, 66)])
def test_inputs_of_any_shape(codec: str, shape: tuple[int, ...]) -> None:
    matrix = Matrix.made(codec, 130, 66, "normal")
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).bfloat16()
    with poisoned_memory():
        found = matrix.held().product(inputs, None)
    assert found.shape == (*shape[:-1], 130)
    assert torch.equal(found, ops.linear(inputs, matrix.weight))


@pytest.mark.parametrize("codec", CODECS)
def test_inputs_that_lie_apart(codec: str) -> None:
    matrix = Matrix.made(codec, 130, 66, "normal")
    inputs = inputs_of(4, 132, torch.bfloat16)[:, :66]
    assert torch.equal(
        matrix.held().product(inputs, None), ops.linear(inputs.clone(), matrix.weight)
    )


@pytest.mark.parametrize("codec", CODECS)
def test_rows_by_their_ids(isa: str, codec: str) -> None:
    matrix = Matrix.made(codec, 33, 130, "planted")
    for ids in (torch.arange(33), torch.tensor([[32, 0], [0, 31]]), torch.tensor(5)):
        found = matrix.held().rows(ids)
        assert torch.equal(bits_of(found), bits_of(matrix.weight[ids]))
    assert matrix.held().rows(torch.zeros(2, 0).long()).shape == (2, 0, 130)
    parts = (matrix.record, 33) if codec == "lossless" else (matrix.record, *matrix.pair)
    out = torch.empty(3, 130).bfloat16()
    getattr(reference_dense, f"rows_{codec}_out")(*parts, torch.tensor([4, 32, 4]), out)
    assert torch.equal(bits_of(out), bits_of(matrix.weight[[4, 32, 4]]))


@pytest.mark.parametrize("wrong", [-1, 33, 1 << 40])
@pytest.mark.parametrize("codec", CODECS)
def test_ids_of_no_row_are_refused(codec: str, wrong: int) -> None:
    matrix = Matrix.made(codec, 33, 130, "normal")
    with pytest.raises(IndexError, match=f"^ids holds {wrong}; there are 33 rows$"):
        matrix.held().rows(torch.tensor([0, wrong]))
    parts = (matrix.record, 33) if codec == "lossless" else (matrix.record, *matrix.pair)
    with pytest.raises(IndexError, match=f"^ids holds {wrong}; there are 33 rows$"):
        getattr(reference_dense, f"rows_{codec}_out")(
            *parts, torch.tensor([wrong]), torch.empty(1, 130).bfloat16()
        )


@pytest.mark.parametrize("codec", CODECS)
def test_damage_stays_inside_a_record(isa: str, codec: str) -> None:
    """Whatever index, classes and streams say, ops end, and bytes of their own stay true.

    Under AddressSanitizer this is also where a decoder would be caught reading outside.
    """
    matrix = Matrix.made(codec, 33, 130, "any bits")
    streams = matrix.layout.fixed_bytes - 128
    ids = torch.arange(33)
    generator = torch.Generator().manual_seed(SEED)
    for turn in range(24):
        damaged = matrix.record.clone()
        noise = torch.randint(256, (len(damaged),), generator=generator).byte()
        hit = torch.rand(len(damaged), generator=generator) < (1.0, 0.3, 0.01)[turn % 3]
        hit[streams - -(-33 * 130 // 64) * 64 : streams] = False  # the bytes of the weights
        damaged[hit] = noise[hit]
        if turn % 2:  # cut off as short as a record may be
            damaged = damaged[: matrix.layout.fixed_bytes + turn].clone()
        found = matrix.held(damaged).words()
        assert torch.equal(bits_of(found).int() & 0xFF, bits_of(matrix.weight).int() & 0xFF)
        assert torch.equal(bits_of(matrix.held(damaged).rows(ids)), bits_of(found))
        inputs = inputs_of(1 + turn % 6, 130, torch.bfloat16)
        product = matrix.held(damaged).product(inputs, None)
        wanted = plain_product(inputs, found, None)
        torch.testing.assert_close(product, wanted, rtol=0, atol=0, equal_nan=True)


def test_products_of_many_rows_take_the_scratch_that_is_told() -> None:
    """A plain copy, and of float32 and float64 a wide one too."""
    sizes = {dtype: dense_ops.product_scratch_bytes(130, 66, dtype) for dtype in DTYPES}
    weights = 130 * 66
    assert sizes == {
        torch.bfloat16: 2 * weights,
        torch.float32: 6 * weights,
        torch.float16: 6 * weights,
        torch.float64: 10 * weights,
    }


def test_streams_that_no_index_can_tell_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stood in for: the smallest such matrix takes 4 GB."""
    weight = weight_of(4, 64, "normal")
    layout = CompactLayout.of_matrix((4, 64), lossless=True)

    def call(op: str, *arguments: Any) -> None:
        arguments[-1].fill_(layout.fixed_bytes + STREAMS_END)

    monkeypatch.setattr(library, "call", call)
    with pytest.raises(SpeqError, match=rf"^escapes of \[4, 64\] take {STREAMS_END} bytes.*raw$"):
        encode_dense(weight)


MATRIX = weight_of(16, 64, "normal")
PAIR = quantize_int4(MATRIX, 32)
LOSSLESS = RecordMatrix(encode_dense(MATRIX), 16, 64)
RESIDUAL = RecordMatrix(encode_dense(MATRIX, PAIR), 16, 64, PAIR)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: encode_dense(MATRIX.float()), "weight is torch.float32; it must be"),
        (lambda: encode_dense(MATRIX, (PAIR[0][:8], PAIR[1])), r"qweight has shape \[8, 32\]"),
        (lambda: encode_dense(MATRIX, (PAIR[0], PAIR[1].float())), "scales is torch.float32"),
        (lambda: RecordMatrix(LOSSLESS.record[:64], 16, 64), "record has 64 bytes to a record"),
        (lambda: RecordMatrix(LOSSLESS.record.float(), 16, 64), "record is torch.float32"),
        (lambda: RecordMatrix(LOSSLESS.record, 1600, 64), "record has .* at least"),
        (lambda: RecordMatrix(RESIDUAL.record[:64], 16, 64, PAIR), "record has 64 bytes"),
        (lambda: RecordMatrix(RESIDUAL.record, 8, 64, PAIR), r"qweight .* matrix \[8, 64\]"),
        (
            lambda: RecordMatrix(RESIDUAL.record, 16, 64, (PAIR[0], PAIR[1][:, :0])),
            "scales has shape",
        ),
        (lambda: LOSSLESS.decode(MATRIX.half()), "words is torch.float16"),
        (lambda: LOSSLESS.decode(MATRIX[:, ::2]), r"words has shape \[16, 32\]"),
        (lambda: LOSSLESS.decode(MATRIX.T.contiguous().T), "words has strides"),
        (lambda: LOSSLESS.product(torch.zeros(3, 64).long(), None), "inputs is torch.int64"),
        (lambda: LOSSLESS.product(torch.zeros(()), None), r"inputs has shape \[\]"),
        (lambda: RESIDUAL.product(torch.zeros(3, 62), None), r"inputs has shape \[3, 62\]"),
        (lambda: LOSSLESS.product(torch.zeros(3, 64), torch.zeros(15)), r"bias has shape \[15\]"),
        (
            lambda: LOSSLESS.product(torch.zeros(3, 64), torch.zeros(16).half()),
            "bias is torch.float16",
        ),
        (lambda: LOSSLESS.rows(torch.zeros(2).int()), "ids is torch.int32"),
    ],
)
def test_errors_name_the_argument(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
