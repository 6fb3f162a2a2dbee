"""What happens to files: each function changes one in place and says in a few words how."""

import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Damage = Callable[[random.Random, Path], str]
Keys = tuple[str | int, ...]

DEEP = 100_000
# Put into JSON as they are, by what they try: some are no JSON, some no reader should follow.
LITERALS: dict[str, tuple[str, ...]] = {
    "simple": ("null", "true", "false", "0", "-1", "1", "2", "3", "1.5", "-0.0"),
    "text": ('""', '"x"', '"1"', '"\\u0000"', '"\\ud800"', '"../x"', '"/dev/zero"', '"nan"'),
    "container": ("[]", "{}", "[1]", "[[[]]]", '{"a": 1}'),
    "not finite": ("NaN", "Infinity", "-Infinity", "1e999"),
    "extreme": ("1e-320", "1e300", str(2**31), str(2**63), str(10**19), str(-(10**19))),
    "long": (str(10**30), "9" * 5000, '"' + "x" * 100_000 + '"'),
    "deep": ("[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP),
}
MARK = "a literal goes here"


def odd_literal(rng: random.Random) -> str:
    return rng.choice(LITERALS[rng.choice(tuple(LITERALS))])


def short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} characters)"


# Bytes.


def flip_bit(rng: random.Random, path: Path) -> str:
    content = bytearray(path.read_bytes())
    at, bit = rng.randrange(len(content)), rng.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {at} of {path.name} flipped"


def scramble(rng: random.Random, path: Path, first: int = 0) -> str:
    """Overwrite up to 512 bytes, not before byte `first`."""
    content = bytearray(path.read_bytes())
    at = rng.randrange(first, len(content))
    length = min(rng.choice((4, 64, 512)), len(content) - at)
    content[at : at + length] = rng.randbytes(length)
    path.write_bytes(content)
    return f"{length} bytes from {at} of {path.name} scrambled"


def zero(rng: random.Random, path: Path) -> str:
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    length = min(4096, len(content) - at)
    content[at : at + length] = bytes(length)
    path.write_bytes(content)
    return f"{length} bytes from {at} of {path.name} zeroed"


def cut(rng: random.Random, path: Path) -> str:
    size = path.stat().st_size
    left = rng.choice((0, 1, max(size - 1, 0), rng.randrange(size)))
    os.truncate(path, left)
    return f"{path.name} cut to {left} of {size} bytes"


def extend(rng: random.Random, path: Path) -> str:
    more = rng.choice((b"\0", b"\0" * 4096, b"}", b"\n", rng.randbytes(100)))
    with path.open("ab") as file:
        file.write(more)
    return f"{len(more)} bytes added to {path.name}"


