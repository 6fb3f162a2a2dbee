"""The CUDA kernels over compact dense matrices, on a GPU or on the host, as `test_compact_cuda`."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from speq.kernels import reference_dense
from speq.kernels.compact_layout import CompactLayout
from speq.kernels.dense_ops import RecordMatrix, encode_dense
from speq.kernels.ops import Int4Pair, quantize_int4
from tests.helpers.backends import (
    CUDA_BACKENDS,
    Backend,
    backend_named,
    cuda_device,
    poisoned_memory,
)
from tests.helpers.pairwise import covering

CODECS = ("lossless", "residual")
# Rows and columns: whole segments, parts of them, rows that are no whole quads.
SHAPES = ((64, 256), (7, 8), (33, 130), (18, 320), (5, 1000))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = 31
POISON = float("nan")


@pytest.fixture(params=CUDA_BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield from backend_named(request)


@pytest.fixture(params=CUDA_BACKENDS)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    yield from cuda_device(request)


def bits_of(matrix: Tensor) -> Tensor:
    return matrix.view(torch.int16)


@dataclass(frozen=True)
class Matrix:
    """Plain words, and a record of them, over codes of which some are anything or alone."""

    weight: Tensor
    codec: str
    pair: Int4Pair
    record: Tensor

    @classmethod
    def of(cls, codec: str, weight: Tensor) -> "Matrix":
        generator = torch.Generator().manual_seed(SEED)
        columns = weight.shape[1]
        qweight, scales = quantize_int4(weight, 32 if columns % 32 == 0 else columns)
        anything = torch.randint(256, qweight.shape, generator=generator).byte()
        moved = torch.rand(qweight.shape, generator=generator) < 0.1
        pair = torch.where(moved, anything, qweight), scales
        return cls(weight, codec, pair, encode_dense(weight, None if codec == "lossless" else pair))

    @property
    def codes(self) -> tuple[Tensor, ...]:
        return () if self.codec == "lossless" else self.pair

    @property
    def sized(self) -> tuple[Tensor | int, ...]:
        return (len(self.weight),) if self.codec == "lossless" else self.pair

    def product(
        self, backend: Backend, inputs: Tensor, bias: Tensor | None, record: Tensor | None = None
    ) -> Tensor:
        out = torch.full((len(inputs), len(self.weight)), POISON, dtype=inputs.dtype)
        record = self.record if record is None else record
        backend.run(f"linear_{self.codec}", inputs, record, *self.codes, bias, out)
        return out

    def decoded(self, backend: Backend, first: int, end: int, record: Tensor) -> Tensor:
        out = torch.full((end - first, self.weight.shape[1]), POISON).bfloat16()
        backend.run(f"decode_dense_{self.codec}", record, *self.sized, first, out)
        return out

    def rows(self, backend: Backend, ids: Tensor, record: Tensor | None = None) -> Tensor:
        out = torch.zeros(len(ids), self.weight.shape[1]).bfloat16()
        record = self.record if record is None else record
        backend.run(f"rows_{self.codec}", record, *self.sized, ids, out)
        return out


def planted(rows: int, columns: int) -> Tensor:
    """Words of which some have exponents that no class and no code tells."""
    generator = torch.Generator().manual_seed(SEED)
    weight = torch.randn(rows, columns, generator=generator).mul_(0.02)
    rare = torch.rand(rows, columns, generator=generator) < 0.05
    steps = torch.randint(-90, 4, (rows, columns), generator=generator)
    return torch.where(rare, weight.sign() * 2.0**steps, weight).bfloat16()


def small_whole(rows: int, columns: int, below: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED + rows)
    return torch.randint(1 - below, below, (rows, columns), generator=generator).float()


@pytest.mark.parametrize(
    ("codec", "shape", "dtype", "rows"), covering(CODECS, SHAPES, DTYPES, (1, 2, 3, 5, 16))
)
def test_products_of_whole_numbers(
    backend: Backend, codec: str, shape: tuple[int, int], dtype: torch.dtype, rows: int
) -> None:
    """Whose sums have nothing to round, whatever their order: a wrong weight or place would show.

    In float16 and bfloat16 they are rounded once, at the end.
    """
    matrix = Matrix.of(codec, small_whole(*shape, 100).bfloat16())
    inputs = small_whole(rows, shape[1], 8).to(dtype)
    for bias in (None, small_whole(1, shape[0], 50)[0].to(dtype)):
        wanted = inputs.double() @ matrix.weight.double().T
        wanted += 0 if bias is None else bias.double()
        assert torch.equal(matrix.product(backend, inputs, bias), wanted.to(dtype))


@pytest.mark.parametrize("shape", SHAPES)
def test_products_agree_with_double_precision(backend: Backend, shape: tuple[int, int]) -> None:
    weight = planted(*shape)
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(6, shape[1], generator=generator)
    wanted = inputs.double() @ weight.double().T
    found = {codec: Matrix.of(codec, weight).product(backend, inputs, None) for codec in CODECS}
    assert torch.equal(found["lossless"], found["residual"])
    torch.testing.assert_close(found["lossless"].double(), wanted, rtol=1e-4, atol=1e-5)
    # A row does not depend on others of the call.
    alone = Matrix.of("lossless", weight).product(backend, inputs[-1:], None)
    assert torch.equal(alone, found["lossless"][-1:])


@pytest.mark.parametrize(("codec", "shape"), covering(CODECS, SHAPES))
def test_words_come_back(backend: Backend, codec: str, shape: tuple[int, int]) -> None:
    weight = planted(*shape)
    weight.view(torch.int16)[-1, :4] = torch.tensor([0x7F80, -0x80, 0x7FC1, -1])  # no numbers
    matrix = Matrix.of(codec, weight)
    rows = len(weight)
    for first, end in {(0, rows), (rows // 4 // 2 * 4, rows), (0, rows // 4 * 4)}:
        found = matrix.decoded(backend, first, end, matrix.record)
        assert torch.equal(bits_of(found), bits_of(weight[first:end]))
    ids = torch.tensor([rows - 1, 0, rows // 2, 0])
    assert torch.equal(bits_of(matrix.rows(backend, ids)), bits_of(weight[ids]))


@pytest.mark.parametrize("codec", CODECS)
def test_ids_of_no_row_give_rows_that_are_no_numbers(backend: Backend, codec: str) -> None:
    matrix = Matrix.of(codec, planted(33, 130))
    found = matrix.rows(backend, torch.tensor([-1, 32, 33, 1 << 40]))
    assert torch.equal(bits_of(found[1]), bits_of(matrix.weight[32]))
    assert found[[0, 2, 3]].isnan().all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("columns", [130, 256])
def test_damage_stays_inside_a_record(backend: Backend, codec: str, columns: int) -> None:
    """The record ends with the memory it lies in, where AddressSanitizer watches it."""
    matrix = Matrix.of(codec, planted(18, columns))
    layout = CompactLayout.of_matrix((18, columns), codec == "lossless")
    plane = layout.fixed_bytes - 128 - -(-18 * columns // 64) * 64
    generator = torch.Generator().manual_seed(SEED)
    for turn in range(6):
        damaged = matrix.record.clone()
        hit = torch.rand(len(damaged), generator=generator) < (1.0, 0.3, 0.01)[turn % 3]
        hit[plane : layout.fixed_bytes - 128] = False  # the bytes of the weights
        damaged[hit] = torch.randint(256, (len(damaged),), generator=generator).byte()[hit]
        if turn >= 3:  # cut off as short as a record may be
            damaged = damaged[: layout.fixed_bytes + turn].clone()
        found = matrix.decoded(backend, 0, 18, damaged)
        assert torch.equal(bits_of(found).int() & 0xFF, bits_of(matrix.weight).int() & 0xFF)
        rows = matrix.rows(backend, torch.arange(18), damaged)
        assert torch.equal(bits_of(rows), bits_of(found))
        product = matrix.product(backend, torch.ones(2, columns), None, damaged)
        assert product.shape == (2, 18)
        assert torch.equal(product[0].isnan(), product[1].isnan())


def test_reference_reads_the_same(backend: Backend) -> None:
    weight = planted(18, 320)
    inputs = torch.randn(3, 320, generator=torch.Generator().manual_seed(SEED))
    for codec in CODECS:
        matrix = Matrix.of(codec, weight)
        out = torch.empty(3, 18)
        getattr(reference_dense, f"linear_{codec}_out")(
            inputs, matrix.record, *matrix.codes, None, out
        )
        torch.testing.assert_close(matrix.product(backend, inputs, None), out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("rows", [16, 17])
def test_wrappers_take_any_number_of_rows(device: torch.device, codec: str, rows: int) -> None:
    """Few rows by the kernel, many through a plain copy: whole numbers, so that both are exact."""
    matrix = Matrix.of(codec, small_whole(33, 320, 100).bfloat16())
    inputs = small_whole(rows, 320, 8).bfloat16().to(device)
    pair = (matrix.pair[0].to(device), matrix.pair[1].to(device)) if matrix.codes else None
    held = RecordMatrix(matrix.record.to(device), 33, 320, pair)
    with poisoned_memory():
        found = held.product(inputs, None)
        chosen = held.rows(torch.tensor([4, 32], device=device))
    wanted = inputs.cpu().double() @ matrix.weight.double().T
    assert torch.equal(found.cpu(), wanted.bfloat16())
    assert torch.equal(bits_of(chosen.cpu()), bits_of(matrix.weight[[4, 32]]))
