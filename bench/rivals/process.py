"""A system's process from the parent's side: started under a cap, fed a job, heard out."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from tempfile import TemporaryFile
from typing import IO, Any

from speq.bench.rivals.job import RivalJob
from speq.bench.rivals.memory_cap import MemoryCap
from speq.bench.rivals.worker import TextRun
from speq.errors import present

COMMAND = (sys.executable, "-m", "speq.bench.rivals.worker")
# Of what a process wrote to standard error, the end that is shown when it fails.
SHOWN_BYTES = 2000


@dataclass(slots=True)
class ProcessResult:
    """What a process told.

    settled  how the system holds the model
    failure  one sentence where it did not do its job, empty where it did
    """

    settled: dict[str, Any] = field(default_factory=dict)
    texts: list[TextRun] = field(default_factory=list)
    done: dict[str, Any] = field(default_factory=dict)
    failure: str = ""

    def take(self, line: dict[str, Any]) -> None:
        if "loaded" in line:
            self.settled = line["loaded"]
        elif "text" in line:
            self.texts.append(TextRun(**line["text"]))
        elif "done" in line:
            self.done = line["done"]
        else:
            self.failure = line["error"]


def run_process(job: RivalJob, cap: MemoryCap | None, limit_s: float) -> ProcessResult:
    """Run a job in a process of its own. What goes wrong there is told, and raised nowhere."""
    with TemporaryFile() as errors, start_process(errors) as process:
        asked = present(process.stdin, "a pipe was asked for and there is none")
        told = present(process.stdout, "a pipe was asked for and there is none")
        found = ProcessResult()
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            if cap is not None:
                cap.join(process.pid)
            try:
                asked.write(json.dumps(asdict(job)) + "\n")
                asked.flush()
            except BrokenPipeError:  # it ended already, and says so below
                pass
            for line in told:
                found.take(json.loads(line))
            process.wait()
        finally:
            timer.cancel()
        if not found.done and not found.failure:
            found.failure = why(process.returncode, cap, late.is_set(), limit_s, ending(errors))
        if cap is not None:
            found.done["cap_peak_bytes"] = cap.peak_bytes
        return found


@contextmanager
def start_process(errors: IO[bytes]) -> Iterator[subprocess.Popen[str]]:
    """The process, which is ended with the block whatever happens."""
    process = subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def why(returncode: int, cap: MemoryCap | None, late: bool, limit_s: float, errors: str) -> str:
    """Why a process ended before it was done, in a sentence."""
    if late:
        return f"took longer than {limit_s:.0f} s"
    if cap is not None and cap.killed:
        return f"needs more than the cap of {cap.limit_bytes} bytes: the system ended it"
    last = errors.strip().splitlines()[-1:] or ["it wrote nothing"]
    return f"ended with exit status {returncode}: {last[0]}"


def ending(errors: IO[bytes]) -> str:
    size = errors.seek(0, 2)
    errors.seek(max(0, size - SHOWN_BYTES))
    return errors.read().decode(errors="replace")
