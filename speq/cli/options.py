"""What commands share: where results go, progress, and how a command gets its generator."""

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from speq.config import RunConfig
from speq.options.declared import Option, Options
from speq.options.kinds import File, Switch

if TYPE_CHECKING:
    from speq.generator import Generator
    from speq.text.prompts import Prompt
    from speq.units import Progress

PRINTED = Path("-")
Force = Annotated[bool, Option("Replace files that are there.", Switch())]


@dataclass(frozen=True, slots=True)
class Output(Options):
    """Where a command's result goes, beside what it shows."""

    json: Annotated[
        Path | None,
        Option(
            "Write the result to this file, as one JSON object; - prints it, and nothing else.",
            File(printed=True),
        ),
    ] = None
    force: Force = False

    @property
    def printed(self) -> bool:
        """Whether standard output is for the object alone."""
        return self.json == PRINTED

    @property
    def file(self) -> Path | None:
        return None if self.printed else self.json

    def check(self) -> None:
        """Raise SpeqError, before anything takes minutes, where the file cannot be written."""
        from speq.files.atomic_file import check_target

        check_target(self.file, self.force)

    def write(self, result: dict[str, Any]) -> None:
        """The result, whole or not at all, if it was asked for."""
        from speq.files.atomic_file import write_whole

        if self.printed:
            print(json.dumps(result))
        elif self.json is not None:
            write_whole(self.json, json.dumps(result, indent=1).encode() + b"\n")


# Time left is told by the pace of so long: layers and settings take a minute or more.
SPEED_PERIOD_S = 600


@contextlib.contextmanager
def progress_bar(quiet: bool = False) -> Iterator["Progress"]:
    """Shows long work (making a draft, running a long prompt) on stderr, with time left.

    Shows nothing where stderr is no terminal, and never touches what is written to stdout.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    console = Console(stderr=True, markup=False, emoji=False)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeLeft(),
        console=console,
        transient=True,
        speed_estimate_period=SPEED_PERIOD_S,
        refresh_per_second=4,  # beside what is measured
        # By default text for stdout comes out of the console, which is stderr here.
        redirect_stdout=False,
        disable=quiet or not console.is_terminal,
    )
    tasks: dict[str, Any] = {}

    def report(label: str, done: int, total: int) -> None:
        if label not in tasks:
            if done >= total:
                return
            bar.start()
            # Work that was done before tells nothing of the speed.
            tasks[label] = bar.add_task(label, total=total, completed=done)
        bar.update(tasks[label], completed=done, total=total)
        if done >= total:
            bar.remove_task(tasks.pop(label))
            if not tasks:
                bar.stop()

    try:
        yield report
    finally:
        if tasks:
            bar.stop()


@contextlib.contextmanager
def log_of(quiet: bool) -> Iterator[None]:
    """The log as it is, or nothing but errors meanwhile."""
    with contextlib.ExitStack() as stack:
        for name in ("speq", "transformers") if quiet else ():
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


def load_generator(
    model: str,
    run: RunConfig,
    first_request: "tuple[Prompt, int] | None" = None,
    quiet: bool = False,
) -> "Generator":
    from speq.generator import Generator

    with progress_bar(quiet) as progress:
        return Generator.load(model, run, progress=progress, first_request=first_request)


def broken_pipe() -> None:
    """Nobody reads standard output any more: what is left of it must not be tried again at exit."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.close()
