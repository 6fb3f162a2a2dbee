"""Runs in the interpreter under test: a process that has speq loaded and forks for each command.

Requests come as lines of JSON on standard input, answers go as lines of JSON to standard output.
It imports nothing of ours but `speq`, and of that only the command and the public API.
"""

import ctypes
import gc
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

CRASHED = 70
# Of a process that runs a request.
syncs = 0
# Values that JSON cannot say, by the name that a request gives them.
ODD = {
    "bytes": b"abc",
    "bytearray": bytearray(b"abc"),
    "memoryview": memoryview(b"abc"),
    "set": {1, 2, 3},
    "range": range(3),
    "tuple": (1, 2, 3),
    "complex": 1j,
    "decimal": Decimal("0.5"),
    "fraction": Fraction(1, 2),
    "object": object(),
    "class": int,
    "path": Path("model"),
    "iterator": iter([1, 2]),
    "ellipsis": ...,
}


def main() -> None:
    # What a command prints to file descriptor 1 must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answer = preload(request["modules"]) if "modules" in request else run(request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def preload(modules: list[str]) -> dict[str, Any]:
    """Import what a first command was seen to import, so that no later one has to."""
    for module in modules:
        # Some modules can only be had by way of others.
        try:
            __import__(module)
        except BaseException:
            continue
    # A child's collections would look at all of it, and copy it.
    gc.collect()
    gc.freeze()
    return {}


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Do a request in a process of its own and say how it ended, and with what peak of memory."""
    child = os.fork()
    if not child:
        # Whatever happens, this process may not go on as a second worker.
        try:
            os._exit(act(request))
        except BaseException:
            traceback.print_exc()
            os._exit(CRASHED)
    late = not ended_within(child, request["deadline_s"])
    if late:
        os.killpg(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return {
        "code": max(code, 0),
        "signal": max(-code, 0),
        "late": late or -code == signal.SIGXCPU,
        "peak_bytes": usage.ru_maxrss * 1024,
    }


def ended_within(child: int, deadline_s: float) -> bool:
    handle = os.pidfd_open(child)
    try:
        return bool(select.select([handle], [], [], deadline_s)[0])
    finally:
        os.close(handle)


def act(request: dict[str, Any]) -> int:
    """In the child: the exit status of a request."""
    os.setpgid(0, 0)
    room = Path(request["room"])
    os.chdir(room)
    os.environ["HOME"] = str(room / "home")
    os.environ["TMPDIR"] = str(room / "tmp")
    tempfile.tempdir = None
    redirect(request)
    os.chdir(request["folder"])
    limit(resource.RLIMIT_CPU, request["cpu_s"])
    limit(resource.RLIMIT_AS, mapped_bytes() + request["address_bytes"])
    if request["struck"] is None:
        count_syncs(request["killed_at"])
        code = outcome_of(request)
    else:
        code = struck(request)
    Path(request["syncs"]).write_text(str(syncs))
    if "imported" in request:
        Path(request["imported"]).write_text(json.dumps(sorted(sys.modules)))
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        # An interpreter that ends would say so as well, and exit with this status.
        sys.stderr.write(f"Exception ignored while flushing:\n{traceback.format_exc()}")
        sys.stderr.flush()
        return 120
    return code


def redirect(request: dict[str, Any]) -> None:
    for number, name, mode in (
        (0, request["stdin"], os.O_RDONLY),
        (1, request["stdout"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        file = os.open(name, mode, 0o600)
        os.dup2(file, number)
        os.close(file)
    # Buffers of the parent's objects would be written twice.
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, encoding="utf-8", errors=errors, closefd=False)
        for number, mode, errors in ((0, "r", "strict"), (1, "w", "strict"), (2, "w", "replace"))
    )
    if request["output"] == "closed":
        # What an interpreter makes of a standard output that is closed when it starts.
        os.close(1)
        sys.stdout = None
    elif request["output"] == "broken":
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)


def limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, hard))


def mapped_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def count_syncs(kill_at: tuple[int, int] | None) -> None:
    """Count what is put on the disk, and put nothing there: no case is about a loss of power.

    kill_at  (count, signal): this process gets the signal at its count-th sync
    """

    def counted(file: Any) -> None:
        global syncs
        syncs += 1
        if kill_at is not None and syncs == kill_at[0]:
            os.kill(os.getpid(), kill_at[1])

    setattr(os, "fsync", counted)  # noqa: B010
    setattr(os, "fdatasync", counted)  # noqa: B010


def struck(request: dict[str, Any]) -> int:
    """Exit status of a request one of whose system calls fails."""
    library = ctypes.CDLL(None)
    library.speq_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
    library.speq_arm(os.fsencode(request["room"]), *request["struck"])
    try:
        return outcome_of(request)
    finally:
        library.speq_disarm()
        library.speq_write_calls(os.fsencode(request["calls"]))


def outcome_of(request: dict[str, Any]) -> int:
    """Exit status; exceptions that a user would see as a traceback are printed as one."""
    try:
        if request["kind"] == "command":
            command(request["arguments"])
        elif request["kind"] == "library":
            library(request)
        else:
            fake(request["arguments"])
        return 0
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return CRASHED


def command(arguments: list[str]) -> None:
    from speq.cli import main as speq_main

    sys.argv = ["speq", *arguments]
    speq_main()


def library(request: dict[str, Any]) -> None:
    """Load a model and generate once for each request; the tokens go to standard output."""
    from speq import Generator, SpeqError

    try:
        generator = Generator.from_pretrained(**plain(request["load"]))
        try:
            for options in request["requests"]:
                generation = generator.generate(**plain(options))
                print(json.dumps(generation.token_ids))
        finally:
            generator.close()
    except SpeqError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(1) from error


def plain(value: Any) -> Any:
    """Python's value of what a request says: `{"odd": NAME}` is one of `ODD`."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        if set(value) == {"odd"}:
            return ODD[value["odd"]]
        return {key: plain(each) for key, each in value.items()}
    return value


def fake(arguments: list[str]) -> None:
    """Misbehave as asked, for the tests of the harness."""
    what, *rest = arguments
    if what == "print":
        print(rest[0])
    elif what == "refuse":
        print(f"error: {rest[0]}", file=sys.stderr)
        raise SystemExit(1)
    elif what == "mumble":
        raise SystemExit(3)
    elif what == "raise":
        raise TypeError(rest[0])
    elif what == "signal":
        os.kill(os.getpid(), int(rest[0]))
    elif what == "spin":
        while True:
            pass
    elif what == "block":
        time.sleep(3600)
    elif what == "allocate":
        memory = bytearray(int(rest[0]))
        memory[::4096] = bytes(len(memory) // 4096)  # has its pages taken
    elif what == "sync":
        for _ in range(int(rest[0])):
            os.fsync(0)
    elif what == "leave":
        Path(rest[0]).write_bytes(b"half")
    elif what == "write":
        file = os.open(rest[0], os.O_WRONLY | os.O_CREAT)
        os.write(file, b"all of it")  # without a look at what came of it
        os.close(file)


if __name__ == "__main__":
    main()
