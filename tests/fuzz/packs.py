"""Packed models, read with `--set verify_reads=true`; kept drafts; GPTQ folders."""

import random
import signal
from functools import partial
from pathlib import Path

from tests.fuzz import damage
from tests.fuzz.case import Case, Expect, Make
from tests.fuzz.checkpoints import json_damage
from tests.fuzz.damage import BYTES, INSTEAD, TEXT, apply, copied
from tests.fuzz.sound import CODECS, Sound, generate
from tests.fuzz.target import killed

DRAFTED = ("--draft-length", "3")
VERIFIED = ("--set", "verify_reads=true")


def damaged(rng: random.Random, folder: Path) -> str:
    """Damage one file of a folder, as is likely to matter for its kind."""
    names = sorted(path for path in folder.iterdir() if path.is_file())
    path = rng.choice(names)
    if rng.random() < 0.1:
        return apply(rng, path, INSTEAD)
    if path.suffix != ".json":
        return apply(rng, path, BYTES)
    return apply(rng, path, (json_damage, json_damage, json_damage, *TEXT))


def packs(rng: random.Random, sound: Sound, room: Path) -> Case:
    codec = rng.choice(CODECS)
    folder = copied(sound.packed(codec), room / codec)
    command = generate(codec, *VERIFIED, *rng.choice(((), DRAFTED)))
    text = sound.text(command, room)
    way = rng.choice(("weights", "weights", "records", "any", "any"))
    if way == "weights":
        path = folder / "model.safetensors"
        first = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        label = damage.scramble(rng, path, first)
    elif way == "records":
        dense = () if codec == "raw" else ("dense.bin",)
        path = folder / rng.choice(("experts.bin", "experts.json", *dense))
        label = apply(rng, path, (json_damage, *TEXT) if path.suffix == ".json" else BYTES)
    else:
        label = damaged(rng, folder)
    return Case(f"{codec}: {label}", (command,), Expect.SAME_OR_REFUSED, text)


def weights(rng: random.Random, sound: Sound, room: Path, codec: str) -> Case:
    """Half of all weights but the experts' have their signs flipped: wrong text, if not noticed."""
    folder = copied(sound.packed(codec), room / codec)
    command = generate(codec, *VERIFIED)
    text = sound.text(command, room)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    first = 8 + int.from_bytes(content[:8], "little")
    # Words of bfloat16, the sign in the second byte.
    half = (len(content) - first) // 4 * 2
    for at in range(first + half + 1, len(content), 2):
        content[at] ^= 0x80
    path.write_bytes(content)
    label = f"{codec}: signs of half of model.safetensors flipped"
    return Case(label, (command,), Expect.REFUSED, text)


KNOWN_PACKS: tuple[Make, ...] = tuple(partial(weights, codec=codec) for codec in CODECS)


def stopped_draft(
    rng: random.Random, sound: Sound, room: Path, number: signal.Signals = signal.SIGTERM
) -> Case:
    """A run is stopped while it writes its draft; the next one leaves nothing of it behind."""
    copied(sound.model, room / "model")
    command = generate("model", *DRAFTED)
    text = sound.text(command, room)
    label = f"the draft's writer got signal {int(number)} at its sync"
    return Case(label, (killed(command, 1, number), command), Expect.SAME, text)


KNOWN_DRAFTS: tuple[Make, ...] = (partial(stopped_draft, number=signal.SIGKILL), stopped_draft)


def drafts(rng: random.Random, sound: Sound, room: Path) -> Case:
    """The rounded INT4 file that a run keeps beside its model: a draft never changes the text."""
    model = copied(sound.drafted, room / "model")
    command = generate("model", *DRAFTED)
    text = sound.text(command, room)
    # The codes of experts, or those of dense layers.
    path = rng.choice(sorted((model / ".speq").iterdir()))
    way = rng.choice(("header", "bytes", "bytes", "instead"))
    if way == "header":
        content = path.read_bytes()
        first = 8 + int.from_bytes(content[:8], "little")
        header, label, _ = damage.changed_json(rng, content[8:first].decode())
        encoded = header.encode("utf-8", "surrogatepass")
        path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[first:])
    else:
        label = apply(rng, path, BYTES if way == "bytes" else INSTEAD)
    return Case(f"draft: {label}", (command,), Expect.SAME_OR_REFUSED, text)


def gptq(rng: random.Random, sound: Sound, room: Path) -> Case:
    """A GPTQ folder to draft with: whatever it says, the text is the model's."""
    copied(sound.half, room / "half")
    copied(sound.quantised, room / "gptq")
    text = sound.text(generate("half", "--draft", "none"), room)
    command = generate("half", "--draft", "gptq", *DRAFTED)
    if rng.random() < 0.15:
        copied(sound.packed("residual"), room / "residual")
        command = generate("residual", "--draft", "gptq", *DRAFTED)
    label = damaged(rng, room / "gptq")
    return Case(label, (command,), Expect.SAME_OR_REFUSED, text)
