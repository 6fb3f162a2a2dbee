"""Journal of an interruptible command: a line for each finished step.

A line is a CRC-32 in eight hexadecimal digits, a space, and a JSON value. The CRC continues from
the line before, so reading ends at a damaged, lost or reordered line.
"""

import json
import logging
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speq.errors import FileError
from speq.files.atomic_file import replacing
from speq.files.json_file import parse_json
from speq.files.regular_file import read_bytes

logger = logging.getLogger("speq")


class Journal:
    """A journal file. header: its first line, an object; entries: the other sound lines."""

    def __init__(self, path: Path, header: dict[str, Any], is_ours: Callable[[str], bool]) -> None:
        """Begin a journal, or read one. Whatever follows its sound lines is dropped with a warning.

        header   header of a new journal
        is_ours  True if the command writes a file of that name, which may be overwritten

        Raises SpeqError if an existing one cannot be read and its folder has other files.
        """
        self.path = path
        self._crc32 = 0
        values, self._ends = [], [0]
        if os.path.exists(path):
            values = self._read()
        if not values or not isinstance(values[0], dict):
            if os.path.exists(path):
                self._check_folder(is_ours)
                logger.warning("%s is damaged: all of it starts again", path)
            values, self._ends, self._crc32 = [header], [0], 0
            line = self._line(header)
            with replacing(path) as file:
                file.write(line)
        self.header: dict[str, Any] = values[0]
        self.entries: list[Any] = values[1:]

    def _read(self) -> list[Any]:
        content = read_bytes(self.path, f"remove {self.path.parent} and begin again")
        values = []
        for line in content.split(b"\n")[:-1]:
            crc32, _, text = line.partition(b" ")
            found = zlib.crc32(text, self._crc32)
            if crc32 != b"%08x" % found:
                break
            try:
                values.append(parse_json(text))
            except ValueError:
                break
            self._crc32 = found
            self._ends.append(self._ends[-1] + len(line) + 1)
        if values and self._ends[-1] != len(content):
            logger.warning(
                "%s is cut off or damaged after line %d; what follows is done again",
                self.path,
                len(values),
            )
            os.truncate(self.path, self._ends[-1])
        return values

    def _check_folder(self, is_ours: Callable[[str], bool]) -> None:
        folder = self.path.parent
        others = sorted(name for name in os.listdir(folder) if not is_ours(name))
        if others:
            raise FileError(
                f"{self.path} is damaged, and {folder} holds {others[0]}; remove the folder if it "
                "is not needed, or choose another"
            )

    def forget(self, count: int) -> None:
        """Drop all entries but the first `count`."""
        if count == len(self.entries):
            return
        # The remaining lines are sound: the last one's CRC covers all before it.
        os.truncate(self.path, self._ends[1 + count])
        del self.entries[count:]
        del self._ends[2 + count :]
        with self.path.open("rb") as file:
            file.seek(self._ends[-2])
            self._crc32 = int(file.read(8), 16)

    def add(self, *entries: Any) -> None:
        """Append lines for finished steps and sync them."""
        lines = b"".join(self._line(entry) for entry in entries)
        with self.path.open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        self.entries += entries

    def _line(self, value: Any) -> bytes:
        text = json.dumps(value).encode()
        self._crc32 = zlib.crc32(text, self._crc32)
        line = b"%08x %s\n" % (self._crc32, text)
        self._ends.append(self._ends[-1] + len(line))
        return line
