"""What was measured or recorded earlier: tuned profiles and routes."""

import random
from pathlib import Path

from tests.fuzz.case import Case, Expect
from tests.fuzz.checkpoints import json_damage
from tests.fuzz.damage import INSTEAD, TEXT, apply, copied
from tests.fuzz.sound import MEMORY, Sound, generate
from tests.fuzz.target import speq

JSON = (*[json_damage] * 10, *TEXT, *INSTEAD)


def profiles(rng: random.Random, sound: Sound, room: Path) -> Case:
    """A profile that is named, or the one that is kept: no figure in it changes the text."""
    copied(sound.model, room / "model")
    copied(sound.tuned, room / "home")
    (path,) = (room / "home").rglob("profiles/*.json")
    text = sound.text(generate("model", "--draft-length", "0"), room)
    name = str(path.relative_to(room))
    planned = speq("plan", "model", *MEMORY, "--profile", name)
    command = rng.choice((generate("model", "--profile", name), generate("model"), planned))
    label = apply(rng, path, JSON)
    expect = Expect.ANY if command is planned else Expect.SAME_OR_REFUSED
    return Case(label, (command,), expect, text)


def routes(rng: random.Random, sound: Sound, room: Path) -> Case:
    copied(sound.model, room / "model")
    path = copied(sound.routes, room / "routes.json")
    rates = ("--preset", "laptop-ddr5")
    command = speq("plan", "model", *MEMORY, *rates, sound.routes_option, path.name)
    return Case(apply(rng, path, JSON), (command,), Expect.ANY)
