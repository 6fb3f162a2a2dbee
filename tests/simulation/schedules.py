"""Schedules by their seeds: what they find, and how few of their events still find it."""

import random
from collections.abc import Sequence
from pathlib import Path

from tests.simulation.clients import ServedSimulation
from tests.simulation.play import KINDS, Event, Simulation
from tests.simulation.world import World


def schedule_of(world: World, seed: int, length: int) -> list[Event]:
    rng = random.Random(seed)
    often = world.events if world.served else KINDS | world.events
    kinds = rng.choices([*often], [*often.values()], k=length)
    return [Event(kind, rng.randrange(1 << 30)) for kind in kinds]


def simulation_of(world: World, root: Path) -> Simulation | ServedSimulation:
    return ServedSimulation(world) if world.served else Simulation(world, root)


def found_in(world: World, events: Sequence[Event], root: Path) -> BaseException | None:
    """What a schedule finds; None: nothing."""
    try:
        simulation_of(world, root).play(events)
    except (Exception, KeyboardInterrupt) as error:
        return error
    return None


def shrunk(world: World, events: Sequence[Event], root: Path) -> list[Event]:
    """The fewest events that still find something, by leaving out ever smaller parts."""
    kept, size = list(events), max(len(events) // 2, 1)
    while size:
        at = 0
        while at < len(kept):
            fewer = kept[:at] + kept[at + size :]
            if fewer and found_in(world, fewer, root) is not None:
                kept = fewer
            else:
                at += size
        size //= 2
    return kept
