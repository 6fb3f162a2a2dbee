"""`speq bench kernels` on dense matrices: what it counts and refuses, with a false clock."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any

import pytest

from speq.bench.machine import dense_kernels as dense
from speq.bench.machine import kernels as bench
from speq.bench.machine.kernels import Settings
from speq.errors import SpeqError
from speq.kernels import library
from speq.kernels.dense_ops import RecordMatrix
from tests.helpers.command import Command

SETTINGS = Settings(
    shapes=("36x64",), rows=(1, 3), kernels=("all",), group_size=32, device="cpu", rounds=3
)
READ_BYTES = 1 << 16
WEIGHTS = 36 * 64

pytestmark = pytest.mark.skipif(library.MISSING["cpu"] is not None, reason="no native CPU kernels")


@pytest.fixture(autouse=True)
def short_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dense.READ_BYTES, "cpu", READ_BYTES)


def clock_of(*durations_s: float) -> Callable[[], float]:
    """A clock whose times between calls repeat."""
    now = 0.0

    def after(duration_s: float) -> float:
        nonlocal now
        now += duration_s
        return now

    # The first mark is at no time.
    return map(after, chain(repeat(0.0, 1), cycle(durations_s))).__next__


def run(settings: Settings, **options: Any) -> list[dict[str, Any]]:
    return bench.run(settings, **options).rows


def test_a_row_for_each_rows_and_kernel() -> None:
    rows = run(SETTINGS)
    assert [(row["T"], row["kernel"]) for row in rows] == [
        (count, kernel) for count in (1, 3) for kernel in dense.KERNELS
    ]
    bits = {row["kernel"]: row["bits_per_weight"] for row in rows}
    assert bits["linear"] == 16
    assert bits["linear_int4"] == 4 + 16 / 32
    # Rounded normal weights: the codes, and a byte and some bits of code 0 beside them.
    assert 11 < bits["linear_lossless"] < 13.5
    assert bits["linear_int4"] + 8 < bits["linear_residual"] < 15
    for row in rows:
        assert (row["shape"], row["backend"], row["dtype"]) == ("36x64", "cpu", "bfloat16")
        assert min(row["time_s"], row["time_to_raw"], row["bandwidth_share"]) > 0
        assert row["time_to_raw"] == 1 or row["kernel"] != "linear"


def test_bytes_time_and_share() -> None:
    """Reads of 2 s, calls of a round 1 s together: as many calls as read what the read does."""
    settings = replace(SETTINGS, rows=(2,), kernels=("linear",))
    (row,) = run(settings, clock=clock_of(2, 1, 0))
    calls = READ_BYTES // (2 * WEIGHTS)
    assert calls == 14
    assert row["time_s"] == pytest.approx(1 / calls)
    assert row["gb_per_s"] == pytest.approx(calls * 2 * WEIGHTS / 1e9)
    assert row["bandwidth_share"] == pytest.approx(calls * 2 * WEIGHTS / (READ_BYTES / 2))


def test_time_to_raw_is_that_of_the_same_round() -> None:
    """Each round twice as slow as the one before, and the other kernel a third of raw's time."""
    settings = replace(SETTINGS, rows=(1,), kernels=("linear", "linear_int4"), rounds=2)
    # Read, work of the two kernels in one order, then in the other; int4 has the most calls.
    int4_calls = 32
    raw_calls = READ_BYTES // (2 * WEIGHTS)
    raw, int4 = raw_calls * 3.0, int4_calls * 1.0
    clock = clock_of(1, raw, 0, 1, int4, 0, 1, 2 * int4, 0, 1, 2 * raw, 0)
    found = {row["kernel"]: row for row in run(settings, clock=clock)}
    assert found["linear_int4"]["time_s"] == pytest.approx(1.5)
    assert found["linear_int4"]["time_to_raw"] == pytest.approx(1 / 3)


def test_without_raw_there_is_no_time_to_it() -> None:
    (row,) = run(replace(SETTINGS, rows=(1,), kernels=("linear_lossless",)))
    assert row["time_to_raw"] is None


def test_copies_are_multiplied_as_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = RecordMatrix.product

    def watched(matrix: RecordMatrix, inputs: Any, bias: Any) -> Any:
        seen.append((tuple(inputs.shape), matrix.record.data_ptr(), matrix.outputs))
        return plain(matrix, inputs, bias)

    monkeypatch.setattr(RecordMatrix, "product", watched)
    run(replace(SETTINGS, rows=(3,), kernels=("linear_lossless",), rounds=1))
    calls = len(seen) // 2  # once to begin with, once in the round
    assert calls > dense.MIN_CALLS
    assert len({place for _, place, _ in seen}) == calls
    assert {(shape, outputs) for shape, _, outputs in seen} == {((3, 64), 36)}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"shapes": ("36x64", "olmoe")}, "shapes are 36x64, olmoe, of layers of experts and of"),
        ({"kernels": ("torch",)}, "kernels is 'torch'; it must be one of linear"),
        ({"group_size": 48}, "group_size is 48; it must be even and divide the 64 columns of"),
        ({"shapes": ("0x64",)}, "shapes is '0x64'; it must be one of"),
        ({"shapes": ("999999x102400",)}, "of memory are left; give smaller shapes"),
    ],
)
def test_what_it_refuses(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpeqError) as refused:
        bench.run(replace(SETTINGS, **given))
    assert sentence in str(refused.value)


def test_all_dense_shapes_are_one_word() -> None:
    shapes = dense.shapes_of(replace(SETTINGS, shapes=("dense", "36x64", "2048x2048")))
    assert [str(shape) for shape in shapes] == [*dense.SHAPES, "36x64"]


def test_the_command_shows_and_writes(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "dense.json"
    ended = command(
        *("bench", "kernels", "--shapes", "36x64", "--rows", "1", "--group-size", 32),
        *("--device", "cpu", "--rounds", 1, "--json", out),
    )
    assert ended.code == 0, ended.err
    for shown in ("linear_residual", "time to raw", "share: of a plain read"):
        assert shown in ended.out
    report = json.loads(out.read_text())
    assert report["bench"] == "dense kernels"
    assert len(report["rows"]) == len(dense.KERNELS)
