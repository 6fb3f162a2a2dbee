"""The benches of a GPU's link and of memory that stays: what they count, and what they refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.lab import gpu_link
from bench.lab.gpu_link import Figure, figures
from speq import SpeqError
from speq.bench.runs import soak
from speq.bench.settings import GpuLinkSettings, SoakSettings
from speq.machine import process_bytes
from tests.helpers.command import Command

SETTINGS = GpuLinkSettings(sizes=("1MiB", "4MiB"), volume="8MiB", rounds=3)


class FakeCard:
    """Copies a byte a microsecond; each launch takes longer than the one before."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._launches = iter([100e-6, 3e-6, 9e-6, 5e-6])

    def __getattr__(self, name: str) -> Callable[..., float]:
        def call(*given: int) -> float:
            self.calls.append((name, given))
            return given[0] / 1e6 if given else 1e-6

        return call

    def launch(self) -> float:
        return next(self._launches)

    def graph_node(self) -> Callable[[], float]:
        return lambda: 2e-6


def test_figures_of_a_card() -> None:
    card = FakeCard()
    rows = [figure.row() for figure in figures(card, [1 << 20, 4 << 20], SETTINGS)]  # type: ignore[arg-type]
    assert [(row["what"], row["size_bytes"]) for row in rows] == [
        ("to GPU", 1 << 20),
        ("to GPU, waited", 1 << 20),
        ("to GPU", 4 << 20),
        ("to GPU, waited", 4 << 20),
        ("from GPU", 1 << 10),
        ("launch", None),
        ("wait", None),
        ("graph node", None),
        ("pin", 1 << 30),
    ]
    assert {row["rounds"] for row in rows} == {3}
    assert rows[0]["gb_per_s"] == pytest.approx(1e-3)
    # Of 3, 9 and 5 us: the first launch does not count.
    assert (rows[5]["time_us"], rows[5]["gb_per_s"]) == (pytest.approx(5), None)
    assert rows[7]["time_us"] == pytest.approx(2)
    # As many copies as make up the volume, in each of three rounds and one before.
    assert card.calls.count(("copies", (1 << 20, 8))) == 4
    assert card.calls.count(("waited_copies", (4 << 20, 2))) == 4


def test_a_row_is_the_median_round() -> None:
    row = Figure("to GPU", [2.0, 8.0, 4.0], 8_000_000_000).row()
    assert (row["time_us"], row["gb_per_s"]) == (4e6, 2.0)


def test_without_a_gpu_it_says_so(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ended = command("bench", "gpu-link")
    assert (ended.code, ended.out) == (1, "")
    assert "torch sees no CUDA device" in ended.err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_link.READ_BYTES, "cuda", 1 << 26)
    monkeypatch.setattr(gpu_link, "PIN_BYTES", 1 << 24)
    rows = gpu_link.run(SETTINGS, None, False).rows
    assert len(rows) == 10
    assert all(row["time_us"] > 0 for row in rows)


def row(allocated: int | None, reserved: int | None) -> dict[str, Any]:
    return {"allocated_bytes": allocated, "reserved_bytes": reserved}


@pytest.mark.parametrize(
    ("rows", "grew"),
    [
        ([(1, 8), (5, 8), (5, 8), (4, 8)], None),
        ([(5, 8), (5, 8), (6, 8), (5, 8)], "allocated_bytes grew from 5 after 2 passes to 6"),
        ([(5, 8), (5, 8), (5, 9)], "reserved_bytes grew from 8 after 2 passes to 9"),
        ([(None, None)] * 3, None),
    ],
)
def test_memory_that_grows_is_said(
    rows: list[tuple[int | None, int | None]], grew: str | None
) -> None:
    made = [row(*each) for each in rows]
    if grew is None:
        soak.check_flat(made)
        return
    with pytest.raises(SpeqError, match=grew):
        soak.check_flat(made)


def test_a_soak_runs_until_its_time_is_over(tiny: Callable[[str], Path]) -> None:
    """Ten seconds, where a look at the clock takes two of them."""
    marks = iter(range(0, 1000, 2))
    settings = SoakSettings(
        memory_budget="64MiB",
        seconds=10,
        num_prompts=1,
        max_new_tokens=4,
        run={"device": "cpu", "draft_length": 2},
    )
    rows = soak.run(str(tiny("olmoe")), settings, None, False, clock=lambda: next(marks)).rows
    assert [each["at_s"] for each in rows] == [2, 4, 6, 10]
    assert {each["tokens"] for each in rows} == {4}
    assert {each["reserved_bytes"] for each in rows} == {None}
    assert all(0 < each["process_bytes"] < 1 << 40 for each in rows)


def test_a_process_has_the_memory_that_it_takes() -> None:
    before = process_bytes()
    taken = bytearray(b"x" * (64 << 20))
    assert process_bytes() - before >= len(taken) // 2
