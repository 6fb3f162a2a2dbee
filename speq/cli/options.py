"""What commands share: where results go, progress, and how a command gets its generator."""

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from speq.cli.from_dataclass import Exclude
from speq.config import RunConfig
from speq.options.declared import Option, Options
from speq.options.kinds import File, Switch
from speq.units import no_progress

if TYPE_CHECKING:
    from speq.generator import Generator
    from speq.pipeline.rendezvous import Rendezvous
    from speq.pipeline.settings import StagesSettings
    from speq.text.prompts import Prompt
    from speq.units import Progress

PRINTED = Path("-")
Force = Annotated[bool, Option("Replace files that are there.", Switch())]


@dataclass(frozen=True, slots=True)
class Output(Options):
    """Destination of a command's result, beside what it shows."""

    panel = "Output"
    json: Annotated[
        Path | None,
        Option(
            "Write the result to this file, as one JSON object; - prints it, and nothing else.",
            File(printed=True),
        ),
    ] = None
    force: Force = False
    quiet: Annotated[
        bool, Option("No progress, no notes and no log but errors: only results.", Switch())
    ] = False

    @property
    def printed(self) -> bool:
        """True if standard output is for the object alone."""
        return self.json == PRINTED

    @property
    def file(self) -> Path | None:
        return None if self.printed else self.json

    def check(self, *others: Path | None) -> None:
        """Raise SpeqError, before anything takes minutes, where the file cannot be written, nor one
        of the others that the command writes."""
        from speq.files.atomic_file import check_target

        for path in (self.file, *others):
            check_target(path, self.force)

    def write(self, result: dict[str, Any]) -> None:
        """The result, whole or not at all, if it was asked for."""
        from speq.files.atomic_file import write_whole

        if self.printed:
            print(json.dumps(result))
        elif self.json is not None:
            write_whole(self.json, json.dumps(result, indent=1).encode() + b"\n")

    def note(self, sentence: str) -> None:
        """Say on standard output what stands beside a result."""
        if not self.quiet:
            print(sentence)

    @contextlib.contextmanager
    def progress(self) -> Iterator["Progress"]:
        """What is told of long work in this block, which logs as it may."""
        with log_of(self.quiet), progress_bar(self.quiet) as report:
            yield report


# Of commands whose results are folders, or talk.
ON_SCREEN = Exclude(without=("json", "force"))
# Time left is told by the pace of so long: layers and settings take a minute or more.
SPEED_PERIOD_S = 600
# Work that is done sooner shows no bar.
SHOWN_AFTER_S = 1.0


@contextlib.contextmanager
def progress_bar(quiet: bool = False) -> Iterator["Progress"]:
    """Shows long work (making a draft, running a long prompt) on stderr, with time left.

    Shows nothing where stderr is no terminal, and never touches what is written to stdout.
    """
    from speq.measure.console import console

    screen = console(stderr=True)
    if quiet or not screen.is_interactive:
        yield no_progress
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeLeft(),
        console=screen,
        transient=True,
        speed_estimate_period=SPEED_PERIOD_S,
        refresh_per_second=4,  # beside what is measured
        # By default text for stdout comes out of the console, which is stderr here.
        redirect_stdout=False,
    )
    tasks: dict[str, Any] = {}
    lock, due = threading.RLock(), threading.Event()

    def show() -> None:
        with lock:
            due.set()
            if tasks:
                bar.start()

    # Long steps tell nothing in their midst, so that the bar has to come by itself.
    timer = threading.Timer(SHOWN_AFTER_S, show)
    timer.daemon = True

    def report(label: str, done: int, total: int) -> None:
        with lock:
            if label not in tasks:
                if done >= total:
                    return
                # Work that was done before tells nothing of the speed.
                tasks[label] = bar.add_task(label, total=total, completed=done)
                if due.is_set():
                    bar.start()
                elif timer.ident is None:
                    timer.start()
            bar.update(tasks[label], completed=done, total=total)
            if done >= total:
                bar.remove_task(tasks.pop(label))
                if not tasks:
                    bar.stop()

    try:
        yield report
    finally:
        with lock:
            timer.cancel()
            tasks.clear()
            bar.stop()


@contextlib.contextmanager
def log_of(quiet: bool) -> Iterator[None]:
    """The log and bars of downloads as they are, or nothing but errors meanwhile."""
    with contextlib.ExitStack() as stack:
        if quiet:
            from huggingface_hub import utils as hub

            if not hub.are_progress_bars_disabled():
                hub.disable_progress_bars()
                stack.callback(hub.enable_progress_bars)
        for name in ("speq", "transformers", "huggingface_hub") if quiet else ():
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


def load_generator(
    model: str,
    run: RunConfig,
    first_request: "tuple[Prompt, int] | None" = None,
    quiet: bool = False,
    stages: "StagesSettings | None" = None,
    rendezvous: "Rendezvous | None" = None,
) -> "Generator":
    """stages, rendezvous: as of `Generator.load`"""
    from speq.generator import Generator

    with progress_bar(quiet) as progress:
        return Generator.load(
            model,
            run,
            progress=progress,
            first_request=first_request,
            stages=stages,
            rendezvous=rendezvous,
        )


def broken_pipe() -> None:
    """Nobody reads standard output any more: what is left of it must not be tried again at exit."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.close()
