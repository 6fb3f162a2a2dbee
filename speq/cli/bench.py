"""`speq bench NAME`: measurements, each printed as a table and written as one JSON object.

A command is one entry of `BENCHES`; its options are declared in `speq.bench.settings`. More benches
lie in `bench/lab`, which is not installed.
"""

import importlib
import inspect
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from speq.bench import settings as declared
from speq.cli import options as opt
from speq.cli.from_dataclass import command
from speq.config import Model
from speq.options.declared import Option, Options
from speq.options.kinds import File, ListOf, Text
from speq.units import format_bytes

Models = Annotated[
    tuple[str, ...],
    Option(
        "Model folders, packed or plain.",
        ListOf(Text(path=True), "a folder or several", repeated=True),
        argument=True,
    ),
]
Folders = Annotated[
    tuple[Path, ...],
    Option(
        "Folders with a config.json.",
        ListOf(File("a folder"), "a folder or several", repeated=True),
        argument=True,
    ),
]


@dataclass(frozen=True, slots=True)
class BenchCommand:
    """A command. subject: what its module's `run` takes before the settings, by name."""

    name: str
    module: str
    settings: type[Options]
    summary: str
    subject: tuple[str, Any] | None = ("model", Model)


BENCHES = (
    BenchCommand(
        "tpot",
        "speq.bench.runs.tpot",
        declared.TpotSettings,
        "Time per output token over memory budgets and draft lengths, settings in rotation.",
    ),
    BenchCommand(
        "shapes",
        "speq.bench.shapes.run",
        declared.ShapesSettings,
        "Random weights in a published model's exact shapes: what runs take, beside the floor.",
        subject=("shapes", declared.Shapes),
    ),
    BenchCommand(
        "serve",
        "speq.bench.runs.serve",
        declared.ServeBenchSettings,
        "A running server under requests that arrive by chance: how soon text begins and comes.",
        subject=("url", declared.ServerUrl),
    ),
    BenchCommand(
        "kernels",
        "speq.bench.machine.kernels",
        declared.KernelSettings,
        "Expert kernels on layers of real shapes, beside a plain read of memory.",
        subject=None,
    ),
    BenchCommand(
        "transfer",
        "speq.bench.machine.transfer",
        declared.TransferSettings,
        "Experts from disk into slots, beside plain reads of the same files past the page cache.",
        subject=("models", Models),
    ),
    BenchCommand(
        "all",
        "speq.bench.suite.suite",
        declared.AllSettings,
        "Everything, from making the models to one report; interrupted, it goes on from there.",
    ),
)


@dataclass(frozen=True, slots=True)
class DrawnPage(Options):
    """What benches share beside their output."""

    picture: Annotated[
        Path | None, Option("Draw what was measured into this HTML page.", File())
    ] = None

    def write(self, report: Any) -> None:
        """Write the page of a report, if it was asked for."""
        if self.picture is None:
            return
        from speq.dashboard.page import write_page
        from speq.dashboard.report.report_page import page_of_bench

        # As a file would have it.
        write_page(page_of_bench(json.loads(json.dumps(asdict(report)))), self.picture)


# Writes pages of its own.
UNDRAWN = ("all",)

bench_app = typer.Typer(
    help="Measure. Every bench prints a table; --json FILE keeps it.", no_args_is_help=True
)


@bench_app.callback()
def bench() -> None:
    """Measure. Every bench prints a table; --json FILE keeps it."""


def function_of(bench: BenchCommand) -> Any:
    """What the command of a bench runs, with annotations for `command`."""

    def run(**given: Any) -> None:
        output: opt.Output = given["output"]
        drawn: DrawnPage = given.get("drawn", DrawnPage())
        module = importlib.import_module(bench.module)
        settings = given["settings"]
        also_written = [getattr(settings, name) for name in getattr(module, "WRITTEN", ())]
        output.check(drawn.picture, *also_written)
        subject = [given[name] for name in given if name not in ("settings", "drawn", "output")]
        with output.progress() as progress:
            taken = inspect.signature(module.run).parameters
            offered = {"progress": progress, "quiet": output.quiet}
            more = {name: value for name, value in offered.items() if name in taken}
            report = module.run(*subject, settings, **more)
        report.pictures = report.pictures or getattr(module, "PICTURES", ())
        report.notes = module.notes(report) if hasattr(module, "notes") else ()
        output.write(asdict(report))
        drawn.write(report)
        if not output.printed:
            show(module, report)
            for note in report.notes:
                output.note(note)

    run.__name__, run.__doc__ = bench.name, bench.summary
    subject_hint = dict([bench.subject] if bench.subject else [])
    drawn_hint = {} if bench.name in UNDRAWN else {"drawn": DrawnPage}
    run.__annotations__ = (
        subject_hint | {"settings": bench.settings} | drawn_hint | {"output": opt.Output}
    )
    return run


def show(module: Any, report: Any) -> None:
    """Print the tables of a bench."""
    from speq.measure.report import print_table

    if hasattr(module, "show"):
        module.show(report)
        return
    report.print(module.COLUMNS)
    for title, name, columns in getattr(module, "FURTHER_TABLES", ()):
        if rows := getattr(report, name):
            print_table(title, columns, rows)


def widen(
    model: Model,
    target: Annotated[Path, Option("Folder to write.", File("a folder"), argument=True)],
    settings: declared.WidenSettings,
    output: Annotated[opt.Output, opt.ON_SCREEN],
) -> None:
    """Write a model of real size that computes what a small trained one does, to measure on."""
    from speq.bench import widen as module

    with output.progress() as progress:
        made = module.run(model, target, settings, progress)
    output.note(f"{made['path']}: {format_bytes(made['bytes'])}")
    if "draft" in made:
        output.note(
            f"draft: {made['draft']['moved']:.1%} of codes moved, which makes "
            f"{made['draft']['reached']:.0%} of the errors of the source's draft"
        )


for each in BENCHES:
    bench_app.command(each.name)(command(function_of(each)))
bench_app.command("widen")(command(widen))
