"""Published checkpoints: safetensors, index, config and tokenizer."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz import damage
from tests.fuzz.case import Case, Expect, Make
from tests.fuzz.damage import INSTEAD, TEXT, Keys, apply, change_json, copied, set_json
from tests.fuzz.sound import Sound, generate
from tests.fuzz.target import speq

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Fields of config.json that tensors' shapes must agree with.
SHAPES = {
    *("hidden_size", "num_hidden_layers", "vocab_size", "moe_intermediate_size", "num_experts"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "model_type"),
}
HUGE = (10**6, 2**31, 2**31 - 1, 16_000_000, 10**12, 2**63)


def safetensors(rng: random.Random, sound: Sound, room: Path) -> Case:
    path = copied(sound.model, room / "model") / SINGLE
    command = generate("model")
    text = sound.text(command, room)
    content = path.read_bytes()
    first = 8 + int.from_bytes(content[:8], "little")
    expect = Expect.SAME_OR_REFUSED
    way = rng.choice(("values", "header", "header", "bit", "length", "size", "instead"))
    if way == "values":
        # Published weights have no checksums: other values are another model.
        label, expect = damage.scramble(rng, path, first), Expect.ANY
    elif way == "header":
        header, label, _ = damage.changed_json(rng, content[8:first].decode())
        encoded = header.encode("utf-8", "surrogatepass")
        path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[first:])
    elif way == "bit":
        at, bit = rng.randrange(first), rng.randrange(8)
        changed = bytearray(content)
        changed[at] ^= 1 << bit
        path.write_bytes(changed)
        label = f"bit {bit} of byte {at} of the header flipped"
    elif way == "length":
        length = rng.choice((0, 1, first, len(content), 10**8, 2**31, 2**63, 2**64 - 1))
        path.write_bytes(length.to_bytes(8, "little") + content[8:])
        label = f"a header of {length} bytes is promised"
    else:
        label = apply(rng, path, INSTEAD if way == "instead" else (damage.cut, damage.extend))
    return Case(label, (command,), expect, text)


def piped_weights(rng: random.Random, sound: Sound, room: Path) -> Case:
    path = copied(sound.model, room / "model") / SINGLE
    return Case(damage.pipe(rng, path), (generate("model"),), Expect.REFUSED)


def index(rng: random.Random, sound: Sound, room: Path) -> Case:
    path = copied(sound.sharded, room / "model") / INDEX
    command = generate("model")
    text = sound.text(command, room)
    way = rng.choice(("json", "json", "text", "instead", "shard"))
    if way == "json":
        label, _ = change_json(rng, path)
    elif way == "shard":
        label = apply(rng, rng.choice(sorted(path.parent.glob("*.safetensors"))), INSTEAD)
    else:
        label = apply(rng, path, TEXT if way == "text" else INSTEAD)
    return Case(label, (command,), Expect.SAME_OR_REFUSED, text)


def config(rng: random.Random, sound: Sound, room: Path) -> Case:
    model = copied(sound.model, room / "model")
    path = model / "config.json"
    planned = speq("plan", "model", "--memory-budget", "1TiB", "--preset", "laptop-ddr5")
    command = rng.choice((generate("model"), generate("model"), planned))
    text = sound.text(command, room) if command is not planned else None
    expect = Expect.ANY
    way = rng.choice(("json", "json", "json", "shape", "huge", "generation", "text", "instead"))
    if way == "generation":
        label = apply(rng, model / "generation_config.json", (json_damage, *TEXT, *INSTEAD))
    elif way == "json":
        label, keys = change_json(rng, path)
        expect = expected(keys)
    elif way == "shape":
        label, keys = change_json(rng, path, lambda keys: keys[-1] in SHAPES)
        expect = expected(keys)
    elif way == "huge":
        damage.drop_json(path, "layer_types")
        name = rng.choice(sorted(SHAPES - {"model_type"}))
        label = set_json(path, name, rng.choice(HUGE)) + ", without layer_types"
        expect = Expect.REFUSED
        if rng.random() < 0.3:
            command = generate("model", "--memory-budget", "1TiB")
    else:
        label = apply(rng, path, TEXT if way == "text" else INSTEAD)
    if command is planned:
        expect = Expect.ANY
    return Case(label, (command,), expect, text)


def promised(rng: random.Random, sound: Sound, room: Path, name: str, value: int) -> Case:
    """A huge size under a budget that would hold it: it is refused before anything is built."""
    path = copied(sound.model, room / "model") / "config.json"
    damage.drop_json(path, "layer_types")
    label = set_json(path, name, value) + ", without layer_types"
    return Case(label, (generate("model", "--memory-budget", "1TiB"),), Expect.REFUSED)


KNOWN_CONFIG: tuple[Make, ...] = tuple(
    partial(promised, name=name, value=value)
    for name, value in (
        ("num_hidden_layers", 10**6),
        ("num_hidden_layers", 2**31),
        ("vocab_size", 16_000_000),
    )
)


def expected(keys: Keys) -> Expect:
    """Fields that say nothing of shapes make another sound model of another text."""
    return Expect.SAME_OR_REFUSED if keys[0] in SHAPES else Expect.ANY


def json_damage(rng: random.Random, path: Path) -> str:
    return change_json(rng, path)[0]


TALK = speq("chat", "--model", "model", "--memory-budget", "2MiB", stdin="said.txt")
TEMPLATES = (
    "x" * 10_000_000,
    "{{" * 50_000,
    "{% for a in range(10**9) %}x{% endfor %}",
    "{{ messages.__class__.__mro__ }}",
    "{{ 'x' * 10**10 }}",
    "{% for a in messages %}",
    "{{ raise_exception('no') }}",
    "{{ (" * 2000 + "1" + ") }}" * 2000,
    "{{ messages[7]['content'] }}",
    "\ud800",
)


def long_template(rng: random.Random, sound: Sound, room: Path) -> Case:
    model = copied(sound.model, room / "model")
    (room / "said.txt").write_text("hello\n")
    (model / "chat_template.jinja").write_text("{{ 1 }}" * 1_500_000)
    return Case("a chat template of ten million characters", (TALK,), Expect.ANY)


def long_limit(rng: random.Random, sound: Sound, room: Path) -> Case:
    model = copied(sound.model, room / "model")
    label = set_json(model / "tokenizer_config.json", "model_max_length", "x")
    return Case(label, (generate("model"),), Expect.ANY)


def deep_tokenizer(rng: random.Random, sound: Sound, room: Path) -> Case:
    model = copied(sound.model, room / "model")
    (model / "tokenizer_config.json").write_text(damage.LITERALS["deep"][1])
    return Case("tokenizer_config.json is deep", (generate("model"),), Expect.REFUSED)


KNOWN_TOKENIZER = (long_template, long_limit, deep_tokenizer)


def tokenizer(rng: random.Random, sound: Sound, room: Path) -> Case:
    model = copied(sound.model, room / "model")
    (room / "said.txt").write_text("hello\n")
    settings = model / "tokenizer_config.json"
    command = generate("model")
    way = rng.choice(("json", "json", "template", "template", "limit", "text", "instead"))
    name = rng.choice(("tokenizer.json", "tokenizer_config.json"))
    if way == "json":
        label = json_damage(rng, model / name)
    elif way == "template":
        command, template = TALK, rng.choice(TEMPLATES)
        if rng.random() < 0.5:
            (model / "chat_template.jinja").write_text(template, errors="surrogatepass")
            label = f"chat_template.jinja is {damage.short(template)!r}"
        else:
            (model / "chat_template.jinja").unlink()
            label = set_json(settings, "chat_template", template)
    elif way == "limit":
        value: Any = rng.choice(("x", [], {}, -1, 0, 1.5, 10**40, True, float("nan"), None))
        label = set_json(settings, "model_max_length", value)
    elif way == "text":
        label = apply(rng, model / name, TEXT)
    else:
        command = rng.choice((command, TALK))
        label = apply(rng, model / rng.choice((name, "chat_template.jinja")), INSTEAD)
    # Another vocabulary is another text; json keeps the label readable.
    return Case(json.dumps(label, ensure_ascii=True)[1:-1], (command,), Expect.ANY)
