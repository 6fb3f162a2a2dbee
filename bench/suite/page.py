"""One page of all measurements, in Markdown: machine, commands, and every bench's table."""

import importlib
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from speq.bench.rivals import standings
from speq.bench.suite.steps import SuiteStep
from speq.files.json_file import parse_json
from speq.measure.report import Column, Report, cell_text

# Whose columns show a report, by what its bench calls itself.
MODULES = {
    "tpot-systems": "rivals.standings",
    "tpot": "runs.tpot",
    "transfer": "machine.transfer",
    "kernels": "machine.kernels",
}


def markdown_of(
    report: Report, steps: list[SuiteStep], seconds: dict[str, float], folder: Path
) -> str:
    """The whole page."""
    machine = ", ".join(f"{name}: {value}" for name, value in report.machine.items())
    parts = [
        f"# {report.model}: all measurements\n",
        f"{datetime.now(UTC):%Y-%m-%d}, speq {report.version} at {report.commit}. {machine}.\n",
        "## Steps\n",
        table(
            {
                "step": ("step", "{}"),
                "minutes": ("minutes", "{:.1f}"),
                "command": ("command", "`{}`"),
                "failed": ("failure", "{}"),
            },
            report.rows,
        ),
    ]
    for step in steps:
        if step.makes or not step.file(folder).exists():
            continue
        found = parse_json(step.file(folder).read_text())
        parts += [f"## {step.name}\n", f"    speq {shlex.join(step.command)}\n"]
        parts += sections(found)
    return "\n".join(parts)


def sections(found: dict[str, Any]) -> list[str]:
    """A bench's table, and of systems their times by kind of prompt and what went wrong."""
    module = importlib.import_module(f"speq.bench.{MODULES[found['bench']]}")
    rows = found["rows"]
    parts = [table(module.COLUMNS, rows)]
    if found["bench"] != "tpot-systems":
        return parts
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["by_kind"]))
    if len(kinds) > 1:
        parts += ["Milliseconds a token by kind of prompt:\n"]
        parts.append(table(standings.kind_columns(kinds), standings.by_kind(rows)))
    parts += [f"- {line}" for line in standings.notes_of(rows)]
    return [*parts, ""]


def table(columns: dict[str, Column], rows: list[dict[str, Any]]) -> str:
    """Rows as a table of Markdown."""
    lines = [[*columns], ["---"] * len(columns)]
    lines += [[cell_text(row[name], show) for name, show in columns.values()] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
