"""Busy loops run beside a measurement, as many as asked for, and end with it."""

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from speq.bench.neighbours import beside_neighbours, neighbours


def children() -> set[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


def busy_ticks(pid: int) -> int:
    """Time that a process has computed for, in the kernel's ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11])


def test_neighbours_compute_and_end_with_the_block() -> None:
    before = children()
    with neighbours(2):
        loops = children() - before
        assert len(loops) == 2
        deadline = time.monotonic() + 60
        while min(map(busy_ticks, loops)) < 3:
            assert time.monotonic() < deadline, "a neighbour does not compute"
    assert children() == before


def test_neighbours_end_where_the_block_fails() -> None:
    before = children()
    with pytest.raises(ValueError, match="as planned"), neighbours(1):
        raise ValueError("as planned")
    assert children() == before


@dataclass(frozen=True)
class Settings:
    neighbours: int


@beside_neighbours
def run(model: str, settings: Settings) -> tuple[str, int]:
    return model, len(children())


def test_bench_runs_beside_as_many_as_its_settings_say() -> None:
    idle = len(children())
    assert run("m", Settings(0)) == ("m", idle)
    assert run("m", settings=Settings(2)) == ("m", idle + 2)
