"""A fault at every input and output: `python -m tests.fuzz.io_walk --walk pack`.

A command runs once undisturbed, and its system calls on files are counted. It runs again for each
of them, which fails: with EIO or ENOSPC, with EINTR, by moving half of its bytes, or by a kill in
its place. It must end as undisturbed or with one sentence. The same command once more, undisturbed
and in the same room, must end as it does in a fresh one.
"""

import argparse
import errno
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.fuzz.case import contents, faults_of, left_overs
from tests.fuzz.damage import copied
from tests.fuzz.sound import BUDGET, MEMORY, Sound, generate, pack, quantize
from tests.fuzz.target import HALF, KILL, Command, Ended, Limits, Strike, Target, speq

RESULTS = Path(__file__).parents[2] / "bench" / "results"
# Tokens of a prompt whose KV is kept in a folder.
LONG = 270
SOURCE = Path(__file__).parent / "system_calls.cpp"
MOVES, WRITES = {"read", "write"}, {"create", "write", "sync", "truncate", "allocate", "make"}
FAULTS = {
    "EIO": errno.EIO,
    "ENOSPC": errno.ENOSPC,
    "EINTR": errno.EINTR,
    "half": HALF,
    "kill": KILL,
}
NAMES = {fault: name for name, fault in FAULTS.items()}
# Kept for later runs, which do without where it cannot be written.
OPTIONAL = re.compile(r"home/\.cache/.+|model/\.speq/.+")
# Of files that a killed command has written in part.
TO_FORCE = "exists already; choose another name or add --force"
# What a command must take without a word: the call is repeated, or goes on.
HARMLESS = {errno.EINTR, HALF}
# Calls that the system may interrupt.
INTERRUPTED = {*MOVES, "open", "create", "sync", "lock"}


@dataclass(frozen=True)
class Walk:
    """A command whose every call is struck.

    lay_out  puts what it reads into a room
    kept     what it leaves where it fails, to go on with
    """

    name: str
    command: Command
    lay_out: Callable[[Sound, Path], None]
    kept: tuple[str, ...] = ()


def half_model(sound: Sound, room: Path) -> None:
    copied(sound.half, room / "half")
    copied(sound.calibration, room / "text.txt")


def whole_model(sound: Sound, room: Path) -> None:
    copied(sound.model, room / "model")


def measured(sound: Sound, room: Path) -> None:
    """A file as `speq bench` writes them."""
    copied(RESULTS / "hit-rate-tiny-moe-amd-epyc-2-cores.json", room / "hits.json")


def texts(sound: Sound, room: Path) -> None:
    whole_model(sound, room)
    (room / "texts").mkdir()
    copied(sound.calibration, room / "texts" / "text.txt")


def requests(sound: Sound, room: Path) -> None:
    whole_model(sound, room)
    line = '{"prompt": "Once upon a time", "max_new_tokens": %d}\n'
    (room / "requests.jsonl").write_text("".join(line % at for at in range(3, 6)))


WALKS = (
    Walk("generate", generate("model", "--draft-length", 2), whole_model),
    Walk("pack", pack("lossless"), half_model),
    Walk(
        "mirror",
        speq("pack", "half", "--out", "out", "--codec", "raw", "--mirror", "other"),
        half_model,
    ),
    Walk("quantize", quantize(), half_model, ("*.activations",)),
    Walk("report", speq("report", "hits.json", "--out", "page.html"), measured),
    Walk(
        "profile",
        speq(
            *("profile", "model", "--prompt", "Once", *MEMORY, "--out", "run"),
            *("--max-new-tokens", 4, "--draft-length", 0),
        ),
        whole_model,
    ),
    Walk(
        "train-head",
        speq(
            *("train-head", "model", "--texts", "texts", "--out", "head", *MEMORY),
            *("--windows", 2, "--steps", 2, "--sequence-length", 16, "--width", 16),
        ),
        texts,
        ("*.journal", "*.bin"),
    ),
    Walk(
        "tune",
        speq("tune", "model", *MEMORY, "--num-prompts", 1, "--max-new-tokens", 40),
        whole_model,
    ),
    Walk(
        "prefixes",
        Command(
            kind="library",
            load={
                **{"model": "model", "memory_budget": BUDGET, "draft_length": "0"},
                **{"prefix_cache": "prefixes", "profile": "none", "dtype": "float32"},
            },
            requests=tuple(
                {
                    "prompt": [(each * each + at) % 256 for each in range(LONG)],
                    **{"max_new_tokens": 4, "ignore_eos": True},
                }
                for at in (0, 1, 0)
            ),
        ),
        whole_model,
    ),
    Walk("batch", speq("batch", "model", "requests.jsonl", "answers.jsonl", *MEMORY), requests),
)


@dataclass(frozen=True)
class Undisturbed:
    """How a command ends, and what it leaves in a room.

    text   its standard output without times; None: it differs between runs
    files  by name; None: a file that differs
    """

    calls: tuple[str, ...]
    text: str | None
    files: dict[str, bytes | None]


def untimed(text: str) -> str:
    """Text without the times in it."""
    return re.sub(r"\d[\d.]* (?=(?:minutes|s|ms)\b)", "", text)


