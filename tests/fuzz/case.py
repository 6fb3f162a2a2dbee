"""A damaged input, the commands that are given it, and what is wrong with how they end."""

import enum
import os
import random
import shlex
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fuzz.target import KILL, Command, Ended, Limits, Target

if TYPE_CHECKING:
    from tests.fuzz.sound import Sound

TRACEBACKS = ("Traceback (most recent call last)", "Exception ignored", "Fatal Python error")
# How Python and torch say that an allocation failed.
ALLOCATIONS = ("MemoryError", "DefaultCPUAllocator", "Cannot allocate memory")
USAGE_EXIT = 2
# What no command leaves behind, unless it was killed.
LEFT_OVERS = ("*.partial", "*.activations", "*.tmp", "tmp/*")


class Expect(enum.Enum):
    """What a last command may do. Refused: one sentence and an exit status other than 0.

    SAME             it ends well, with the text of the undamaged input
    SAME_OR_REFUSED  either; for what has checksums, and for what must be noticed
    REFUSED          the input makes no sense
    ANY              either, with any text: the damage makes another input of the same worth, such
                     as other values of a published checkpoint's weights
    """

    SAME = enum.auto()
    SAME_OR_REFUSED = enum.auto()
    REFUSED = enum.auto()
    ANY = enum.auto()


@dataclass(frozen=True)
class Case:
    """Laid out in a room: a folder of its own, where the commands run.

    label   what was damaged, in words
    steps   commands; all but the last may be killed, none may crash
    text    standard output of the undamaged input
    kept    left-overs that are the last command's work to go on with
    check   what else is wrong, told how the last command ended
    """

    label: str
    steps: tuple[Command, ...]
    expect: Expect
    text: str | None = None
    kept: tuple[str, ...] = ()
    check: Callable[[Ended], list[str]] = field(default=lambda ended: [])


Make = Callable[[random.Random, "Sound", Path], Case]


@dataclass(frozen=True)
class FuzzClass:
    """A class of inputs.

    share  its part of all inputs, against the others' parts
    known  kinds of input that some version once failed on: the first numbers, whatever the seed
    """

    name: str
    make: Make
    share: int = 1
    known: tuple[Make, ...] = ()

    def maker(self, number: int) -> Make:
        return self.known[number] if number < len(self.known) else self.make


@dataclass(frozen=True)
class Outcome:
    """What is wrong with a case; nothing where `faults` is empty."""

    case: Case
    faults: tuple[str, ...]
    ended: tuple[Ended, ...]


def run(case: Case, target: Target, room: Path, limits: Limits | None = None) -> Outcome:
    """Run a case's commands until one crashes."""
    ended: list[Ended] = []
    faults: list[str] = []
    limits = limits or target.limits
    for step in case.steps:
        ended.append(target.run(step, room, limits))
        faults = faults_of(ended[-1], limits)
        if faults:
            break
    else:
        faults = text_faults(case, ended[-1]) + left_overs(room, case.kept) + case.check(ended[-1])
    return Outcome(case, tuple(faults), tuple(ended))


def faults_of(ended: Ended, limits: Limits) -> list[str]:
    """What no command may do, whatever it is given."""
    if ended.late:
        return ["hang"]
    faults = []
    planned = ended.command.killed_at
    if ended.command.struck is not None and ended.command.struck.fault == KILL:
        planned = ended.command.struck.at, signal.SIGKILL
    if ended.signal and (planned is None or ended.signal != planned[1]):
        faults.append(f"signal {ended.signal}")
    if any(mark in ended.err for mark in ALLOCATIONS):
        faults.append("memory: an allocation failed")
    elif any(mark in ended.err or mark in ended.out for mark in TRACEBACKS):
        faults.append(f"traceback: {ended.err.strip().splitlines()[-1][:160]}")
    elif ended.code and planned is None and not refused_well(ended):
        faults.append(f"exit status {ended.code} without one sentence: {ended.err[-160:]!r}")
    if ended.peak_bytes > limits.peak_bytes:
        faults.append(f"memory: {ended.peak_bytes >> 20} MiB, {limits.peak_bytes >> 20} allowed")
    return faults


def refused_well(ended: Ended) -> bool:
    """Whether a command that failed said so in one sentence, behind all else."""
    lines = ended.err.strip().splitlines()
    if ended.command.output == "broken":
        return True  # who closes a pipe early wants no more of it
    if ended.code == USAGE_EXIT:
        return "Usage:" in ended.err
    errors = [line for line in lines if line.startswith("error: ")]
    return ended.code == 1 and len(errors) == 1 and lines[-1] == errors[0]


def text_faults(case: Case, ended: Ended) -> list[str]:
    if ended.succeeded:
        if case.expect is Expect.REFUSED:
            return ["accepted"]
        if case.expect is not Expect.ANY and ended.out != case.text:
            return [f"other text: {ended.out[:60]!r}, not {(case.text or '')[:60]!r}"]
    elif case.expect is Expect.SAME:
        return [f"refused: {ended.err[-160:]!r}"]
    return []


def left_overs(room: Path, kept: tuple[str, ...] = ()) -> list[str]:
    found = {path for pattern in LEFT_OVERS for path in room.rglob(pattern)}
    found -= {path for pattern in kept for path in room.rglob(pattern)}
    return [f"left over: {path.relative_to(room)}" for path in sorted(found)]


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder, byte for byte; None for what is no regular file."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if not os.path.isdir(path)
    }


def shown(outcome: Outcome) -> str:
    """A case's commands and faults, for a person."""
    lines = [f"  input: {outcome.case.label}"]
    for ended in outcome.ended:
        if ended.command.kind == "library":
            what = f"Generator {ended.command.load} {ended.command.requests}"
        else:
            what = f"speq {shlex.join(ended.command.arguments)}"
        lines.append(f"  {what[:300]} -> {-ended.signal or ended.code}")
    return "\n".join([*lines, *(f"  FAULT {fault}" for fault in outcome.faults)])
