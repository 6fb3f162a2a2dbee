"""Damage to what an interrupted command left: to lines of its journal, and to its files."""

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Changes a folder.
Damage = Callable[[Path], None]
PACKING = "experts.journal"


def line_of(value: Any, before: int = 0) -> bytes:
    """A journal's line, written by hand. before: CRC of the line before it."""
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return b"%08x %s\n" % (zlib.crc32(text, before), text)


def lines(change: Callable[[list[bytes]], list[bytes]], name: str = PACKING) -> Damage:
    """Change a journal's lines, each with its end."""

    def damage(folder: Path) -> None:
        journal = folder / name
        journal.write_bytes(b"".join(change(journal.read_bytes().splitlines(keepends=True))))

    return damage


def last(value: Any, name: str = PACKING) -> Damage:
    """Put a value into the last line, with a sound checksum."""
    return lines(lambda found: [*found[:-1], line_of(value, int(found[-2][:8], 16))], name)


def flip_byte(path: Path, at: int) -> None:
    """Flip a bit of one byte."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def flip(name: str, at: float) -> Damage:
    """Flip a bit at a share of a file's length."""

    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[int(at * len(content))] ^= 16
        (folder / name).write_bytes(content)

    return damage


def resized(name: str, change: Callable[[int], int]) -> Damage:
    return lambda folder: os.truncate(folder / name, change((folder / name).stat().st_size))
