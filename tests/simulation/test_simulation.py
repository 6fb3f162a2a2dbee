"""Schedules find nothing, and find each fault that is planted."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.simulation.planted import PLANTED, Planted
from tests.simulation.play import Event
from tests.simulation.schedules import found_in, schedule_of, shrunk
from tests.simulation.world import KINDS, World, world_of

LENGTH = 40
# Worlds whose schedules are run each time.
QUICK = ("batch", "tree", "stages")
# Planted faults that many schedules do not meet.
RARE = (
    "failed reads are published",
    "signatures are not compared",
    "checksums are not compared",
    "slots are taken from under transfers",
)
# Of a world, until a planted fault must be found.
MOST = 200


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    made: dict[str, World] = {}
    root = tmp_path_factory.mktemp("worlds")

    def world(name: str) -> World:
        if name not in made:
            made[name] = world_of(name, root)
        return made[name]

    return world


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        *((name, range(1000, 1002)) for name in QUICK),
        *(
            pytest.param(name, range(1002 if name in QUICK else 1000, 1025), marks=pytest.mark.wide)
            for name in KINDS
        ),
        *(
            pytest.param(name, range(first, first + 22), marks=pytest.mark.full)
            for first in (1025, 1047, 1069)
            for name in KINDS
        ),
    ],
    ids=str,
)
def test_nothing_is_found(
    name: str, seeds: range, worlds: Callable[[str], World], tmp_path: Path
) -> None:
    world = worlds(name)
    for seed in seeds:
        found = found_in(world, schedule_of(world, seed, LENGTH), tmp_path)
        assert found is None, f"python -m tests.simulation --world {name} --seed {seed}: {found!r}"


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=pytest.mark.full if fault in RARE else pytest.mark.wide)
        for fault in PLANTED
    ],
)
def test_a_planted_fault_is_found(
    fault: str, worlds: Callable[[str], World], tmp_path: Path
) -> None:
    name, plant = PLANTED[fault]
    world = worlds(name)
    events = first_that_finds(world, plant, tmp_path)
    assert found_in(world, events, tmp_path) is None
    with plant():
        assert found_in(world, events, tmp_path) is not None


@pytest.mark.wide
def test_what_finds_a_fault_is_made_short(worlds: Callable[[str], World], tmp_path: Path) -> None:
    name, plant = PLANTED["a used slot is given back"]
    world = worlds(name)
    events = first_that_finds(world, plant, tmp_path)
    with plant():
        fewer = shrunk(world, events, tmp_path)
        assert 0 < len(fewer) < len(events) / 4
        assert found_in(world, fewer, tmp_path) is not None
    assert found_in(world, fewer, tmp_path) is None


def first_that_finds(world: World, plant: Callable[[], Planted], root: Path) -> list[Event]:
    """The first schedule that finds a planted fault."""
    with plant():
        for seed in range(MOST):
            events = schedule_of(world, seed, LENGTH)
            if found_in(world, events, root) is not None:
                return events
    raise AssertionError("the fault is not found")
