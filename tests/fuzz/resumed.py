"""Packs and quantisations that go on after an interruption, with what they find damaged."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.case import Case, Expect, contents
from tests.fuzz.damage import BYTES, INSTEAD, TEXT, apply, change_lines, copied, dangling, linked
from tests.fuzz.sound import CODECS, Sound, generate, pack, quantize
from tests.fuzz.target import Command, Ended

# A symlink to a file is as good as the file, and leaves that other file in the folder.
REPLACED = tuple(way for way in INSTEAD if way not in (linked, dangling))


@dataclass(frozen=True)
class Finished:
    """What the folder `out` of a room must be: an undisturbed one, or no model at all."""

    room: Path
    wanted: Path
    sound: Sound
    opens: Command

    def __call__(self, ended: Ended) -> list[str]:
        found = self.room / "out"
        if ended.succeeded:
            return unlike(contents(found), contents(self.wanted))
        opened = self.sound.target.run(self.opens, self.room)
        if opened.succeeded and unlike(contents(found), contents(self.wanted)):
            return ["refused, and left a folder that opens"]
        return []


def unlike(found: dict[str, bytes | None], wanted: dict[str, bytes | None]) -> list[str]:
    names = sorted({name for name, _ in found.items() ^ wanted.items()})
    return [f"ended well, unlike an undisturbed one in {', '.join(names)}"] if names else []


def going_on(
    rng: random.Random, sound: Sound, room: Path, command: Command, wanted: Path, opens: Command
) -> Case:
    """A command killed at one of its syncs; a file that it left is damaged; it goes on."""
    count = rng.randrange(2, sound.syncs(command) + 1)
    copied(sound.half, room / "half")
    copied(sound.calibration, room / "text.txt")
    out = copied(sound.begun(command, count), room / "out")
    journals = list(out.glob("*.journal"))
    others = sorted(path for path in out.iterdir() if path.suffix != ".journal" and path.is_file())
    if journals and (not others or rng.random() < 0.6):
        ways: tuple[Callable[[random.Random, Path], str], ...] = (*[change_lines] * 12, *TEXT)
        label = apply(rng, journals[0], (*ways, rng.choice(REPLACED)))
    elif others:
        label = apply(rng, rng.choice(others), (*BYTES, rng.choice(REPLACED)))
    else:
        label = "nothing"
    return Case(
        f"killed at sync {count}, then {label}",
        (command,),
        Expect.ANY,
        kept=("*.activations", "*.partial"),
        check=Finished(room, wanted, sound, opens),
    )


def resumed_packs(rng: random.Random, sound: Sound, room: Path) -> Case:
    codec = rng.choice(CODECS)
    return going_on(rng, sound, room, pack(codec), sound.packed(codec), generate("out"))


def resumed_quantisations(rng: random.Random, sound: Sound, room: Path) -> Case:
    opens = generate("half", "--draft", "out", "--draft-length", "2")
    return going_on(rng, sound, room, quantize(), sound.quantised, opens)
