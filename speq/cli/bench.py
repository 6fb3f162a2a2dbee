"""`speq bench NAME`: measurements, each printed as a table and written as one JSON object.

A command is one line of `BENCHES`; its options are declared in `speq.bench.settings`.
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
class Bench:
    """A command. subject: what its module's `run` takes before the settings, by name."""

    name: str
    module: str
    settings: type[Options]
    summary: str
    subject: tuple[str, Any] | None = ("model", Model)


BENCHES = (
    Bench(
        "kernels",
        "machine.kernels",
        declared.KernelSettings,
        "Expert kernels on layers of real shapes, beside a plain read of memory.",
        subject=None,
    ),
    Bench(
        "step",
        "machine.step",
        declared.StepSettings,
        "Where the time of a draft token and of a verification goes, part by part.",
    ),
    Bench(
        "transfer",
        "machine.transfer",
        declared.TransferSettings,
        "Experts from disk into slots, beside plain reads of the same files past the page cache.",
        subject=("models", Models),
    ),
    Bench(
        "gpu-link",
        "machine.gpu_link",
        declared.GpuLinkSettings,
        "A GPU's memory, its link to the host, and what launches, waits and graphs take.",
        subject=None,
    ),
    Bench(
        "prefill",
        "machine.prefill",
        declared.PrefillSettings,
        "Time to first token of a long prompt, beside the floor that link and arithmetic set.",
    ),
    Bench(
        "codec",
        "machine.codec",
        declared.CodecSettings,
        "What each codec makes of the model's experts: bits a weight, and how fast.",
    ),
    Bench(
        "hit-rate",
        "replay.hit_rate",
        declared.HitRateSettings,
        "Experts in slots when they are needed: recorded routes through the scheduler.",
    ),
    Bench(
        "locality",
        "replay.locality",
        declared.LocalitySettings,
        "Distinct experts by tokens, which plans count by, beside what policies really miss.",
        subject=("routes", declared.Routes),
    ),
    Bench(
        "schedule",
        "runs.schedule",
        declared.ScheduleSettings,
        "The scheduler on a model larger than memory, beside LRU, and both beside their floors.",
    ),
    Bench(
        "fidelity",
        "runs.fidelity",
        declared.FidelitySettings,
        "Experts the draft chooses beside those of the exact model, by layer and along a draft.",
    ),
    Bench(
        "drafters",
        "runs.drafters",
        declared.DraftersSettings,
        "All drafters beside each other: what stands, by depth and rank, bytes and time per token.",
    ),
    Bench(
        "coverage",
        "paper.coverage",
        declared.CoverageSettings,
        "Experts that verifications want, what the best of them cover, and which go together.",
    ),
    Bench(
        "tpot",
        "runs.tpot",
        declared.TpotSettings,
        "Time per output token over memory budgets and draft lengths, settings in rotation.",
    ),
    Bench(
        "formats",
        "formats.run",
        declared.FormatSettings,
        "Time per output token with the same experts published in BF16, in FP8 and in MXFP4.",
        subject=None,
    ),
    Bench(
        "serve",
        "runs.serve",
        declared.ServeSettings,
        "A running server under requests that arrive by chance: how soon text begins and comes.",
        subject=("url", declared.ServerUrl),
    ),
    Bench(
        "soak",
        "runs.soak",
        declared.SoakSettings,
        "Texts one behind the other for a while: whether memory stays what it was.",
    ),
    Bench(
        "profile-cost",
        "runs.profile_cost",
        declared.ProfileCostSettings,
        "What it costs to record a run for pictures: the same texts with it and without, in turns.",
    ),
    Bench(
        "equal-memory",
        "paper.equal_memory",
        declared.EqualMemorySettings,
        "LRU, drafts and compact experts at equal device memory: bytes moved and time per token.",
    ),
    Bench(
        "governor",
        "runs.governor",
        declared.GovernorSettings,
        "Time per output token with fixed draft lengths and with auto, settings in rotation.",
    ),
    Bench(
        "batch",
        "paper.batches",
        declared.BatchSettings,
        "What drafts gain in steps of several texts: target efficiency, experts, tokens a second.",
    ),
    Bench(
        "governor-sim",
        "replay.governor_sim",
        declared.GovernorSimSettings,
        "The governor against every fixed draft length, on simulated machines.",
        subject=None,
    ),
    Bench(
        "paper-systems",
        "paper.paper_systems",
        declared.PaperSystemsSettings,
        "The systems of MoE-SpeQ's Figure 13 as plans expect them, beside the paper's order.",
        subject=("folders", Folders),
    ),
    Bench(
        "all",
        "suite.suite",
        declared.AllSettings,
        "Everything, from making the models to one report; interrupted, it goes on from there.",
    ),
    Bench(
        "breakdown",
        "paper.breakdown",
        declared.BreakdownSettings,
        "Shares of decoding: waiting for experts, drafting, verifying; on demand and as users run.",
    ),
    Bench(
        "memory",
        "paper.memory",
        declared.MemorySettings,
        "Memory of a draft and its target as they share more, after MoE-SpeQ's Table 2.",
        subject=("folders", Folders),
    ),
    Bench(
        "budget",
        "paper.expert_budget",
        declared.BudgetSettings,
        "Expert budgets: what they save, and how far the model within them is from the exact one.",
    ),
    Bench(
        "ablation",
        "paper.ablation",
        declared.AblationSettings,
        "What each part of speq is worth: time per output token without it, settings in rotation.",
    ),
)


@dataclass(frozen=True, slots=True)
class Drawn(Options):
    """What benches share beside their output."""

    picture: Annotated[
        Path | None, Option("Draw what was measured into this HTML page.", File())
    ] = None

    def write(self, report: Any) -> None:
        """The page of a report, if it was asked for."""
        if self.picture is None:
            return
        from speq.dashboard.bench_panels.report import page_of_bench
        from speq.dashboard.page import write_page

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


def function_of(entry: Bench) -> Any:
    """What the command of a bench runs, with annotations for `command`."""

    def run(**given: Any) -> None:
        output: opt.Output = given["output"]
        drawn: Drawn = given.get("drawn", Drawn())
        output.check(drawn.picture)
        module = importlib.import_module(f"speq.bench.{entry.module}")
        subject = [given[name] for name in given if name not in ("settings", "drawn", "output")]
        with output.progress() as progress:
            taken = inspect.signature(module.run).parameters
            offered = {"progress": progress, "quiet": output.quiet}
            more = {name: value for name, value in offered.items() if name in taken}
            report = module.run(
                *subject, given["settings"], json_file=output.file, force=output.force, **more
            )
        drawn.write(report)
        if output.printed:
            output.write(asdict(report))
        else:
            show(module, report)
            for note in module.notes(report) if hasattr(module, "notes") else ():
                output.note(note)

    run.__name__, run.__doc__ = entry.name, entry.summary
    subject_hint = dict([entry.subject] if entry.subject else [])
    drawn_hint = {} if entry.name in UNDRAWN else {"drawn": Drawn}
    run.__annotations__ = (
        subject_hint | {"settings": entry.settings} | drawn_hint | {"output": opt.Output}
    )
    return run


def show(module: Any, report: Any) -> None:
    """A bench's tables."""
    if hasattr(module, "show"):
        module.show(report)
    else:
        report.print(module.COLUMNS)


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
