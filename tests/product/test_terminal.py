"""The view below a text: the text stays what it is, and nothing is left of the view."""

import io
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.text import Text

from speq import cli
from speq.dashboard.bottom_rows import BottomRows, TextColumn
from speq.dashboard.last_steps import LastFigures
from speq.dashboard.terminal import EVERY_S, TerminalView, bar, memory_items, rows_of, shown
from speq.stats import Recorder, RunStats
from tests.helpers.command import Command
from tests.helpers.terminal import Terminal, plainly, terminal

MEMORY = {"budget": 24 << 20, "slots": 12 << 20, "draft": 8 << 20, "kv_cache": 1 << 20}
TEXT = (
    "A line of forty columns is as wide as it"  # and the next character wraps
    "\n\nThe second one goes on and on, until it is wider than any of the terminals of this test, "
    "which have a hundred columns at most, and has to be wrapped.\n"
    + "".join(f"line {at}\n" for at in range(30))
    + "x" * 80
    + "\n"
    + "日本語のテキスト、幅は二倍です。" * 6
    + "\n\tindented\ta\r\nwindows\n"
    + "y" * 240
)


class Steps:
    """A recorder whose steps end when they are told to; its clock goes on by itself."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.recorder = Recorder(self.clock)
        self.recorder.begin_run(RunStats(0.0, dict(MEMORY)))

    def clock(self) -> float:
        self.now_s += 0.125
        return self.now_s

    def end(self, phase: str = "decode", emitted: int = 1) -> None:
        self.recorder.begin(phase).emitted = emitted
        self.recorder.finish()


def pieces_of(text: str, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    at = 0
    while at < len(text):
        size = rng.choice([1, 1, 2, 3, 5, 8, 13, 40])
        yield text[at : at + size]
        at += size


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


def written_under_a_view(
    screen: Terminal, steps: Steps, monkeypatch: pytest.MonkeyPatch, text: str, seed: int
) -> int:
    """Write a text in pieces, a step before each; how often the view was seen meanwhile."""
    monkeypatch.setattr(sys, "stderr", screen.stream)
    view = TerminalView(steps.recorder, BottomRows(screen.stream), steps.clock)
    steps.recorder.listeners.append(view.hear)
    seen = 0
    steps.end("prefill")
    for piece in pieces_of(text, seed):
        screen.stream.write(piece)
        view.wrote(piece)
        steps.now_s += EVERY_S
        steps.end()
        seen += any("ms a token" in row for row in screen.rows)
    view.close()
    steps.recorder.listeners.clear()
    return seen


# Even ones: in the last column the emulator keeps half of a character that is two columns wide.
@pytest.mark.parametrize("columns", [40, 54, 80, 100])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_text_is_whole_and_nothing_else_is_left(
    columns: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps()
    with terminal(columns, 24) as screen:
        seen = written_under_a_view(screen, steps, monkeypatch, TEXT, seed)
        assert screen.text == plainly(TEXT, columns, 24)
        assert screen.screen.margins is None
        # What comes behind goes on where the text ended.
        screen.stream.write("\nbehind it\n" * 30)
        assert screen.text == plainly(TEXT + "\nbehind it\n" * 30, columns, 24)
    assert seen > 50


def test_text_before_the_view_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the cursor stood at the top, in the midst or at the bottom, or behind a text."""
    for before in ("", "one\ntwo\n", "n\n" * 30, "typed: "):
        steps = Steps()
        with terminal(60, 24) as screen:
            screen.stream.write(before)
            written_under_a_view(screen, steps, monkeypatch, "some text\nand more", 0)
            assert screen.text == plainly(f"{before}some text\nand more", 60, 24)


def test_the_view_is_below_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    with terminal(80, 24) as screen:
        monkeypatch.setattr(sys, "stderr", screen.stream)
        with shown(steps.recorder) as wrote:
            steps.end("prefill")
            screen.stream.write("the text")
            wrote("the text")
            rows = screen.rows
            assert rows[0] == "the text"
            view = rows[-7:]
            assert rows[1:-7] == [""] * 16
            assert view[0].startswith("-- the last  0 steps ---")
            assert view[1].startswith("     1 tokens        - ms a token  draft length    -")
            assert "memory 24 MiB:  slots 12 MiB  draft 8 MiB  kv cache 1 MiB" in view[-1]
            assert len(steps.recorder.listeners) == 1
        assert steps.recorder.listeners == []
        assert screen.rows == ["the text", *[""] * 23]


