"""One form for all measurements: a table of rows, how they came about, and pictures of them."""

import json
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import HEAVY_HEAD, SIMPLE_HEAD, Box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from speq.errors import FileError, OptionError
from speq.files.atomic_file import write_whole
from speq.files.json_file import parse_json
from speq.files.regular_file import read_text
from speq.machine import describe_machine
from speq.measure.console import console
from speq.measure.picture import Picture
from speq.version import __version__

# Rows side by side if a table is wider than the terminal.
SIDE_BY_SIDE = 3
# Format of a figure: a format string or a function.
Show = str | Callable[[Any], str]
# Key of a figure in a row, and its format.
Column = tuple[str, Show]


@dataclass(slots=True)
class Report:
    """What a bench found. rows all have the same keys.

    pictures  what `speq report` draws of them; notes: what stands beside them
    """

    bench: str
    model: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    version: str = __version__
    commit: str | None = field(default_factory=lambda: current_commit())
    machine: dict[str, Any] = field(default_factory=lambda: describe_machine())
    pictures: Sequence[Picture] = ()
    notes: Sequence[str] = ()

    def print(self, columns: dict[str, Column]) -> None:
        """Print the rows as a table on stdout."""
        print_table(f"{self.bench}: {self.model}", columns, self.rows)

    def write(self, path: Path) -> None:
        """Write as JSON, whole or not at all. Raises SpeqError if that fails."""
        write_whole(path, (json.dumps(asdict(self), indent=1) + "\n").encode())


def medians_of(samples: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """The median of each figure over the samples that have it; None where none has."""
    medians: dict[str, Any] = {}
    for name in names:
        values = [sample[name] for sample in samples if sample[name] is not None]
        medians[name] = median(values) if values else None
    return medians


def print_table(title: str, columns: dict[str, Column], rows: list[dict[str, Any]]) -> None:
    """Print rows on stdout by column title; missing figures are dashes."""
    cells = [[cell_text(row[name], show) for name, show in columns.values()] for row in rows]
    screen = console()
    table = _table(title, [*columns], cells)
    if _too_wide(table, screen):
        table = _table(title, [name.replace(" ", "\n") for name in columns], cells, SIMPLE_HEAD)
    if _too_wide(table, screen):
        # A line for each figure, and a column or two for each row.
        by_figure = [[name, *(row[at] for row in cells)] for at, name in enumerate(columns)]
        for first in range(1, len(cells) + 1, SIDE_BY_SIDE):
            part = [[line[0], *line[first : first + SIDE_BY_SIDE]] for line in by_figure]
            screen.print(_table(title, [""] * len(part[0]), part, SIMPLE_HEAD))
        return
    screen.print(table)


def _table(title: str, heads: list[str], rows: list[list[str]], box: Box = HEAVY_HEAD) -> Table:
    table = Table(title=title, box=box, padding=(0, 1, 0, 0) if box is SIMPLE_HEAD else (0, 1))
    table.show_header = any(heads)
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _too_wide(table: Table, screen: Console) -> bool:
    """Tell whether a cell would be wrapped."""
    unbounded = screen.options.update(max_width=1 << 16)
    return Measurement.get(screen, unbounded, table).maximum > screen.width


def read_prompts(path: Path | None, count: int) -> list[str]:
    """Read `count` prompts, spread evenly over a JSON Lines file or over the bundled one."""
    source = path or Path(__file__).parent / "prompts" / "mixed.jsonl"
    if count < 1:
        raise OptionError(f"num_prompts is {count}; it must be at least 1")
    lines = read_text(source, "give JSON Lines with a `prompt` in each row").splitlines()
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = parse_json(line)["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise FileError(
                f"{source}:{number} is no JSON object with a prompt; write one in each row"
            ) from error
        if not isinstance(prompt, str) or not prompt:
            raise FileError(f"{source}:{number} has the prompt {prompt!r}; it must be a text")
        prompts.append(prompt)
    if not prompts:
        raise FileError(f"{source} holds no prompts; write a JSON object with one in each row")
    if count > len(prompts):
        raise FileError(f"num_prompts is {count} and {source} holds {len(prompts)}; ask for fewer")
    # Files are sorted by kind.
    return [prompts[at * len(prompts) // count] for at in range(count)]


def current_commit() -> str | None:
    """Name the checked-out commit, with "-dirty" if files were changed; None without git."""
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def cell_text(value: Any, show: Show) -> str:
    """Format a figure for a column; a missing one is a dash."""
    if value is None:
        return "-"
    return show.format(value) if isinstance(show, str) else show(value)
