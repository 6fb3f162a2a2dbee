"""The command line of a bench of the lab, made of its settings as `speq bench` makes its own."""

import importlib
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from speq import cli
from speq.cli.bench import BenchCommand, function_of
from speq.cli.from_dataclass import command
from speq.config import Model
from speq.options.declared import Option
from speq.options.kinds import File, ListOf

Folders = Annotated[
    tuple[Path, ...],
    Option(
        "Folders with a config.json.",
        ListOf(File("a folder"), "a folder or several", repeated=True),
        argument=True,
    ),
]
SUBJECTS: dict[str, Any] = {"model": Model, "folders": Folders}


def main(name: str) -> None:
    """Run `python -m bench.lab.NAME`."""
    cli.main(app_of(name))


def app_of(name: str) -> typer.Typer:
    """The command line of a bench, by the name of its module."""
    module = importlib.import_module(f"bench.lab.{name}")
    hints = get_type_hints(module.run)
    subject = next(((each, SUBJECTS[each]) for each in hints if each in SUBJECTS), None)
    summary = (module.__doc__ or "").partition("\n\n")[0]
    bench = BenchCommand(name, module.__name__, hints["settings"], summary, subject)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name)(command(function_of(bench)))
    return app