def test_an_interrupt_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    with terminal(80, 24) as screen:
        monkeypatch.setattr(sys, "stderr", screen.stream)
        with pytest.raises(KeyboardInterrupt), shown(steps.recorder):
            steps.end("prefill")
            assert len([row for row in screen.rows if row]) > 4
            assert screen.screen.margins is not None
            raise KeyboardInterrupt
        assert (screen.text, screen.screen.margins) == ([], None)


def test_a_process_that_is_told_to_end_gives_the_terminal_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGTSTP)
    steps = Steps()
    with terminal(80, 24) as screen:
        monkeypatch.setattr(sys, "stderr", screen.stream)
        with pytest.raises(SystemExit) as ended, shown(steps.recorder) as wrote:
            screen.stream.write("the text")
            wrote("the text")
            steps.end("prefill")
            screen.settle()
            assert screen.screen.margins is not None
            signal.raise_signal(signal.SIGTERM)
        assert (screen.text, screen.screen.margins) == (["the text"], None)
    assert ended.value.code == 128 + 15
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGTSTP)) == before


# A view whose steps end at each line that it reads; it says when they have.
STEPS = """
import sys
from speq.dashboard import terminal
from speq.stats import Recorder, RunStats

terminal.EVERY_S = 0.0
recorder = Recorder()
recorder.begin_run(RunStats(0.0, {"budget": 1 << 20, "slots": 1 << 19}))
with terminal.shown(recorder) as wrote:
    for line in sys.stdin:
        sys.stderr.write(line)
        wrote(line)
        recorder.begin("decode").emitted = 1
        recorder.finish()
        print("ended", flush=True)
"""


def test_a_process_that_is_stopped_lends_the_terminal_to_the_shell() -> None:
    """Its rows and its scrolling region are gone while it is stopped, and back when it goes on."""
    with terminal(80, 24) as screen:
        process = subprocess.Popen(
            [sys.executable, "-c", STEPS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=screen.stream,
            text=True,
            process_group=0,  # stopped by itself
        )
        assert process.stdin is not None
        assert process.stdout is not None

        def write(line: str) -> bool:
            """Whether there is a view behind it."""
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline() == "ended\n", screen.text
            return any("ms a token" in row for row in screen.rows)

        try:
            assert write("one\n")
            assert screen.screen.margins is not None
            os.kill(process.pid, signal.SIGTSTP)
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), status
            assert (screen.text, screen.screen.margins) == (["one"], None)
            # What the shell writes meanwhile may scroll all of the screen.
            screen.stream.write("$ ls\n" * 30)
            assert screen.screen.margins is None
            os.kill(process.pid, signal.SIGCONT)
            assert write("two\n")
            assert screen.screen.margins is not None
        finally:
            process.stdin.close()
            process.send_signal(signal.SIGCONT)
            process.wait(30)
            process.stdout.close()
        assert [*dict.fromkeys(screen.text)][:3] == ["one", "$ ls", "two"]
        assert screen.screen.margins is None


def test_a_process_in_the_background_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for group, drawn in ((os.getpgrp() + 1, False), (os.getpgrp(), True)):
        monkeypatch.setattr(os, "tcgetpgrp", lambda file, group=group: group)
        steps = Steps()
        with terminal(80, 24) as screen:
            assert bool(written_under_a_view(screen, steps, monkeypatch, "text", 0)) == drawn
            assert screen.text == ["text"]


