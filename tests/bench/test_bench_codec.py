"""`speq bench codec`: sizes against records, entropy against a count by hand."""

import math
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from speq.bench.machine import codec as bench_codec
from speq.bench.machine.codec import MeasuredDense, WordCounts
from speq.bench.settings import CodecSettings
from speq.errors import SpeqError
from speq.kernels import dense_ops
from speq.kernels.ops import quantize_int4
from tests.helpers.packing import pack_to


def test_rows_of_the_bundled_model(bundled: Path) -> None:
    rows = {row["codec"]: row for row in bench_codec.run(str(bundled), CodecSettings()).rows}
    dense = {name: rows.pop(name) for name in ("dense lossless", "dense residual")}
    assert list(rows) == ["raw", "lossless", "residual"]
    keys = {"encode_gb_per_s", "decode_gb_per_s", "copy_gb_per_s"}
    for row in rows.values():
        assert min(row[key] for key in keys) > 0
        assert row["entropy_bits"] < row["bits_per_weight"] <= row["slot_bits_per_weight"]
    assert rows["raw"]["bits_per_weight"] == 16
    assert rows["lossless"]["entropy_bits"] == rows["raw"]["entropy_bits"]
    assert rows["lossless"]["bits_per_weight"] <= 11.5
    assert rows["residual"]["bits_per_weight"] <= 9.0
    for row in dense.values():
        assert min(row[key] for key in keys) > 0
        assert row["entropy_bits"] < row["bits_per_weight"]
        assert row["slot_bits_per_weight"] is None
    assert dense["dense lossless"]["bits_per_weight"] <= 12
    assert dense["dense residual"]["bits_per_weight"] <= 10


def test_entropy_is_counted_right() -> None:
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(16, 64, generator=generator).bfloat16()
    counts = WordCounts()
    counts.add(matrix, None)
    words = Counter(matrix.view(torch.int16).flatten().tolist())
    wanted = -sum(n / 1024 * math.log2(n / 1024) for n in words.values())
    assert counts.bits() == pytest.approx(wanted)


def test_codes_leave_less_to_tell() -> None:
    """Over its codes a word has fewer places to be in."""
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(256, 256, generator=generator).bfloat16()
    codes = quantize_int4(matrix, 64)
    alone, over = WordCounts(), WordCounts()
    alone.add(matrix, None)
    over.add(matrix, codes)
    assert over.bits() < alone.bits() - 2
    # A code of 4 and a scale of 1 leave nothing where all words are 4.
    certain = WordCounts()
    certain.add(
        torch.full((2, 2), 4.0).bfloat16(),
        (torch.full((2, 1), 0xCC).byte(), torch.ones(2, 1).half()),
    )
    assert certain.bits() == 0


def test_dense_matrices_are_weighed_together() -> None:
    """Two of different sizes, with times of a clock that each call of moves on by one."""
    generator = torch.Generator().manual_seed(5)
    small, large = (torch.randn(n, 64, generator=generator).bfloat16() for n in (8, 120))
    measured = MeasuredDense("residual")
    clock = map(float, count()).__next__
    sizes = []
    for matrix in (small, large):
        pair = quantize_int4(matrix, 32)
        measured.take(matrix, pair, clock)
        sizes.append(len(dense_ops.encode_dense_residual(matrix, pair)))
    row = measured.row()
    assert measured.weights == 128 * 64
    assert row["bits_per_weight"] == 8 * sum(sizes) / (128 * 64)
    assert row["encode_gb_per_s"] == row["copy_gb_per_s"] == 128 * 64 * 2 / 2 / 1e9


def test_a_packed_model_is_refused(tiny_bfloat16: Callable[[str], Path], tmp_path: Path) -> None:
    packed = pack_to(tiny_bfloat16("olmoe"), tmp_path / "packed", codec="lossless")
    with pytest.raises(SpeqError, match="is packed with codec lossless; give one of plain words"):
        bench_codec.run(str(packed.checkpoint.path), CodecSettings())
