"""Records of every instruction set are byte for byte those of the plain torch encoder."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from speq.kernels import dense_ops, reference_dense
from speq.kernels.compact_layout import CompactLayout
from speq.kernels.ops import Int4Pair, quantize_int4
from tests.helpers.often import often

# Rows and columns: one of each, parts of blocks and of quads, whole ones.
SHAPES = ((1, 1), (1, 7), (3, 63), (5, 65), (2, 100), (6, 128), (9, 200), (4, 320))
OF_CODES = ((1, 2), (1, 64), (3, 96), (5, 160), (2, 100), (6, 128), (9, 224), (8, 320))
GROUPS = (2, 6, 16, 32, 64, 128)


def bits(values: Tensor) -> Tensor:
    """Words of these 16 bits."""
    return torch.where(values < 1 << 15, values, values - (1 << 16)).to(torch.int16)


def normal(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).mul_(0.02).bfloat16()


def any_words(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return bits(torch.randint(1 << 16, shape, generator=generator)).view(torch.bfloat16)


def ties(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """High bytes that are as frequent as others, in no order: the lower ones have classes."""
    count = shape[0] * shape[1]
    high = torch.arange(count) * 37 % min(count, 256)
    low = torch.randint(256, (count,), generator=generator)
    order = torch.randperm(count, generator=generator)
    return bits((high << 8 | low)[order]).view(torch.bfloat16).view(shape)


def few(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Seven high bytes: no escapes."""
    high = torch.tensor([0x00, 0x3C, 0x7F, 0x80, 0xBC, 0xBD, 0xFF])
    low = torch.randint(256, shape, generator=generator)
    at = torch.randint(len(high), shape, generator=generator)
    return bits(high[at] << 8 | low).view(torch.bfloat16)


def special(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """NaN, infinities, zeros, denormal and the largest words between usual ones."""
    words = torch.tensor([0x7FC0, 0xFF81, 0x7F80, 0xFF80, 0, 0x8000, 1, 0x8001, 0x7F, 0x7F7F])
    found = normal(shape, generator)
    rare = torch.rand(shape, generator=generator) < 0.3
    at = torch.randint(len(words), shape, generator=generator)
    return torch.where(rare, bits(words[at]), found.view(torch.int16)).view(torch.bfloat16)


KINDS: tuple[Callable[[tuple[int, int], torch.Generator], Tensor], ...] = (
    normal,
    any_words,
    ties,
    few,
    special,
)


def of_reference(shape: torch.Size, lossless: bool, *parts: Tensor) -> Tensor:
    record = torch.zeros(CompactLayout.of_matrix(shape, lossless).most_bytes, dtype=torch.uint8)
    nbytes = torch.zeros(1, dtype=torch.int64)
    if lossless:
        reference_dense.encode_dense_lossless_out(*parts, record, nbytes)
    else:
        reference_dense.encode_dense_residual_out(*parts, record, nbytes)
    return record[: int(nbytes)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_lossless_records(isa: str, shape: tuple[int, int], kind: Callable[..., Tensor]) -> None:
    weight = kind(shape, torch.Generator().manual_seed(5))
    wanted = of_reference(weight.shape, True, weight)
    assert torch.equal(dense_ops.encode_dense(weight), wanted)


def test_seven_high_bytes_have_no_escapes_and_more_have() -> None:
    generator = torch.Generator().manual_seed(5)
    layout = CompactLayout.of_matrix((16, 256), lossless=True)
    assert len(dense_ops.encode_dense(few((16, 256), generator))) == layout.fixed_bytes
    found = len(dense_ops.encode_dense(ties((16, 256), generator)))
    assert found == layout.fixed_bytes + 16 * 256 * 249 // 256


def codes_of(weight: Tensor, group: int, rng: random.Random) -> Int4Pair:
    """Rounded codes, or others: of one value everywhere, of any, under any scales."""
    rows, columns = weight.shape
    kind = rng.choice(["rounded", "rounded", "zeros", "no zeros", "any", "wild scales"])
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    usual = torch.randn(rows, columns, generator=generator).mul_(0.02).bfloat16()
    qweight, scales = quantize_int4(usual if kind == "any" else weight.nan_to_num(0, 1, -1), group)
    if kind == "zeros":
        qweight[torch.rand(qweight.shape, generator=generator) < 0.9] = 0x88
    elif kind == "no zeros":
        qweight[qweight & 0xF == 8] += 1
        qweight[qweight >> 4 == 8] += 0x10
    elif kind == "wild scales":
        found = bits(torch.randint(1 << 16, scales.shape, generator=generator))
        scales = found.view(torch.float16)
    return qweight, scales


@pytest.mark.parametrize("seed", often(range(200), quick=24, wide=40))
def test_residual_records(isa: str, seed: int) -> None:
    rng = random.Random(seed)
    rows, columns = rng.choice(OF_CODES)
    weight = rng.choice(KINDS)((rows, columns), torch.Generator().manual_seed(seed))
    group = rng.choice([each for each in (*GROUPS, columns) if columns % each == 0])
    pair = codes_of(weight, group, rng)
    wanted = of_reference(weight.shape, False, weight, *pair)
    record = dense_ops.encode_dense(weight, pair)
    assert torch.equal(record, wanted)
    found = torch.empty_like(weight)
    dense_ops.RecordMatrix(record, *found.shape, pair).decode(found)
    assert torch.equal(found.view(torch.int16), weight.view(torch.int16))


def test_one_row_of_a_quad_has_exceptions(isa: str) -> None:
    weight = normal((8, 192), torch.Generator().manual_seed(5))
    pair = quantize_int4(weight, 32)
    weight[5, 70:75] *= 1e4
    record = dense_ops.encode_dense(weight, pair)
    assert torch.equal(record, of_reference(weight.shape, False, weight, *pair))
    assert record[:12].view(torch.int32).lt(0).tolist() == [False, True, False]
