"""Packs and quantisations that go on after an interruption, with what they find damaged."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.fuzz.case import Case, Expect, Make, contents
from tests.fuzz.damage import (
    BYTES,
    INSTEAD,
    LITERALS,
    TEXT,
    Damage,
    apply,
    change_lines,
    copied,
    dangling,
    linked,
    short,
)
from tests.fuzz.sound import CODECS, Sound, generate, pack, quantize
from tests.fuzz.target import Command, Ended

JOURNAL = ".journal"
TEMPORARY = {JOURNAL, ".activations", ".partial"}
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
        # Killed at one of its last syncs, a command leaves a whole model beside what it removes.
        model = {
            name: data
            for name, data in contents(found).items()
            if Path(name).suffix not in TEMPORARY
        }
        if opened.succeeded and unlike(model, contents(self.wanted)):
            return ["refused, and left a folder that opens"]
        return []


def unlike(found: dict[str, bytes | None], wanted: dict[str, bytes | None]) -> list[str]:
    names = sorted({name for name, _ in found.items() ^ wanted.items()})
    return [f"ended well, unlike an undisturbed one in {', '.join(names)}"] if names else []


def going_on(
    rng: random.Random,
    sound: Sound,
    room: Path,
    command: Command,
    wanted: Path,
    opens: Command,
    known: Damage | None = None,
) -> Case:
    """A command killed at one of its syncs; a file that it left is damaged; it goes on.

    known  what happens to its journal, of a command that was killed late
    """
    count = sound.syncs(command) - 2 if known else rng.randrange(2, sound.syncs(command) + 1)
    copied(sound.half, room / "half")
    copied(sound.calibration, room / "text.txt")
    out = copied(sound.begun(command, count), room / "out")
    journals = list(out.glob(f"*{JOURNAL}"))
    others = sorted(path for path in out.iterdir() if path.suffix != JOURNAL and path.is_file())
    if known is not None:
        label = known(rng, journals[0])
    elif journals and (not others or rng.random() < 0.6):
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
        kept=tuple(f"*{suffix}" for suffix in sorted(TEMPORARY - {JOURNAL})),
        check=Finished(room, wanted, sound, opens),
    )


def resumed_packs(
    rng: random.Random, sound: Sound, room: Path, known: Damage | None = None
) -> Case:
    codec = rng.choice(CODECS)
    return going_on(rng, sound, room, pack(codec), sound.packed(codec), generate("out"), known)


def resumed_quantisations(
    rng: random.Random, sound: Sound, room: Path, known: Damage | None = None
) -> Case:
    opens = generate("half", "--draft", "out", "--draft-length", "2")
    return going_on(rng, sound, room, quantize(), sound.quantised, opens, known)


def second_line(rng: random.Random, path: Path, literal: str) -> str:
    lines = path.read_text().split("\n")
    lines[1] = literal
    path.write_text("\n".join(lines))
    return f"line 2 of {path.name} is {short(literal)}"


def first_number(rng: random.Random, path: Path, literal: str) -> str:
    """Another value for the first number of line 2."""
    lines = path.read_text().split("\n")
    lines[1] = re.sub(r"(?<![\w.\"-])\d+(?![\w.\"])", literal, lines[1], count=1)
    path.write_text("\n".join(lines))
    return f"the first number of line 2 of {path.name} is {short(literal)}"


def second_twice(rng: random.Random, path: Path) -> str:
    lines = path.read_text().split("\n")
    path.write_text("\n".join([*lines[:2], *lines[1:]]))
    return f"line 2 of {path.name} is there twice"


KNOWN_JOURNALS: tuple[Damage, ...] = (
    *(partial(second_line, literal=literal) for literal in ("null", "[]", '[[1], "x", NaN]')),
    partial(second_line, literal=LITERALS["deep"][0]),
    *(partial(first_number, literal=literal) for literal in ("-1", "true", "7", '"x"', "NaN")),
    second_twice,
)
KNOWN_PACKS: tuple[Make, ...] = tuple(
    partial(resumed_packs, known=known) for known in KNOWN_JOURNALS
)
KNOWN_QUANTISATIONS: tuple[Make, ...] = tuple(
    partial(resumed_quantisations, known=known) for known in KNOWN_JOURNALS
)