class IoWalk:
    """Walks commands in one room below `root`, which is laid out anew for each fault."""

    def __init__(self, sound: Sound, root: Path) -> None:
        self.sound, self.room = sound, root / "room"

    def undisturbed(self, walk: Walk) -> Undisturbed:
        """Run a command twice, and keep what is the same."""
        runs = []
        self.lay_out(walk)
        self.sound.target.warm(walk.command, self.room)
        for _ in range(2):
            self.lay_out(walk)
            ended = self.run(replace(walk.command, struck=Strike(0, 0)))
            if not ended.succeeded:
                raise RuntimeError(f"{walk.name} fails undisturbed: {ended}")
            runs.append((ended, contents(self.room)))
        (one, first), (other, second) = runs
        same = {
            name: data if second[name] == data else None
            for name, data in first.items()
            if name in second
        }
        texts = untimed(one.out), untimed(other.out)
        return Undisturbed(one.calls, texts[0] if texts[0] == texts[1] else None, same)

    def faults(self, walk: Walk, strike: Strike, wanted: Undisturbed) -> list[str]:
        """Strike one call of a command. Return what is wrong with how it ends, and goes on."""
        self.lay_out(walk)
        struck = self.run(replace(walk.command, struck=strike))
        found = faults_of(struck, self.sound.target.limits)
        harmless = strike.fault in HARMLESS and kind_of(wanted.calls[strike.at - 1]) in MOVES
        if not struck.succeeded and harmless:
            found.append(f"refused: {struck.err[-300:]!r}")
        if strike.fault != KILL:
            found += left_overs(self.room, walk.kept)
        if struck.succeeded:
            return found + self.differences(struck, wanted, fewer=not harmless)
        again = self.run(walk.command)
        worse = faults_of(again, self.sound.target.limits)
        if again.succeeded:
            worse += left_overs(self.room) + self.differences(again, wanted)
        elif self.unlike(wanted) and not (strike.fault == KILL and TO_FORCE in again.err):
            # One that was struck at its very end had done its work.
            worse.append(f"refused: {again.err[-300:]!r}")
        return found + [f"again: {fault}" for fault in worse]

    def lay_out(self, walk: Walk) -> None:
        shutil.rmtree(self.room, ignore_errors=True)
        self.room.mkdir()
        walk.lay_out(self.sound, self.room)

    def run(self, command: Command) -> Ended:
        return self.sound.target.run(command, self.room)

    def differences(self, ended: Ended, wanted: Undisturbed, fewer: bool = False) -> list[str]:
        """fewer: what is optional may be absent"""
        same = wanted.text in (None, untimed(ended.out))
        return [*([] if same else [f"other text: {ended.out[:60]!r}"]), *self.unlike(wanted, fewer)]

    def unlike(self, wanted: Undisturbed, fewer: bool = False) -> list[str]:
        found = contents(self.room)
        return [
            f"other than undisturbed: {name}"
            for name, data in sorted(wanted.files.items())
            if not (fewer and name not in found and OPTIONAL.fullmatch(name))
            and (name not in found or data not in (None, found[name]))
        ]


def kind_of(call: str) -> str:
    return call.partition(" ")[0]


def strikes(calls: Sequence[str], names: Sequence[str] = tuple(FAULTS)) -> Iterator[Strike]:
    """Every fault that each of the calls can have."""
    for number, call in enumerate(calls, 1):
        kind = kind_of(call)
        for name in names:
            fault = FAULTS[name]
            if fault == errno.ENOSPC and kind not in WRITES:
                continue
            if fault == errno.EINTR and kind not in INTERRUPTED:
                continue
            if fault == HALF and kind not in MOVES:
                continue
            yield Strike(number, fault)


def build_striker(folder: Path) -> Path:
    """The library that strikes system calls."""
    striker = folder / "system_calls.so"
    build = ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", SOURCE, "-o", striker, "-ldl"]
    subprocess.run(build, check=True)
    return striker


@contextmanager
def opened(root: Path, python: Path = Path(sys.executable)) -> Iterator[IoWalk]:
    """A walk against the speq of an interpreter, with its files below `root`."""
    striker = build_striker(root)
    (root / "sound").mkdir()
    with Target(python, Limits(address_bytes=8 << 30), striker) as target:
        yield IoWalk(Sound(root / "sound", target), root)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.io_walk", description=__doc__)
    names = [walk.name for walk in WALKS]
    parser.add_argument("--walk", choices=names, action="append", help="default: all")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="default: all")
    parser.add_argument("--call", help="of this kind only, such as read")
    parser.add_argument("--from", dest="first", type=int, default=1, help="the first call")
    parser.add_argument("--to", dest="last", type=int, default=10**9, help="the last call")
    parser.add_argument("--every", type=int, default=1, help="strike only one call in so many")
    given = parser.parse_args()
    failed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="speq-walk-") as root, opened(Path(root)) as io_walk:
        for walk in WALKS:
            if walk.name not in (given.walk or names):
                continue
            begun_s = time.monotonic()
            wanted = io_walk.undisturbed(walk)
            calls, struck = wanted.calls, 0
            for strike in strikes(calls, given.fault or tuple(FAULTS)):
                call = calls[strike.at - 1]
                if not given.first <= strike.at <= given.last or strike.at % given.every:
                    continue
                if given.call not in (None, kind_of(call)):
                    continue
                struck += 1
                found = io_walk.faults(walk, strike, wanted)
                failed[walk.name] += bool(found)
                what = f"{walk.name} {strike.at} {NAMES[strike.fault]} {call}"
                for fault in found:
                    print(f"{what}: {fault}", flush=True)
            print(
                f"{walk.name}: {len(calls)} calls, {struck} struck, {failed[walk.name]} failed, "
                f"{time.monotonic() - begun_s:.0f} s",
                flush=True,
            )
    return 1 if failed.total() else 0


if __name__ == "__main__":
    sys.exit(main())
