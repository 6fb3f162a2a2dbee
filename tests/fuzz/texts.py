"""Text that users give: to calibrate on, and to go on from."""

import json
import random
from pathlib import Path
from typing import Any

from tests.fuzz.case import Case, Expect
from tests.fuzz.damage import DEEP, INSTEAD, TEXT, apply, change_lines, copied, short
from tests.fuzz.sound import BUDGET, CALIBRATION, NEW_TOKENS, Sound, quantize
from tests.fuzz.target import Command, speq

# Of the sound text, what JSON Lines have a row of.
ROWS = CALIBRATION.splitlines()
ODD_TEXTS = (
    "",
    "\n",
    "\0" * 3000,
    "\ud7ff" * 3000,
    "\u202e\u0301" * 2000,
    "{}\n" * 100,
    "x" * 10**6,
)


def calibration(rng: random.Random, sound: Sound, room: Path) -> Case:
    copied(sound.half, room / "half")
    path = room / "text.txt"
    expect = Expect.ANY
    way = rng.choice(("lines", "lines", "text", "instead", "odd", "folder"))
    if way == "lines":
        path = room / "text.jsonl"
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
        label = change_lines(rng, path)
    elif way == "odd":
        text = rng.choice(ODD_TEXTS)
        path.write_text(text)
        label = f"calibrated on {short(text)!r}"
    elif way == "folder":
        path = rng.choice((room, room / "half", Path("/dev/null"), Path("/dev/zero"), Path("")))
        label, expect = f"calibrated on {path}", Expect.REFUSED
    else:
        path.write_text(CALIBRATION)
        label = apply(rng, path, TEXT if way == "text" else INSTEAD)
    command = quantize("--calibration", path)
    return Case(label, (command,), expect, kept=("*.activations",))


# Texts that a byte-level tokenizer takes as they are.
GOOD_TEXTS = (
    *(
        "a",
        " ",
        "\n\n",
        "\t \r\n",
        "é" * 20,
        "\u202eabc",
        "👩\u200d👩\u200d👧",
        "\ufeff",
        "\x07\x1b[2J",
        "%s{}",
    ),
    *("<|end|>", "<|end|>" * 20, "[/red]", "[bold]x[/bold]", "--help", "-", "a" * 400, "\x7f" * 50),
)
BAD_PROMPTS: tuple[Any, ...] = (
    *("", [], {}, None, 1, 1.5, True, "a" * 100_000, "\ud800", [[1]], [None], ["a"], [1.0], [True]),
    *([-1], [10**19], [264], [1] * 100_000, [1, "a"], [{}], [{"role": "user"}], [{"content": 1}]),
    *([{"role": "user", "content": None}], [{"role": [], "content": {}}], [{"odd": "object"}]),
    *(
        {"odd": n}
        for n in ("bytes", "bytearray", "memoryview", "set", "complex", "object", "class")
    ),
    *({"odd": n} for n in ("path", "iterator", "ellipsis", "decimal")),
)


def prompts(rng: random.Random, sound: Sound, room: Path) -> Case:
    """Text through the command, and prompts of every kind through the library.

    A text's tokens must be those that follow its token ids.
    """
    copied(sound.model, room / "model")
    way = rng.choice(("good", "good", "ids", "bad", "command", "bytes", "mixed"))
    if way == "bad":
        prompt = rng.choice(BAD_PROMPTS)
        return Case(f"prompt {short(repr(prompt))}", (asking(prompt),), Expect.REFUSED)
    if way == "command":
        text = rng.choice((*GOOD_TEXTS, "", "a" * 100_000, "\udcff", "x" * DEEP))
        command = speq(
            *("generate", "--model", "model", "--memory-budget", BUDGET),
            *("--max-new-tokens", NEW_TOKENS, f"--prompt={text}"),
        )
        unfit = len(text.encode("utf-8", "surrogatepass")) > 500 or text in ("", "\udcff")
        expect = Expect.REFUSED if unfit else Expect.ANY
        return Case(f"--prompt {short(ascii(text))}", (command,), expect)
    if way == "ids":
        ids = [rng.randrange(264) for _ in range(rng.randrange(1, 400))]
        return Case(
            f"{len(ids)} token ids", (asking(ids),), Expect.SAME, same_twice(sound, ids, room)
        )
    if way == "good":
        text = rng.choice(GOOD_TEXTS)
    elif way == "bytes":
        text = rng.randbytes(rng.randrange(1, 200)).decode("utf-8", "replace")[:150]
    else:
        text = "".join(rng.choice(GOOD_TEXTS)[:10] for _ in range(rng.randrange(1, 12)))
    ids = sound.tokenizer.encode(text).ids
    wanted = same_twice(sound, ids, room)
    return Case(f"prompt {short(ascii(text))}", (asking(text),), Expect.SAME, wanted)


def same_twice(sound: Sound, ids: list[int], room: Path) -> str:
    """The tokens that follow some ids, decoded without a draft."""
    return sound.text(asking(ids, draft="none"), room)


def asking(prompt: Any, **options: Any) -> Command:
    load = {"model": "model", "memory_budget": BUDGET, "draft_length": 2} | options
    if load.get("draft") == "none":
        del load["draft_length"]
    request = {"prompt": prompt, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return Command(kind="library", load=load, requests=(request,))
