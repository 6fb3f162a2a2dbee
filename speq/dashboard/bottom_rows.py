"""Rows at the bottom of a terminal that stay where they are while text goes on above them.

All other rows become the terminal's scrolling region (DECSTBM of the VT100, which apt's bar uses
too). So whoever writes text there, in this process or in another one, writes it as ever: no byte of
it is changed or held back. Rows are drawn in one write, between saving and restoring the cursor.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

from rich.cells import get_character_cell_size

SAVE, RESTORE = "\x1b7", "\x1b8"
# A line down in the same column; at the bottom the region scrolls.
DOWN = "\x1bD"
WHOLE_SCREEN, CLEAR_ROW, CLEAR_BELOW = "\x1b[r", "\x1b[2K", "\x1b[J"
# Rows that are left to the text, at least.
TEXT_ROWS = 3
TAB = 8


@dataclass(slots=True)
class TextColumn:
    """Where text leaves the cursor, in a terminal of so many columns.

    Behind the last column the cursor stands on it until the next character comes, and some
    terminals forget this when the cursor is restored: then nothing is drawn.
    """

    columns: int
    at: int = 0

    @property
    def at_edge(self) -> bool:
        return self.at >= self.columns

    def write(self, text: str) -> None:
        for character in text:
            if character in "\n\r":
                self.at = 0
            elif character == "\t":
                self.at = min((self.at // TAB + 1) * TAB, self.columns - 1)
            else:
                cells = get_character_cell_size(character)
                # What does not fit goes into the next line.
                self.at = self.at + cells if self.at + cells <= self.columns else cells


@dataclass(slots=True)
class BottomRows:
    """Rows of a terminal.

    stream      writes there
    reserved    how many rows, in a terminal of which size, or nothing
    drawing     a drawing is being made or written
    when_drawn  what a signal that came meanwhile left to be done
    """

    stream: TextIO
    text: TextColumn = field(default_factory=lambda: TextColumn(1))
    reserved: tuple[int, os.terminal_size] | None = None
    drawing: bool = False
    when_drawn: Callable[[], None] | None = None

    @property
    def size(self) -> os.terminal_size:
        """Columns and lines, zero where the terminal does not say."""
        return os.get_terminal_size(self.stream.fileno())

    def fit(self, rows: int) -> bool:
        """Whether so many rows leave room for text."""
        return self.size.columns > 0 and self.size.lines >= rows + TEXT_ROWS

    def show(self, rows: list[str]) -> None:
        """Draw these rows, without line ends and shorter than the terminal is wide.

        Waits for another time where the text is at the right edge, or the terminal is too small.
        """
        self.drawing = True
        try:
            self._draw(rows)
        finally:
            self.drawing = False
        left, self.when_drawn = self.when_drawn, None
        if left is not None:
            left()

    def _draw(self, rows: list[str]) -> None:
        size = self.size
        self.text.columns = size.columns
        if self.text.at_edge:
            return
        drawing = []
        if self.reserved not in (None, (len(rows), size)):
            # Whatever the terminal made of its rows, they are below the text.
            drawing.append(SAVE + WHOLE_SCREEN + RESTORE + CLEAR_BELOW)
            self.reserved = None
        if self.fit(len(rows)):
            first = size.lines - len(rows) + 1
            if self.reserved is None:
                drawing.append(DOWN * len(rows) + f"\x1b[{len(rows)}A")
                drawing.append(SAVE + f"\x1b[1;{first - 1}r" + RESTORE)
                self.reserved = len(rows), size
            drawing.append(SAVE)
            drawing += [f"\x1b[{first + at};1H{CLEAR_ROW}{row}" for at, row in enumerate(rows)]
            drawing.append(RESTORE)
        self._write("".join(drawing))

    def close(self) -> None:
        """Clear the rows, and give the terminal back as it was."""
        if self.reserved is None:
            return
        rows, size = self.reserved
        self.reserved = None
        if self.size != size:
            self._write(SAVE + WHOLE_SCREEN + RESTORE + CLEAR_BELOW)
            return
        first = size.lines - rows + 1
        cleared = "".join(f"\x1b[{first + at};1H{CLEAR_ROW}" for at in range(rows))
        self._write(SAVE + WHOLE_SCREEN + cleared + RESTORE)

    def _write(self, drawing: str) -> None:
        if drawing:
            self.stream.write(drawing)
            self.stream.flush()
