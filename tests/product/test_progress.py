"""Progress: told by what takes long, shown on a terminal's stderr, never in the way of stdout."""

import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import speq
from speq import Generator
from speq.cli import options
from speq.cli.options import SHOWN_AFTER_S, progress_bar
from speq.measure import agreement
from speq.measure.report import read_prompts
from speq.units import track
from tests.helpers.command import PATIENCE_S, Command, arguments_of
from tests.helpers.paths import ROOT
from tests.helpers.told import Told


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
    for item in track("work", iter("abc"), 3, lambda *so_far: told.append(so_far)):
        seen.append((item, told[-1]))
    assert seen == [("a", ("work", 0, 3)), ("b", ("work", 1, 3)), ("c", ("work", 2, 3))]
    assert told[-1] == ("work", 3, 3)
    assert list(track("work", [1, 2], 2, None)) == [1, 2]


def test_a_bar_shows_on_a_terminal_and_leaves_stdout_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(options.threading, "Timer", Clockwork)
    with progress_bar() as progress:
        progress("quantising experts", 3, 8)
        Clockwork.made.strike()
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


class Clockwork:
    """Stands for `threading.Timer`: goes off when it is told to, if it was started and not stopped.

    made  the last one
    """

    made: "Clockwork"

    def __init__(self, delay_s: float, act: Callable[[], None]) -> None:
        self.delay_s, self.act = delay_s, act
        self.ident: int | None = None
        self.stopped = False
        Clockwork.made = self

    def start(self) -> None:
        assert self.ident is None, "threads start once"
        self.ident = 1

    def cancel(self) -> None:
        self.stopped = True

    def strike(self) -> None:
        if self.ident is not None and not self.stopped:
            self.act()


def test_work_that_is_soon_done_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(options.threading, "Timer", Clockwork)
    with progress_bar() as progress:
        progress("quantising experts", 3, 8)
        assert Clockwork.made.delay_s == SHOWN_AFTER_S <= 2
        progress("quantising experts", 8, 8)
        progress("running prompts", 0, 2)
        assert screen.getvalue() == ""
    Clockwork.made.strike()
    assert screen.getvalue() == ""


def test_a_bar_comes_by_itself_and_goes_with_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the midst of a long step, which tells nothing."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(options.threading, "Timer", Clockwork)
    with progress_bar() as progress:
        progress("one long step", 0, 1)
        assert screen.getvalue() == ""
        Clockwork.made.strike()
        assert "one long step" in screen.getvalue()
        progress("one long step", 1, 1)
        ended = screen.getvalue()
        progress("over at once", 1, 1)
        assert screen.getvalue() == ended
        progress("later work", 0, 2)  # is shown from its start
        assert "later work" in screen.getvalue()


def run_on_a_terminal(*arguments: object, **environment: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command, each a terminal of its own."""
    ends = [pty.openpty() for _ in range(2)]
    with subprocess.Popen(
        arguments_of(*arguments),
        stdout=ends[0][1],
        stderr=ends[1][1],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", **environment},
        cwd=ROOT,
    ) as process:
        for _, theirs in ends:
            os.close(theirs)
        with ThreadPoolExecutor() as pool:
            out, err = pool.map(read_to_the_end, [ours for ours, _ in ends])
        code = process.wait(PATIENCE_S)
    return code, out, err


def read_to_the_end(terminal: int) -> str:
    read = b""
    with os.fdopen(terminal, "rb", buffering=0) as file:
        while True:
            try:
                part = file.read(1 << 16)
            except OSError:  # EIO: nobody has the other end any more
                break
            if not part:
                break
            read += part
    return read.decode()


# A table without waiting: torch is not imported for it.
PRESETS = ("plan", "any", "--memory-budget", "8GiB", "--preset", "?")


def test_tables_have_style_on_a_terminal_and_none_with_no_color() -> None:
    code, out, _ = run_on_a_terminal(*PRESETS)
    assert code == 0
    assert "\x1b[" in out
    code, plain, err = run_on_a_terminal(*PRESETS, NO_COLOR="1")
    assert code == 0
    assert "a100-40gb" in plain
    assert "\x1b" not in plain + err


def test_no_style_where_there_is_no_terminal() -> None:
    ended = subprocess.run(arguments_of(*PRESETS), capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert "a100-40gb" in ended.stdout
    assert "\x1b" not in ended.stdout + ended.stderr


def test_a_bar_with_no_color_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(options.threading, "Timer", Clockwork)
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with progress_bar() as progress:
        progress("one long step", 0, 4)
        Clockwork.made.strike()
        progress("one long step", 1, 4)
    assert "one long step" in screen.getvalue()
    assert not re.search(r"\x1b\[[\d;]*m", screen.getvalue())


ROUNDING = "rounding experts to INT4"


def checked_on(model: str, num_prompts: int, told: Told) -> None:
    agreement.run(model, read_prompts(None, num_prompts), told, memory_budget="1GiB")


def test_what_takes_long_is_told_to_its_end(
    tiny_bfloat16: Callable[[str], Path], tmp_path: Path
) -> None:
    # Without a draft that another test may have kept beside it.
    given, ignore = tiny_bfloat16("qwen3_moe"), shutil.ignore_patterns(".speq")
    model = shutil.copytree(given, tmp_path / "model", ignore=ignore)
    loaded, again, checked, unpacked = (Told() for _ in range(4))
    options: dict[str, Any] = {
        "drafter": "int4",
        "codec": "raw",
        "dense": "raw",
        "profile": "none",
    }
    for told in (loaded, again):
        Generator.from_pretrained(model, "1GiB", progress=told, **options).close()
    ended = {what: total for what, done, total in loaded.calls if done == total}
    draft = [ROUNDING, "loading the draft's dense layers"]
    assert list(ended) == ["loading weights", *draft]
    assert ended[ROUNDING] == 3 * 8 + 1  # experts, and the file that they are kept in
    assert "reading the INT4 copy" in {what for what, _, _ in again.calls}

    checked_on(str(model), 2, checked)
    assert checked.steps("running prompts") == checked.steps("comparing prompts") == 2
    assert checked.steps("loading the model with plain transformers") == 1
    speq.pack(model, tmp_path / "packed")
    checked_on(str(tmp_path / "packed"), 1, unpacked)
    assert unpacked.steps("comparing experts") == 3 * 8
    assert unpacked.steps("comparing tensors") > 0

    for told in (loaded, again, checked, unpacked):
        assert not told.unfinished


def test_quiet_leaves_results_alone(command: Command, tiny: Callable[[str], Path]) -> None:
    """A table without the sentences under it, or the object and nothing else."""
    bandwidths = ("--link", "1GB/s", "--memory-bandwidth", "10GB/s")
    plan = ("plan", tiny("qwen2_moe"), "--memory-budget", "8MiB", *bandwidths)
    loud, quiet = command(*plan), command(*plan, "--quiet")
    assert loud.code == quiet.code == 0
    assert quiet.err == ""
    assert loud.out.startswith(quiet.out)
    assert quiet.out.rstrip().endswith("┘")
    assert "break-even" in loud.out.removeprefix(quiet.out)
    printed = command(*plan, "--quiet", "--json", "-")
    assert (printed.code, printed.err) == (0, "")
    assert json.loads(printed.out)["candidates"]
