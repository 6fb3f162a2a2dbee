"""The harness itself: each kind of failure is seen when a command that only pretends shows it."""

import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.fuzz import campaign, table
from tests.fuzz.campaign import Campaign, repeated
from tests.fuzz.case import Case, Expect, FuzzClass, run
from tests.fuzz.damage import LITERALS, change_json, change_lines
from tests.fuzz.resumed import unlike
from tests.fuzz.sound import Sound
from tests.fuzz.target import Command, Limits, Target, killed

ANY, SAME, REFUSED, EITHER = Expect.ANY, Expect.SAME, Expect.REFUSED, Expect.SAME_OR_REFUSED
LIMITS = Limits(deadline_s=30.0, cpu_s=5, peak_bytes=96 << 20)
SHORT = Limits(deadline_s=0.3, cpu_s=5)
MIB = 1 << 20


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """It never imports speq: no fake command does."""
    with Target(Path(sys.executable), LIMITS) as opened:
        yield opened


def fake(*arguments: object, **options: Any) -> Command:
    return Command(tuple(map(str, arguments)), kind="fake", **options)


def faults(
    target: Target, room: Path, *steps: Command, expect: Expect = ANY, limits: Limits = LIMITS
) -> tuple[str, ...]:
    return run(Case("", steps, expect, "sound\n"), target, room, limits).faults


@pytest.mark.parametrize(
    ("command", "limits", "fault"),
    [
        (fake("raise", "no such thing"), LIMITS, "traceback: TypeError: no such thing"),
        (fake("signal", signal.SIGUSR1), LIMITS, f"signal {int(signal.SIGUSR1)}"),
        (fake("block"), SHORT, "hang"),
        (fake("spin"), Limits(deadline_s=60.0, cpu_s=1), "hang"),
        (fake("allocate", 256 * MIB), LIMITS, "memory: "),
        (
            fake("allocate", 2048 * MIB),
            Limits(address_bytes=512 * MIB),
            "memory: an allocation failed",
        ),
        (fake("leave", "model.12.partial"), LIMITS, "left over: model.12.partial"),
        (fake("leave", "tmp/anything"), LIMITS, "left over: tmp/anything"),
        (fake("mumble"), LIMITS, "exit status 3 without one sentence"),
        (fake("refuse", "a\nerror: b"), LIMITS, "exit status 1 without one sentence"),
        (fake("refuse", "DefaultCPUAllocator: no"), LIMITS, "memory: an allocation failed"),
        (fake("print", "x", output="broken"), LIMITS, "traceback: BrokenPipeError"),
    ],
    ids=lambda value: value.arguments[0] if isinstance(value, Command) else "",
)
def test_a_fault_is_seen(
    command: Command, limits: Limits, fault: str, target: Target, tmp_path: Path
) -> None:
    (found,) = faults(target, tmp_path, command, limits=limits)
    assert found.startswith(fault)


@pytest.mark.parametrize(
    ("command", "faultless"),
    [
        (fake("print", "sound"), {ANY, SAME, EITHER}),
        (fake("print", "other"), {ANY}),
        (fake("refuse", "it is damaged; mend it"), {ANY, REFUSED, EITHER}),
    ],
)
def test_ends_are_judged_by_what_is_expected(
    command: Command, faultless: set[Expect], target: Target, tmp_path: Path
) -> None:
    assert {
        expect for expect in Expect if not faults(target, tmp_path, command, expect=expect)
    } == (faultless)


def test_small_allocations_are_no_fault(target: Target, tmp_path: Path) -> None:
    assert faults(target, tmp_path, fake("allocate", 8 * MIB)) == ()


def test_planned_signals_are_no_fault_and_what_follows_is_judged(
    target: Target, tmp_path: Path
) -> None:
    stopped = killed(fake("sync", 3), 2, signal.SIGTERM)
    assert faults(target, tmp_path, stopped, fake("print", "sound"), expect=SAME) == ()
    (other,) = faults(target, tmp_path, stopped, fake("print", "other"), expect=SAME)
    assert other.startswith("other text")
    assert target.run(stopped, tmp_path).signal == signal.SIGTERM
    assert target.run(fake("sync", 3), tmp_path).syncs == 3


def test_a_command_may_have_no_standard_output(target: Target, tmp_path: Path) -> None:
    ended = target.run(fake("print", "x", output="closed"), tmp_path)
    assert ended.succeeded and ended.out == ""


def test_folders_are_compared_byte_for_byte() -> None:
    wanted: dict[str, bytes | None] = {"a": b"1", "b": b"2"}
    assert unlike(dict(wanted), wanted) == []
    unlike_it: dict[str, dict[str, bytes | None]] = {
        "b": {"a": b"1"},
        "c": wanted | {"c": None},
        "a": wanted | {"a": b"0"},
    }
    for names, found in unlike_it.items():
        assert unlike(found, wanted) == [f"ended well, unlike an undisturbed one in {names}"]


def test_a_seed_makes_the_same_cases_in_any_order(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(rng: random.Random, sound: Sound, room: Path) -> Case:
        path = room / "lines"
        path.write_text('{"a": [1, 2.5, "x"]}\n' * 5)
        label = change_lines(rng, path)
        return Case(label, (fake("print", ascii(path.read_text())[:9000]),), EITHER, "sound\n")

    classes = {"one": FuzzClass("one", make), "two": FuzzClass("two", make)}
    monkeypatch.setattr(campaign, "CLASSES", classes)
    made = Campaign(cast(Sound, SimpleNamespace(target=target)), tmp_path)

    def seen(name: str, seed: int, number: int) -> tuple[str, str]:
        outcome = made.outcome(name, seed, number)
        assert outcome.faults
        return outcome.case.label, outcome.ended[-1].out

    cases = [(name, seed, number) for name in classes for seed in (1, 2) for number in range(8)]
    forth = [seen(*case) for case in cases]
    assert [seen(*case) for case in reversed(cases)] == forth[::-1]
    assert len(set(forth)) > len(cases) // 2
    assert list(tmp_path.iterdir()) == []


def test_every_class_has_its_share() -> None:
    assert len(table.CLASSES) == 15
    for inputs in (400, 3000):
        assert sum(table.shares(inputs).values()) == inputs
    assert min(table.shares(1).values()) == 1
    assert repeated("packs", 7, 12) == "python -m tests.fuzz --class packs --seed 7 --case 12"


@pytest.mark.parametrize("kind", LITERALS)
def test_literals_are_put_into_json_as_they_are(kind: str, tmp_path: Path) -> None:
    class Chosen(random.Random):
        def choice(self, seq: Any) -> Any:
            return kind if kind in seq else seq[0]

    path = tmp_path / "file.json"
    path.write_text('{"a": 1}')
    label, keys = change_json(Chosen(), path)
    assert path.read_text() == f'{{"a": {LITERALS[kind][0]}}}'
    assert keys == ("a",) and label.startswith("file.json: a is ")
