"""Progress: told by what takes long, shown on a terminal's stderr, never in the way of stdout."""

import io
import sys

import pytest

from speq.cli.options import progress_bar
from speq.units import tracked


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


def test_items_are_told_of_as_they_are_done() -> None:
    told: list[tuple[str, int, int]] = []
    seen = []
    for item in tracked("work", iter("abc"), 3, lambda *so_far: told.append(so_far)):
        seen.append((item, told[-1]))
    assert seen == [("a", ("work", 0, 3)), ("b", ("work", 1, 3)), ("c", ("work", 2, 3))]
    assert told[-1] == ("work", 3, 3)
    assert list(tracked("work", [1, 2], 2, None)) == [1, 2]


def test_a_bar_shows_on_a_terminal_and_leaves_stdout_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_bar() as progress:
        progress("quantising experts", 3, 8)
        print("an answer")
        progress("running layer 2 of 4", 1, 5)
        progress("quantising experts", 8, 8)
        progress("running layer 2 of 4", 5, 5)
    shown = screen.getvalue()
    assert "quantising experts" in shown
    assert "3/8" in shown
    assert "an answer" not in shown
    assert capsys.readouterr().out == "an answer\n"


@pytest.mark.parametrize("quiet", [False, True])
def test_a_bar_shows_nowhere_else(quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a file or a pipe, and not where quiet is asked for."""
    screen = Terminal() if quiet else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_bar(quiet) as progress:
        progress("quantising experts", 3, 8)
        progress("quantising experts", 8, 8)
    assert screen.getvalue() == ""
