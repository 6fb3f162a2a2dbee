"""Cases by class, seed and number: the same three make the same case, whatever ran before."""

import contextlib
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fuzz.case import Outcome, run
from tests.fuzz.sound import Sound, unlocked
from tests.fuzz.table import CLASSES
from tests.fuzz.target import Limits, Target


@contextmanager
def opened(python: Path, root: Path, limits: Limits | None = None) -> Iterator["Campaign"]:
    """A campaign against the speq of an interpreter, with its files below `root`."""
    with Target(python, limits) as target:
        (root / "sound").mkdir()
        yield Campaign(Sound(root / "sound", target), root)


class Campaign:
    """Makes cases and runs them, each in a room that is gone afterwards."""

    def __init__(self, sound: Sound, root: Path) -> None:
        self.sound, self.root = sound, root

    def outcome(self, name: str, seed: int, number: int) -> Outcome:
        rng = random.Random(f"{name}:{seed}:{number}")
        room = self.root / f"{name}-{seed}-{number}"
        room.mkdir()
        try:
            case = CLASSES[name].maker(number)(rng, self.sound, room)
            return run(case, self.sound.target, room)
        finally:
            with contextlib.suppress(OSError):
                unlocked(room)
            shutil.rmtree(room)


def repeated(name: str, seed: int, number: int) -> str:
    """The command that runs exactly one case."""
    return f"python -m tests.fuzz --class {name} --seed {seed} --case {number}"
