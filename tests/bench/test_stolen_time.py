"""Processor time that a host gave to others."""

from pathlib import Path

import pytest

from speq.bench.stolen_time import ProcessorTime

BEFORE = "cpu  100 20 30 4000 50 6 4 10 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"
AFTER = "cpu  150 20 40 9000 70 6 4 30 7 0\n"


def read(path: Path, text: str) -> ProcessorTime:
    path.write_text(text)
    return ProcessorTime.now(path)


def test_the_share_is_of_the_time_that_was_wanted(tmp_path: Path) -> None:
    before, after = read(tmp_path / "before", BEFORE), read(tmp_path / "after", AFTER)
    assert (before.used, before.stolen) == (160, 10)
    # 60 ticks were used and 20 stolen; idle ones do not count.
    assert before.stolen_share(after) == pytest.approx(0.25)
    assert before.stolen_share(before) == 0.0


@pytest.mark.parametrize("text", ["", "intr 1 2 3\n", "cpu 1 2 3\n"])
def test_a_kernel_that_does_not_tell_counts_nothing(tmp_path: Path, text: str) -> None:
    assert read(tmp_path / "stat", text) == ProcessorTime()
    assert ProcessorTime.now(tmp_path / "nothing") == ProcessorTime()
