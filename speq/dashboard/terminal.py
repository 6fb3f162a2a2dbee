"""The terminal's view of a run under way: a few rows below the text, from step to step."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from speq.dashboard.bottom_rows import TEXT_ROWS, BottomRows
from speq.dashboard.giving_back import given_back, in_foreground
from speq.dashboard.last_steps import LastFigures, LastSteps
from speq.measure.console import console
from speq.stats import Recorder, StepStats
from speq.units import Clock, format_bytes

logger = logging.getLogger("speq")

# Told of text that was written.
Wrote = Callable[[str], None]
# Between two drawings, at least.
EVERY_S = 0.25
# Of the time of steps: field of LastFigures, letter, style. Letters speak without colours.
PARTS = (
    ("draft", "D", "black on cyan"),
    ("verify", "V", "black on yellow"),
    ("stall", "S", "white on red"),
    ("rest", ".", ""),
)
# Items of the budget that are named; the smaller ones are added up.
MEMORY_ITEMS = 4
GAP = "  "


def is_terminal() -> bool:
    """Whether standard error is a terminal that rows can be drawn on."""
    return sys.stderr.isatty() and not console(stderr=True).is_dumb_terminal


def number(value: float | None, width: int, form: str) -> str:
    """As wide for each value, so that rows stay where they are."""
    return ("-" if value is None else format(value, form)).rjust(width)


def rows_of(figures: LastFigures, memory: dict[str, int], columns: int) -> list[Text]:
    """The rows of a terminal of so many columns: as many of them for each run and width.

    memory  the budget item by item, in bytes
    """
    width = max(columns - 1, 1)
    moved = figures.moved_bytes_per_token
    moved_mib = None if moved is None else moved / (1 << 20)
    pace = [
        Text(f"{figures.tokens:6} tokens"),
        Text(f"{number(figures.tpot_ms, 7, '.1f')} ms a token"),
        Text(f"draft length {number(figures.draft_length, 4, '.1f')}"),
        Text(f"accepted {number(figures.acceptance_rate, 4, '.0%')}"),
        Text(f"hit rate {number(figures.hit_rate, 4, '.0%')}"),
        Text(f"moved {number(moved_mib, 7, '.2f')} MiB a token"),
    ]
    parts = [
        Text.assemble((letter, style), f" {name} {number(getattr(figures, name), 4, '.0%')}")
        for name, letter, style in PARTS
    ]
    link = [
        Text(f"link busy {number(figures.link_busy, 4, '.0%')}"),
        Text(f"of it hidden {number(figures.hidden_share, 4, '.0%')}"),
    ]
    rows = [
        Text(f"-- the last {figures.steps:2} steps ".ljust(width, "-"), style="dim"),
        *flowed(pace, width),
        bar(figures, width),
        *flowed(parts + link, width),
        *flowed(memory_items(memory), width),
    ]
    for row in rows:
        row.truncate(width, overflow="crop")
    return rows


def bar(figures: LastFigures, width: int) -> Text:
    """The time of the last steps, each part as long as its share of it."""
    made, share, until = Text(), 0.0, 0
    for name, letter, style in PARTS:
        share += getattr(figures, name) or 0.0
        end = round(share * width)
        made.append(letter * (end - until), style)
        until = end
    return made


def memory_items(memory: dict[str, int]) -> list[Text]:
    """The budget, its largest items, and the sum of all others."""
    # The host's memory lies beside the budget.
    items = {
        name: size
        for name, size in memory.items()
        if size and name != "budget" and not name.startswith("host_")
    }
    named = sorted(items, key=lambda name: -items[name])[:MEMORY_ITEMS]
    others = sum(items.values()) - sum(items[name] for name in named)
    said = [f"memory {format_bytes(memory.get('budget', 0))}:"]
    said += [f"{name.replace('_', ' ')} {format_bytes(items[name])}" for name in named]
    said += [f"others {format_bytes(others)}"] if others else []
    return [Text(each) for each in said]


def flowed(pieces: list[Text], width: int) -> Iterator[Text]:
    """Pieces beside each other as far as they fit."""
    row = Text()
    for piece in pieces:
        if row and row.cell_len + len(GAP) + piece.cell_len > width:
            yield row
            row = Text()
        row.append(GAP if row else "").append_text(piece)
    yield row


class TerminalView:
    """Draws what it hears of steps, four times a second at most.

    It draws when a step ends: before the next one ends nothing has changed, and no thread takes
    time or comes between two pieces of text.
    """

    def __init__(self, recorder: Recorder, rows: BottomRows, clock: Clock = time.monotonic) -> None:
        self._recorder, self._rows, self._clock = recorder, rows, clock
        self._screen: Console = console(stderr=True)
        self._last = LastSteps()
        self._drawn_s: float | None = None

    def hear(self, step: StepStats) -> None:
        self._last.hear(step)
        now_s = self._clock()
        if self._drawn_s is not None and now_s - self._drawn_s < EVERY_S:
            return
        if not in_foreground(self._rows):
            return
        drawing = self.drawing()
        if self._drawn_s is None and not self._rows.fit(len(drawing)):
            logger.warning(
                "the live view needs a terminal of %d lines and this one has %d; make it higher",
                len(drawing) + TEXT_ROWS,
                self._rows.size.lines,
            )
        self._drawn_s = now_s
        self._rows.show(drawing)

    def wrote(self, text: str) -> None:
        """Text was written, perhaps to the same terminal."""
        self._rows.text.write(text)

    def drawing(self) -> list[str]:
        """The rows as they are now, with their styles."""
        run = self._recorder.run
        rows = rows_of(self._last.figures, run.memory if run else {}, self._rows.size.columns)
        with self._screen.capture() as captured:
            for row in rows:
                self._screen.print(row, no_wrap=True, crop=False, soft_wrap=True)
        return captured.get().splitlines()

    def close(self) -> None:
        self._rows.close()


@contextmanager
def shown(recorder: Recorder) -> Iterator[Wrote]:
    """Show the runs of this block, which tells of the text that it writes to standard output.

    Standard error is a terminal, whether standard output is the same one or not.
    """
    rows = BottomRows(sys.stderr)
    view = TerminalView(recorder, rows)
    recorder.listeners.append(view.hear)
    try:
        with given_back(rows):
            yield view.wrote
    finally:
        recorder.listeners.remove(view.hear)
        view.close()
