"""What was measured or recorded earlier: tuned profiles and routes."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.case import Case, Expect, Make
from tests.fuzz.checkpoints import json_damage
from tests.fuzz.damage import INSTEAD, LITERALS, TEXT, apply, copied
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


def wrong_figures(
    rng: random.Random, sound: Sound, room: Path, name: str, value: Any, key: bool = False
) -> Case:
    """A named profile with one value that cannot have been measured, or barely."""
    copied(sound.model, room / "model")
    copied(sound.tuned, room / "home")
    (path,) = (room / "home").rglob("profiles/*.json")
    text = sound.text(generate("model", "--draft-length", "0"), room)
    profile = json.loads(path.read_text())
    (profile["key"] if key else profile)[name] = value
    path = room / "profile.json"
    path.write_text(json.dumps(profile))
    command = generate("model", "--profile", path.name)
    return Case(f"profile: {name} is {value}", (command,), Expect.SAME_OR_REFUSED, text)


def deep_profile(rng: random.Random, sound: Sound, room: Path) -> Case:
    copied(sound.model, room / "model")
    (room / "profile.json").write_text(LITERALS["deep"][0])
    command = generate("model", "--profile", "profile.json")
    return Case("a deep profile", (command,), Expect.REFUSED)


TINY, HUGE = 5e-324, 1e308
KNOWN_PROFILES: tuple[Make, ...] = (
    partial(wrong_figures, name="codec", value=[]),
    partial(wrong_figures, name="budget_bytes", value=[1], key=True),
    *(
        partial(wrong_figures, name=name, value=value)
        for name in ("verify", "distinct")
        for value in ([[TINY, TINY], [2 * TINY, TINY]], [[TINY, 1e-3], [HUGE, 1.0]])
    ),
    deep_profile,
)


def routes(rng: random.Random, sound: Sound, room: Path) -> Case:
    copied(sound.model, room / "model")
    path = copied(sound.routes, room / "routes.json")
    rates = ("--preset", "laptop-ddr5")
    command = speq("plan", "model", *MEMORY, *rates, sound.routes_option, path.name)
    return Case(apply(rng, path, JSON), (command,), Expect.ANY)
