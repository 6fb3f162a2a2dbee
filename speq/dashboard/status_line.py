"""A line below text that comes, which says how fast it comes and what experts cost."""

import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.cells import get_character_cell_size

from speq.measure.console import console
from speq.stats import Recorder, StepStats, ratio
from speq.units import Clock

# Steps that figures are averages of: enough to be steady, few enough to follow.
WINDOW = 16
# Between two sets of figures, at least.
EVERY_S = 0.25
TAB = 8
# Makes room below the text, and comes back to where the text goes on.
MAKE_ROOM = "\x1bD\x1b[A"
SAVE, RESTORE, BELOW = "\x1b7", "\x1b8", "\x1b[B\r"
# Only the next line: behind a carriage return text stands at the right.
CLEAR_BELOW = f"{SAVE}{BELOW}\x1b[J{RESTORE}"


def is_terminal() -> bool:
    """Return whether a line can be redrawn on standard output."""
    return sys.stdout.isatty() and not console().is_dumb_terminal


def format_figures(steps: list[StepStats]) -> str:
    """Figures of decode steps, as wide for each value."""

    def total(name: str) -> float:
        return float(sum(getattr(step, name) for step in steps))

    def show(above: float, below: float, form: str, width: int) -> str:
        value = ratio(above, below)
        return ("-" if value is None else format(value, form)).rjust(width)

    emitted, drafted = total("emitted"), total("draft_length")
    return "  ".join(
        (
            f"{show(emitted, total('duration_s'), '.1f', 6)} tokens/s",
            f"draft {show(drafted, len(steps), '.1f', 4)}",
            f"accepted {show(total('accepted'), drafted, '.0%', 4)}",
            f"moved {show(total('moved_bytes') / (1 << 20), emitted, '.2f', 7)} MiB/token",
            f"hits {show(total('hits'), total('requests'), '.0%', 4)}",
        )
    )


class StatusLine:
    """Writes text to a terminal, and the line below it. clock: gives seconds"""

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._steps: deque[StepStats] = deque(maxlen=WINDOW)
        self._figures, self._due_s = "", clock()
        self._column, self._drawn = 0, False

    def note_step(self, step: StepStats) -> None:
        if step.phase == "prefill":
            self._steps.clear()
        else:
            self._steps.append(step)

    def write(self, text: str) -> None:
        if self._clock() >= self._due_s:
            self._figures = format_figures([*self._steps])
            self._due_s = self._clock() + EVERY_S
        columns = os.get_terminal_size(self._stream.fileno()).columns
        self._advance(text, columns)
        cleared = CLEAR_BELOW if self._drawn else ""
        # Behind the last column the cursor stands on it until the next character comes, and some
        # terminals forget this when it is restored.
        self._drawn = columns > 0 and self._column < columns
        line = f"{MAKE_ROOM}{SAVE}{BELOW}{self._figures[: columns - 1]}{RESTORE}"
        self._stream.write(cleared + text + (line if self._drawn else ""))
        self._stream.flush()

    def close(self) -> None:
        """Leave nothing but the text."""
        if self._drawn:
            self._stream.write(CLEAR_BELOW)
            self._stream.flush()

    def _advance(self, text: str, columns: int) -> None:
        """Follow the cursor through a text."""
        for character in text:
            if character in "\n\r":
                self._column = 0
            elif character == "\t":
                self._column = min((self._column // TAB + 1) * TAB, columns - 1)
            else:
                cells = get_character_cell_size(character)
                # What does not fit goes into the next line.
                fits = self._column + cells <= columns
                self._column = self._column + cells if fits else cells


@contextmanager
def status_line(recorder: Recorder) -> Iterator[StatusLine]:
    """A line on standard output, of the steps of this block."""
    line = StatusLine(sys.stdout)
    recorder.listeners.append(line.note_step)
    try:
        yield line
    finally:
        recorder.listeners.remove(line.note_step)
        line.close()
