"""Play schedules: `python -m tests.simulation --schedules 300 --seed 1`."""

import argparse
import logging
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

from tests.simulation.schedules import found_in, schedule_of, shrunk, simulation_of
from tests.simulation.world import KINDS, world_of

# Events of a schedule.
LENGTH = 40


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=80, help="of all worlds together")
    parser.add_argument("--seed", type=int, default=0, help="of the first; others follow")
    parser.add_argument("--world", choices=KINDS, help="this one alone")
    parser.add_argument("--length", type=int, default=LENGTH, help="events of a schedule")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("speq").setLevel(logging.ERROR)  # what is struck is said in warnings
    names = [*KINDS] if given.world is None else [given.world]
    found, counts, start_s = 0, Counter[str](), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="speq-simulation-") as folder:
        root = Path(folder)
        worlds = {name: world_of(name, root) for name in names}
        for number in range(given.schedules):
            seed = given.seed + number
            world = worlds[names[seed % len(names)]]
            events = schedule_of(world, seed, given.length)
            simulation = simulation_of(world, root)
            try:
                simulation.play(events)
                counts.update(simulation.counts)
                continue
            except (Exception, KeyboardInterrupt) as error:
                found += 1
                print(f"world {world.name}, seed {seed}:", flush=True)
                traceback.print_exception(error, limit=-6)
            fewer = shrunk(world, events, root)
            print(f"{len(fewer)} events do: {fewer}\n{found_in(world, fewer, root)!r}", flush=True)
    spent_s = time.monotonic() - start_s
    print(f"{found} of {given.schedules} schedules found something, {spent_s:.0f} s")
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
