"""A terminal of the tests' own: the system's pseudo-terminal, with an emulator at the other end."""

import fcntl
import io
import os
import pty
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyte

# A terminal that has not drawn what was written by then hangs.
PATIENCE_S = 30


class Screen(pyte.HistoryScreen):
    """Keeps lines that leave it at the top."""

    def __init__(self, columns: int, lines: int) -> None:
        super().__init__(columns, lines, history=10_000)

    def text(self) -> list[str]:
        """All lines so far, without blanks at their ends, up to the last one with text."""
        rows: list[Any] = [*self.history.top, *(self.buffer[y] for y in range(self.lines))]
        lines = ["".join(row[x].data for x in range(self.columns)).rstrip() for row in rows]
        while lines and not lines[-1]:
            lines.pop()
        return lines


class Terminal:
    """stream: what is written there is drawn on `screen`. sent: all of it, as it came"""

    def __init__(self, columns: int, lines: int) -> None:
        self._master, slave = pty.openpty()
        self._slave = slave
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.stream = io.TextIOWrapper(io.FileIO(slave, "w"), "utf-8", write_through=True)
        self.screen = Screen(columns, lines)
        self._emulator = pyte.ByteStream(self.screen)
        self._drawn = threading.Condition()
        self._marks = 0
        self.sent = b""
        self._thread = threading.Thread(target=self._draw, daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Return when all that was written is drawn: a title behind it has come."""
        self._marks += 1
        mark = f"mark {self._marks}"
        self.stream.write(f"\x1b]2;{mark}\x07")
        with self._drawn:
            assert self._drawn.wait_for(lambda: self.screen.title == mark, PATIENCE_S)

    @property
    def text(self) -> list[str]:
        self.settle()
        return self.screen.text()

    @property
    def rows(self) -> list[str]:
        """What is on the screen now."""
        self.settle()
        return [line.rstrip() for line in self.screen.display]

    def close(self) -> None:
        self.stream.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        os.close(self._master)

    def _draw(self) -> None:
        while True:
            try:
                read = os.read(self._master, 1 << 16)
            except OSError:  # nobody holds the other end any more
                return
            if not read:
                return
            with self._drawn:
                self.sent += read
                self._emulator.feed(read)
                self._drawn.notify_all()


@contextmanager
def terminal(columns: int, lines: int) -> Iterator[Terminal]:
    made = Terminal(columns, lines)
    try:
        yield made
    finally:
        made.close()


def plainly(text: str, columns: int, lines: int) -> list[str]:
    """The lines of a terminal that a text was written to and nothing else."""
    with terminal(columns, lines) as plain:
        plain.stream.write(text)
        return plain.text