def swap_blocks(rng: random.Random, path: Path) -> str:
    content = path.read_bytes()
    size = max(len(content) // 8, 1)
    blocks = [content[at : at + size] for at in range(0, len(content), size)]
    first, second = rng.randrange(len(blocks)), rng.randrange(len(blocks))
    blocks[first], blocks[second] = blocks[second], blocks[first]
    path.write_bytes(b"".join(blocks))
    return f"blocks {first} and {second} of {path.name} swapped"


BYTES: tuple[Damage, ...] = (flip_bit, scramble, zero, cut, extend, swap_blocks)


# What stands in place of a file.


def removed(rng: random.Random, path: Path) -> str:
    path.unlink()
    return f"{path.name} removed"


def emptied(rng: random.Random, path: Path) -> str:
    path.write_bytes(b"")
    return f"{path.name} emptied"


def pipe(rng: random.Random, path: Path) -> str:
    path.unlink()
    os.mkfifo(path)
    return f"a named pipe in place of {path.name}"


def folder(rng: random.Random, path: Path) -> str:
    path.unlink()
    path.mkdir()
    return f"a folder in place of {path.name}"


def dangling(rng: random.Random, path: Path) -> str:
    path.unlink()
    path.symlink_to("nothing-there")
    return f"{path.name} is a symlink to nothing"


def loop(rng: random.Random, path: Path) -> str:
    path.unlink()
    path.symlink_to(path.name)
    return f"{path.name} is a symlink to itself"


def device(rng: random.Random, path: Path) -> str:
    path.unlink()
    path.symlink_to(rng.choice(("/dev/null", "/dev/zero")))
    return f"{path.name} is a symlink to {path.readlink()}"


def linked(rng: random.Random, path: Path) -> str:
    """No damage: hub snapshots are symlinks."""
    other = path.with_name(f"{path.name}.linked")
    path.rename(other)
    path.symlink_to(other.name)
    return f"{path.name} is a symlink to a sound file"


def locked(rng: random.Random, path: Path) -> str:
    path.chmod(0)
    return f"{path.name} may not be read"


INSTEAD: tuple[Damage, ...] = (
    removed,
    emptied,
    pipe,
    folder,
    dangling,
    loop,
    device,
    linked,
    locked,
)


# Text.


def not_utf8(rng: random.Random, path: Path) -> str:
    content = path.read_bytes()
    at = rng.randrange(len(content) + 1)
    path.write_bytes(content[:at] + b"\xff\xfe" + content[at:])
    return f"{path.name} is not UTF-8 at byte {at}"


def other_encoding(rng: random.Random, path: Path) -> str:
    encoding = rng.choice(("utf-16", "utf-8-sig", "utf-32"))
    path.write_bytes(path.read_bytes().decode("utf-8", "replace").encode(encoding))
    return f"{path.name} is in {encoding}"


def literal_alone(rng: random.Random, path: Path) -> str:
    literal = odd_literal(rng)
    path.write_text(literal)
    return f"{path.name} is {short(literal)}"


TEXT: tuple[Damage, ...] = (flip_bit, cut, extend, not_utf8, other_encoding, literal_alone)


# JSON.


def places(content: Any, keys: Keys = ()) -> list[Keys]:
    """Keys that lead to each value inside a JSON value."""
    found = [keys] if keys else []
    if isinstance(content, dict):
        for key, value in content.items():
            found += places(value, (*keys, key))
    elif isinstance(content, list):
        for at, value in enumerate(content):
            found += places(value, (*keys, at))
    return found


def changed_json(
    rng: random.Random, text: str, chosen: Callable[[Keys], bool] = bool
) -> tuple[str, str, Keys]:
    """JSON text with one value changed, removed, renamed or repeated; in words; and its keys.

    chosen  which values may be changed
    """
    content = json.loads(text)
    found = [keys for keys in places(content) if chosen(keys)]
    # All depths alike: long lists would otherwise take all the changes.
    depth = rng.choice(sorted({len(keys) for keys in found}))
    keys = rng.choice([keys for keys in found if len(keys) == depth])
    holder = content
    for key in keys[:-1]:
        holder = holder[key]
    key, name = keys[-1], ".".join(map(str, keys))
    way = rng.choice(("literal", "literal", "literal", "near", "removed", "renamed", "wrapped"))
    if way == "near" and isinstance(holder[key], int | float):
        near = rng.choice((1, -1, holder[key], -2 * holder[key], 0.5))
        holder[key] += near
        return json.dumps(content), f"{name} is {holder[key]}", keys
    if way == "removed":
        del holder[key]
        return json.dumps(content), f"{name} removed", keys
    if way == "renamed" and isinstance(holder, dict):
        holder[f"{key}_"] = holder.pop(key)
        return json.dumps(content), f"{name} renamed", keys
    if way == "wrapped":
        holder[key] = [holder[key]]
        return json.dumps(content), f"{name} in a list", keys
    literal = odd_literal(rng)
    holder[key] = MARK
    return json.dumps(content).replace(f'"{MARK}"', literal), f"{name} is {short(literal)}", keys


def change_json(
    rng: random.Random, path: Path, chosen: Callable[[Keys], bool] = bool
) -> tuple[str, Keys]:
    text, label, keys = changed_json(rng, path.read_text(), chosen)
    path.write_text(text)
    return f"{path.name}: {label}", keys


def set_json(path: Path, name: str, value: Any) -> str:
    """Set one field of an object in a file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    return f"{path.name}: {name} is {short(json.dumps(value))}"


def drop_json(path: Path, *names: str) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in content.items() if k not in names}))


# Lines of JSON.


def remove_line(rng: random.Random, lines: list[str]) -> str:
    at = rng.randrange(len(lines))
    del lines[at]
    return f"line {at + 1} removed"


def repeat_line(rng: random.Random, lines: list[str]) -> str:
    at = rng.randrange(len(lines))
    lines.insert(rng.randrange(len(lines) + 1), lines[at])
    return f"line {at + 1} repeated"


def swap_lines(rng: random.Random, lines: list[str]) -> str:
    first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[first], lines[second] = lines[second], lines[first]
    return f"lines {first + 1} and {second + 1} swapped"


def shuffle_lines(rng: random.Random, lines: list[str]) -> str:
    rest = lines[1:]
    rng.shuffle(rest)
    lines[1:] = rest
    return "lines but the first shuffled"


def drop_last_lines(rng: random.Random, lines: list[str]) -> str:
    left = rng.randrange(len(lines) + 1)
    del lines[left:]
    return f"all but {left} lines removed"


def cut_last_line(rng: random.Random, lines: list[str]) -> str:
    left = rng.randrange(len(lines[-1]) + 1)
    lines[-1] = lines[-1][:left]
    return f"last line cut to {left} characters"


def odd_line(rng: random.Random, lines: list[str]) -> str:
    at, literal = rng.randrange(len(lines)), rng.choice(("", " ", *[odd_literal(rng)] * 6))
    lines[at] = literal
    return f"line {at + 1} is {short(literal)}"


def change_line(rng: random.Random, lines: list[str]) -> str:
    at = rng.randrange(len(lines))
    try:
        lines[at], label, _ = changed_json(rng, lines[at])
    except (ValueError, IndexError):  # no JSON, or nothing in it
        return odd_line(rng, lines)
    return f"line {at + 1}: {label}"


def flip_number(rng: random.Random, lines: list[str]) -> str:
    """Another digit somewhere: what a checksum is for."""
    at = rng.randrange(len(lines))
    digits = [place for place, letter in enumerate(lines[at]) if letter.isdigit()]
    if not digits:
        return odd_line(rng, lines)
    place, digit = rng.choice(digits), rng.choice("0123456789")
    lines[at] = f"{lines[at][:place]}{digit}{lines[at][place + 1 :]}"
    return f"line {at + 1}: digit {place} is {digit}"


LINES: tuple[Callable[[random.Random, list[str]], str], ...] = (
    *(remove_line, repeat_line, swap_lines, shuffle_lines, drop_last_lines, cut_last_line),
    *(odd_line, change_line, change_line, change_line, flip_number, flip_number),
)


def change_lines(rng: random.Random, path: Path) -> str:
    text = path.read_text()
    lines = text.removesuffix("\n").split("\n")
    way = rng.choice(LINES)
    label = way(rng, lines)
    # A line that was cut off has no end.
    end = "" if way is cut_last_line or not lines else "\n"
    path.write_text("\n".join(lines) + end, errors="surrogatepass")
    return f"{path.name}: {label}"


def apply(rng: random.Random, path: Path, damages: Sequence[Damage]) -> str:
    return rng.choice(damages)(rng, path)


def copied(source: Path, target: Path) -> Path:
    """A copy to damage."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return target
