"""Commands whose system calls fail one at a time: a sample of `python -m tests.fuzz.io_walk`."""

import errno
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.io_walk import NAMES, WALKS, IoWalk, Walk, build_striker, opened, strikes, untimed
from tests.fuzz.target import HALF, KILL, Command, Ended, Strike, Target

SEED, SAMPLE = 7, 12


@pytest.fixture(scope="module")
def striking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """It never imports speq: no fake command does."""
    striker = build_striker(tmp_path_factory.mktemp("striker"))
    with Target(Path(sys.executable), striker=striker) as target:
        yield target


def written(target: Target, room: Path, strike: Strike) -> Ended:
    return target.run(Command(("write", "file"), kind="fake", struck=strike), room)


def test_calls_are_counted_and_struck(striking: Target, tmp_path: Path) -> None:
    ended = written(striking, tmp_path, Strike(0, 0))
    assert ended.succeeded
    assert ended.calls == ("create file", f"write {tmp_path}/file")
    assert (tmp_path / "file").read_bytes() == b"all of it"
    assert "No space left" in written(striking, tmp_path, Strike(1, errno.ENOSPC)).err
    assert "Input/output error" in written(striking, tmp_path, Strike(2, errno.EIO)).err
    assert written(striking, tmp_path, Strike(2, KILL)).signal == signal.SIGKILL
    (tmp_path / "file").unlink()
    assert written(striking, tmp_path, Strike(2, HALF)).succeeded
    assert (tmp_path / "file").read_bytes() == b"all "


def test_every_call_has_the_faults_of_its_kind() -> None:
    calls = ["open a", "read a", "create b", "write b", "look c"]
    found = [(strike.at, NAMES[strike.fault]) for strike in strikes(calls)]
    assert found == [
        *((1, name) for name in ("EIO", "EINTR", "kill")),
        *((2, name) for name in ("EIO", "EINTR", "half", "kill")),
        *((3, name) for name in ("EIO", "ENOSPC", "EINTR", "kill")),
        *((4, name) for name in ("EIO", "ENOSPC", "EINTR", "half", "kill")),
        *((5, name) for name in ("EIO", "kill")),
    ]


def test_times_of_a_text_are_left_out() -> None:
    assert (
        untimed("on 32 tokens, 2 steps, 0.1 minutes\nin 12 ms")
        == "on 32 tokens, 2 steps, minutes\nin ms"
    )


@pytest.fixture(scope="module")
def io_walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IoWalk]:
    with opened(tmp_path_factory.mktemp("walk")) as walk:
        yield walk


@pytest.mark.wide
@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.name)
def test_a_fault_at_some_calls(walk: Walk, io_walk: IoWalk) -> None:
    wanted = io_walk.undisturbed(walk)
    every = [*strikes(wanted.calls)]
    failed = [
        f"{walk.name} {strike} {wanted.calls[strike.at - 1]}: {faults}"
        for strike in random.Random(SEED).sample(every, min(SAMPLE, len(every)))
        if (faults := io_walk.faults(walk, strike, wanted))
    ]
    assert not failed, "\n".join(["", *failed])
