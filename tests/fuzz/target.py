"""The speq under test, seen from outside: commands that it is given and how they end."""

import json
import os
import subprocess
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

WORKER = Path(__file__).parent / "worker.py"


@dataclass(frozen=True)
class Limits:
    """What a command may take.

    deadline_s, cpu_s  seconds until it counts as hanging, by the clock and of computation
    peak_bytes         resident memory beyond that of a process which does nothing
    address_bytes      addresses beyond those; it protects the machine, the peak is what is judged
    """

    deadline_s: float = 60.0
    cpu_s: int = 10
    peak_bytes: int = 384 << 20
    address_bytes: int = 5 << 30


# What happens to a system call in place of an errno; see `system_calls.cpp`.
HALF, KILL = -1, -2


@dataclass(frozen=True)
class Strike:
    """The system call on files of the room that fails, counted from 1; 0: none, they are counted.

    fault  an errno, or HALF (a read or a write moves half of its bytes), or KILL
    """

    at: int
    fault: int


@dataclass(frozen=True)
class Command:
    """Arguments of the command line, or a call of the library.

    kind       "command", "library" or "fake" (the tests of the harness itself)
    stdin      a file in the room; nothing is to be read by default
    folder     of the room, where it runs
    output     "kept", "closed" (no standard output) or "broken" (a pipe that nobody reads)
    killed_at  (count, signal): sent when files are synced for the count-th time
    struck     the system call that fails; of a target that strikes calls
    """

    arguments: tuple[str, ...] = ()
    kind: str = "command"
    load: dict[str, Any] = field(default_factory=dict)
    requests: tuple[dict[str, Any], ...] = ()
    stdin: str = os.devnull
    folder: str = "."
    output: str = "kept"
    killed_at: tuple[int, int] | None = None
    struck: Strike | None = None


def speq(*arguments: object, **options: Any) -> Command:
    """A command line."""
    return Command(tuple(map(str, arguments)), **options)


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    signal  that ended it, or 0
    syncs   how often it synced a file; 0 where it did not get to its end
    calls   its system calls on files of the room, where they were counted: name and path
    """

    command: Command
    code: int
    signal: int
    late: bool
    peak_bytes: int
    syncs: int
    out: str
    err: str
    calls: tuple[str, ...] = ()

    @property
    def succeeded(self) -> bool:
        return not (self.code or self.signal or self.late)


class Target:
    """A worker process (see `worker`), started from an interpreter that has speq."""

    def __init__(
        self, python: Path, limits: Limits | None = None, striker: Path | None = None
    ) -> None:
        """striker: the library of `system_calls.cpp`, to strike system calls with"""
        self.python = python
        self.limits = limits or Limits()
        # One thread suffices for models this small. No path is added, so that the interpreter's own
        # speq is the one that runs; no command goes to the network.
        environment = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "COLUMNS": "80",
        }
        if striker is not None:
            environment["LD_PRELOAD"] = str(striker)
        self._process = subprocess.Popen(
            [str(python), "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._idle_bytes = 0

    def __enter__(self) -> "Target":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def warm(self, command: Command, room: Path) -> None:
        """Have every later process begin with what this command imports."""
        imported = room / "imported.json"
        # Imports take a while on a busy machine.
        patient = replace(self.limits, deadline_s=300.0, cpu_s=120)
        self._ask(self._request(command, room, patient) | {"imported": str(imported)})
        modules = json.loads(imported.read_text())
        imported.unlink()
        self._ask({"modules": modules})
        self._idle_bytes = self.run(Command(("print", ""), kind="fake"), room).peak_bytes

    def run(self, command: Command, room: Path, limits: Limits | None = None) -> Ended:
        """Run a command in a folder, which is its home as well."""
        for folder in ("home", "tmp"):
            (room / folder).mkdir(exist_ok=True)
        request = self._request(command, room, limits)
        answer = self._ask(request)
        out, err = (
            Path(request[name]).read_bytes().decode("utf-8", "replace")
            for name in ("stdout", "stderr")
        )
        counted = Path(request["syncs"])
        answer["syncs"] = int(counted.read_text()) if counted.exists() else 0
        called = Path(request["calls"])
        answer["calls"] = tuple(called.read_text().splitlines()) if called.exists() else ()
        for name in ("stdout", "stderr", "syncs", "calls"):
            Path(request[name]).unlink(missing_ok=True)
        peak = max(answer.pop("peak_bytes") - self._idle_bytes, 0)
        return Ended(command, out=out, err=err, peak_bytes=peak, **answer)

    def _request(
        self, command: Command, room: Path, limits: Limits | None = None
    ) -> dict[str, Any]:
        limits = limits or self.limits
        return {
            "kind": command.kind,
            "arguments": list(command.arguments),
            "load": command.load,
            "requests": list(command.requests),
            "room": str(room),
            "stdin": command.stdin,
            "folder": command.folder,
            "stdout": str(room / ".stdout"),
            "stderr": str(room / ".stderr"),
            "syncs": str(room / ".syncs"),
            "calls": str(room / ".calls"),
            "struck": None if command.struck is None else astuple(command.struck),
            "output": command.output,
            "killed_at": command.killed_at,
            "deadline_s": limits.deadline_s,
            "cpu_s": limits.cpu_s,
            "address_bytes": limits.address_bytes,
        }

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker of {self.python} has ended; run it by hand to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer


def killed(command: Command, count: int, number: int) -> Command:
    return replace(command, killed_at=(count, number))
