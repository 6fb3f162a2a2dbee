"""Every measurement in one folder: models made, benches run one after the other, and one report.

Each step is a `speq` command with a process and a JSON file of its own. A step that is done is not
done again, unless the command or the code has changed: the same command goes on where it was
interrupted. A step that fails is told of, and the others go on.
"""

import json
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from speq.bench.settings import AllSettings as Settings
from speq.bench.suite import page
from speq.bench.suite.steps import SuiteStep, steps_of
from speq.errors import FileError
from speq.files.atomic_file import write_whole
from speq.files.json_file import parse_json
from speq.measure.report import Column, Report, current_commit
from speq.version import __version__

JOURNAL, REPORT, PICTURES = "steps.json", "report.md", "report.html"

# What is said of a step until it ends.
INTERRUPTED = "was interrupted"

COLUMNS: dict[str, Column] = {
    "step": ("step", "{}"),
    "minutes": ("minutes", "{:.1f}"),
    "file": ("file", "{}"),
    "failed": ("failure", "{}"),
}


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was run. failure: what it said; empty where it went well."""

    command: list[str]
    code: str
    seconds: float
    finished: str
    failure: str = ""


def run(model: str, settings: Settings, quiet: bool = False) -> Report:
    """Run what is not done yet, and write the report.

    quiet  only failures are told

    Raises SpeqError for nonsense settings, and where the folder cannot be written.
    """
    steps = steps_of(model, settings)
    folder = settings.out
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{folder} cannot be made: {error.strerror}; give another --out") from error
    journal = folder / JOURNAL
    done = read_journal(journal)
    code = f"{__version__} {current_commit()}"
    left = [step for step in steps if not is_done(step, done, code, folder)]
    say = silence if quiet else speak
    say(heading(steps, left))
    for at, step in enumerate(left, start=1):
        rest_s = sum(each.expected_s for each in left[at - 1 :])
        say(f"step {at} of {len(left)}: {step.name}; about {minutes(rest_s)} left in all")
        clear(step, done)
        done[step.name] = Done(step.command, code, 0.0, "", INTERRUPTED)
        keep(done, journal)
        done[step.name] = perform(step, code, folder, quiet)
        keep(done, journal)
        if done[step.name].failure:
            speak(f"{step.name} failed: {done[step.name].failure}")
    rows = [row_of(step, done[step.name], folder) for step in steps]
    report = Report("all", model, settings.as_json(), rows)
    text = page.markdown_of(report, steps, {k: v.seconds for k, v in done.items()}, folder)
    write_whole(folder / REPORT, text.encode())
    draw(steps, folder)
    return report


def draw(steps: list[SuiteStep], folder: Path) -> None:
    """The pictures of what was measured. What cannot be drawn is left out, and the page says so."""
    from speq.dashboard.page import write_page
    from speq.dashboard.report.report_page import gather_sources, page_of_sources

    files = [step.file(folder) for step in steps if not step.makes and step.file(folder).exists()]
    write_page(page_of_sources(*gather_sources(files)), folder / PICTURES)


def notes(report: Report) -> list[str]:
    """Where the report lies."""
    folder = Path(report.settings["out"])
    return [f"the report: {folder / REPORT}", f"its pictures: {folder / PICTURES}"]


def speak(line: str) -> None:
    """To people, beside what goes to standard output."""
    print(line, file=sys.stderr, flush=True)


def silence(line: str) -> None:
    """To nobody."""


def minutes(seconds: float) -> str:
    return f"{max(1, round(seconds / 60))} min"


def heading(steps: list[SuiteStep], left: list[SuiteStep]) -> str:
    """What will be done, and how long it takes on two cores."""
    if not left:
        return f"all {len(steps)} steps are done; only the report is written"
    makes = sum(step.expected_s for step in left if step.makes)
    measures = sum(step.expected_s for step in left if not step.makes)
    return (
        f"{len(left)} of {len(steps)} steps are left: about {minutes(makes)} to make models, and "
        f"{minutes(measures)} to measure, on two cores"
    )


def is_done(step: SuiteStep, done: dict[str, Done], code: str, folder: Path) -> bool:
    """Whether a step ended well with this command, and with this code where it measures."""
    before = done.get(step.name)
    if before is None or before.failure or before.command != step.command:
        return False
    if step.makes:
        return step.makes.exists()
    return before.code == code and step.file(folder).exists()


def perform(step: SuiteStep, code: str, folder: Path, quiet: bool) -> Done:
    """Run a step's command. What it prints is kept beside its JSON file."""
    began_s = time.perf_counter()
    command = [*step.command]
    if quiet:
        command.append("--quiet")
    if not step.makes:
        command += ["--json", str(step.file(folder)), "--force"]
    with (folder / f"{step.name}.txt").open("w") as text:
        text.write(f"$ speq {shlex.join(step.command)}\n\n")
        text.flush()
        # Standard error is ours: progress bars are seen.
        status = subprocess.run(
            [sys.executable, "-m", "speq", *command], stdin=subprocess.DEVNULL, stdout=text
        ).returncode
    failure = "" if status == 0 else f"ended with exit status {status}; it said why above"
    return Done(
        step.command,
        code,
        time.perf_counter() - began_s,
        datetime.now(UTC).isoformat(timespec="seconds"),
        failure,
    )


def clear(step: SuiteStep, done: dict[str, Done]) -> None:
    """Remove what widening left when it was interrupted: it cannot go on from there.

    Raises SpeqError where the folder is not one that we began.
    """
    if step.name != "widen" or step.makes is None or not step.makes.exists():
        return
    before = done.get(step.name)
    if before is None or before.failure not in ("", INTERRUPTED):
        raise FileError(
            f"{step.makes} is there, and this command did not make it; give another --out"
        )
    shutil.rmtree(step.makes)


def keep(done: dict[str, Done], journal: Path) -> None:
    text = json.dumps({name: asdict(each) for name, each in done.items()}, indent=1)
    write_whole(journal, text.encode())


def read_journal(path: Path) -> dict[str, Done]:
    """What was done before. Raises SpeqError for a file that is none of ours."""
    if not path.exists():
        return {}
    try:
        found: dict[str, dict[str, Any]] = parse_json(path.read_text())
        return {name: Done(**step) for name, step in found.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise FileError(
            f"{path} is no list of steps that were done: {error}; remove it, or give another --out"
        ) from error


def row_of(step: SuiteStep, done: Done, folder: Path) -> dict[str, Any]:
    made = step.makes or step.file(folder)
    return {
        "step": step.name,
        "minutes": done.seconds / 60,
        "file": str(made),
        "failure": done.failure or None,
        "command": shlex.join(["speq", *step.command]),
        "finished": done.finished,
        "code": done.code,
    }