def test_it_is_drawn_four_times_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    drawn: list[float] = []
    with terminal(80, 24) as screen:
        monkeypatch.setattr(sys, "stderr", screen.stream)
        rows = BottomRows(screen.stream)
        monkeypatch.setattr(BottomRows, "show", lambda rows, drawing: drawn.append(now[0]))
        now = [0.0]
        view = TerminalView(steps.recorder, rows, lambda: now[0])
        steps.recorder.listeners.append(view.hear)
        for at in range(20):
            now[0] = at / 16
            steps.end()
    assert drawn == [0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(("columns", "lines"), [(50, 30), (80, 18), (120, 40)])
def test_a_terminal_that_changes_its_size(
    columns: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps()
    with terminal(80, 24) as screen:
        monkeypatch.setattr(sys, "stderr", screen.stream)
        view = TerminalView(steps.recorder, BottomRows(screen.stream), steps.clock)
        steps.recorder.listeners.append(view.hear)
        written = ""
        for at in range(40):
            if at == 9:  # in the midst of a line
                screen.resize(columns, lines)
            steps.now_s += EVERY_S
            steps.end()
            rows = screen.rows
            assert any("ms a token" in row for row in rows)
            assert sum(row.startswith("-- the last") for row in rows) == 1
            text = f"line {at}\n" if at % 2 else f"the beginning of line {at}, "
            screen.stream.write(text)
            view.wrote(text)
            written += text
        view.close()
        found = "\n".join(line for line in screen.text if line)
    assert found == written.rstrip("\n")


def test_a_terminal_that_is_too_small_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Steps()
    with terminal(80, 8) as screen:
        assert written_under_a_view(screen, steps, monkeypatch, TEXT, 1) == 0
        assert screen.text == plainly(TEXT, 80, 8)
    assert [record.getMessage() for record in caplog.records] == [
        "the live view needs a terminal of 10 lines and this one has 8; make it higher"
    ]


def test_no_colour_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    for colour in (True, False):
        if not colour:
            monkeypatch.setenv("NO_COLOR", "1")
        steps = Steps()
        with terminal(80, 24) as screen:
            written_under_a_view(screen, steps, monkeypatch, "text", 0)
            screen.settle()
            sent.append(screen.sent)
    styled = [re.findall(rb"\x1b\[[\d;]*m", each) for each in sent]
    assert styled[0]
    assert styled[1] == []


FIGURES = LastFigures(
    1234, 16, 1234.56, 3.25, 0.8125, 0.9375, 3.5 * (1 << 20), 0.25, 0.5, 0.125, 0.125, 0.4, None
)


def shown_rows(figures: LastFigures, memory: dict[str, int], columns: int) -> list[str]:
    return [row.plain for row in rows_of(figures, memory, columns)]


def test_rows_say_what_the_figures_are() -> None:
    assert shown_rows(FIGURES, MEMORY, 81) == [
        "-- the last 16 steps " + "-" * 59,
        "  1234 tokens   1234.6 ms a token  draft length  3.2  accepted  81%",
        "hit rate  94%  moved    3.50 MiB a token",
        "D" * 20 + "V" * 40 + "S" * 10 + "." * 10,
        "D draft  25%  V verify  50%  S stall  12%  . rest  12%  link busy  40%",
        "of it hidden    -",
        "memory 24 MiB:  slots 12 MiB  draft 8 MiB  kv cache 1 MiB",
    ]


@pytest.mark.parametrize("columns", [1, 10, 40, 41, 60, 80, 200])
def test_rows_are_narrower_than_the_terminal_and_as_many(columns: int) -> None:
    rows = shown_rows(FIGURES, MEMORY, columns)
    nothing = shown_rows(LastFigures(0, 0), MEMORY, columns)
    assert len(rows) == len(nothing)
    assert all(len(row) <= max(columns - 1, 1) for row in rows + nothing)
    if columns >= 40:  # whole words
        assert " ".join(" ".join(rows[1:]).split()).startswith("1234 tokens 1234.6 ms a token")
        assert "moved    3.50 MiB a token" in " ".join(rows)


def test_a_bar_is_as_wide_as_its_terminal() -> None:
    for width in (1, 7, 39, 79, 200):
        assert len(bar(FIGURES, width)) == width
    assert bar(LastFigures(1, 0), 40) == Text()


def test_small_items_of_memory_are_added_up() -> None:
    items = {"budget": 100, "host_records": 999, "a": 10, "b": 40, "c": 5, "d": 20, "e": 0, "f": 9}
    said = [item.plain for item in memory_items(items | {"g_h": 16})]
    assert said == ["memory 100 B:", "b 40 B", "d 20 B", "g h 16 B", "a 10 B", "others 14 B"]


def test_where_text_leaves_the_cursor() -> None:
    for text, at in (
        ("", 0), ("abc", 3), ("abc\n", 0), ("abc\r", 0), ("a\tb", 9), ("x" * 20, 20),
        ("x" * 21, 1), ("x" * 19 + "日", 2), ("日" * 10, 20), ("x" * 19 + "\t", 19),
        ("e\u0301", 1),
    ):  # fmt: skip
        column = TextColumn(20)
        column.write(text)
        assert (column.at, column.at_edge) == (at, at == 20), text


Folder = Callable[[str], Path]
ARGUMENTS = (
    *("--memory-budget", "2MiB", "--max-new-tokens", "40", "--ignore-eos", "--draft-length", "2"),
    *("--device", "cpu"),
)
# Nothing to weigh or to make: it loads fast.
ON_BUNDLED = (
    *("--memory-budget", "24MiB", "--max-new-tokens", "24", "--device", "cpu"),
    *("--draft", "none", "--codec", "raw", "--dense", "raw"),
)


def run_on(
    screen: Terminal, monkeypatch: pytest.MonkeyPatch, *arguments: object, stdin: str = ""
) -> list[str]:
    """The lines of a terminal that the command wrote both its streams to, without bars."""
    monkeypatch.setattr("speq.cli.options.SHOWN_AFTER_S", 3600.0)
    monkeypatch.setattr(sys, "argv", ["speq", *map(str, arguments)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    monkeypatch.setattr(sys, "stdout", screen.stream)
    monkeypatch.setattr(sys, "stderr", screen.stream)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code, screen.text
    return screen.text


@pytest.mark.parametrize("columns", [40, pytest.param(80, marks=pytest.mark.wide)])
def test_generate_on_a_terminal(
    columns: int, bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trained model: the text of a random one has control characters."""
    monkeypatch.setattr("speq.dashboard.terminal.EVERY_S", 0.0)
    arguments = ("generate", bundled, "--prompt", "hello there", "--echo", *ON_BUNDLED)
    texts = []
    for live in ((), ("--live",)):
        with terminal(columns, 24) as screen:
            lines = run_on(screen, monkeypatch, *arguments, *live)
            assert (b"ms a token" in screen.sent) == bool(live)
        # Figures of the run stand below, which differ by time.
        texts.append(lines[: next(at for at, line in enumerate(lines) if line.startswith("┌"))])
        assert "memory budget" in " ".join(lines[len(texts[-1]) :])
    assert texts[0] == texts[1]
    assert "".join(texts[0]).startswith("hello there")


def test_chat_on_a_terminal(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speq.dashboard.terminal.EVERY_S", 0.0)
    arguments = ("chat", bundled, *ON_BUNDLED)
    texts = []
    for live in ((), ("--live",)):
        with terminal(60, 24) as screen:
            stdin = "How do you do?\nAnd you?\n"
            lines = run_on(screen, monkeypatch, *arguments, *live, stdin=stdin)
            assert (b"ms a token" in screen.sent) == bool(live)
        # An answer's pace differs, and with its digits where lines end.
        texts.append(re.sub(r"[\d.]+mseach", "ms", "".join("".join(lines).split())))
    assert texts[0] == texts[1]
    assert texts[0].count("tokens,ms,") == 2


def test_standard_output_is_byte_for_byte_the_same(
    tiny: Folder, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    arguments = ("generate", tiny("qwen2_moe"), "--prompt", "hello", *ARGUMENTS)
    plain = command(*arguments)
    assert plain.code == 0
    piped = io.StringIO()
    with terminal(80, 24) as screen:
        monkeypatch.setattr(sys, "argv", ["speq", *map(str, arguments), "--live"])
        monkeypatch.setattr(sys, "stdout", piped)
        monkeypatch.setattr(sys, "stderr", screen.stream)
        with pytest.raises(SystemExit):
            cli.main()
        screen.settle()
        assert b"ms a token" in screen.sent
        assert screen.text[0].startswith("┌")  # nothing but the table behind the run
    assert piped.getvalue() == plain.out


def test_live_without_a_terminal_says_so(
    tiny: Folder, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    ended = command("generate", tiny("qwen2_moe"), "--prompt", "hello", *ARGUMENTS, "--live")
    assert ended.code == 0
    assert "ms a token" not in ended.err
    said = [record.getMessage() for record in caplog.records if "--live" in record.getMessage()]
    assert said == ["--live shows nothing: standard error is no terminal to show it on"]


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_live_and_quiet_are_refused_by_name(name: str, tiny: Folder, command: Command) -> None:
    prompt = ("--prompt", "hello") if name == "generate" else ()
    ended = command(name, tiny("qwen2_moe"), *prompt, *ARGUMENTS, "--live", "--quiet")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "error: --live and --quiet were both given; leave one of them out\n"
