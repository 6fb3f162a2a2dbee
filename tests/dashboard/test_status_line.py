"""The line below a text: the text stays what it is, and nothing is left of the line."""

import io
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from speq import cli
from speq.dashboard.status_line import StatusLine, format_figures
from speq.stats import StepStats
from tests.helpers.command import Command
from tests.helpers.terminal import Terminal, plainly, terminal

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
STEPS = [
    StepStats(
        "decode", start_s=1.0, end_s=3.0, emitted=3, draft_length=4, accepted=2, requests=10,
        hits=9, moved_bytes=6 << 20,
    ),
    StepStats(
        "decode", start_s=4.0, end_s=6.0, emitted=1, requests=10, hits=6, moved_bytes=2 << 20
    ),
]  # fmt: skip
LINE = "   1.0 tokens/s  draft  2.0  accepted  50%  moved    2.00 MiB/token  hits  75%"


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")


def pieces_of(text: str, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    at = 0
    while at < len(text):
        size = rng.choice([1, 1, 2, 3, 5, 8, 13, 40])
        yield text[at : at + size]
        at += size


def test_figures_are_averages_over_steps() -> None:
    assert format_figures(STEPS) == LINE
    assert format_figures([]) == (
        "     - tokens/s  draft    -  accepted    -  moved       - MiB/token  hits    -"
    )


@pytest.mark.parametrize(("columns", "lines"), [(40, 24), (80, 5), (100, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_the_text_stays_what_it_is(columns: int, lines: int, seed: int) -> None:
    with terminal(columns, lines) as screen:
        line = StatusLine(screen.stream, lambda: 0.0)
        for step in STEPS:
            line.note_step(step)
        seen = 0
        for piece in pieces_of(TEXT, seed):
            line.write(piece)
            seen += screen.text[-1] == LINE[: columns - 1].rstrip()
        line.close()
        assert screen.text == plainly(TEXT, columns, lines)
    assert seen > 20


def test_figures_change_now_and_then_and_begin_anew_with_a_prompt() -> None:
    now = [0.0]
    with terminal(100, 24) as screen:
        line = StatusLine(screen.stream, lambda: now[0])
        line.write("a")
        assert "- tokens/s" in screen.text[-1]
        line.note_step(STEPS[0])
        line.write("b")
        assert "- tokens/s" in screen.text[-1]
        now[0] = 0.25
        line.write("c")
        assert screen.text == ["abc", format_figures(STEPS[:1])]
        line.note_step(StepStats("prefill"))
        line.note_step(STEPS[1])
        now[0] = 0.5
        line.write("\n")
        assert screen.text == ["abc", "", format_figures(STEPS[1:])]
        line.close()
        assert screen.text == ["abc"]


# Nothing to weigh or to make: it loads fast.
ON_BUNDLED = (
    *("--memory-budget", "24MiB", "--max-new-tokens", "24", "--device", "cpu"),
    *("--draft", "none", "--codec", "raw", "--dense", "raw"),
)


def run_on(
    screen: Terminal, monkeypatch: pytest.MonkeyPatch, *arguments: object, stdin: str = ""
) -> list[str]:
    """The lines of a terminal that a command's standard output is."""
    monkeypatch.setattr(sys, "argv", ["speq", *map(str, arguments)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    monkeypatch.setattr(sys, "stdout", screen.stream)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code, screen.text
    return screen.text


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_commands_on_a_terminal(name: str, bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained model: the text of a random one has control characters."""
    prompt = ("--prompt", "hello there", "--echo") if name == "generate" else ()
    texts = []
    for live in ((), ("--live",)):
        with terminal(40, 24) as screen:
            arguments = (name, bundled, *prompt, *ON_BUNDLED, *live)
            texts.append(run_on(screen, monkeypatch, *arguments, stdin="How?\nAnd you?\n"))
            assert (b"tokens/s" in screen.sent) == bool(live)
    assert texts[0] == texts[1] != []


def test_live_without_a_terminal_says_so(
    bundled: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    ended = command("generate", bundled, "--prompt", "hello", *ON_BUNDLED, "--live")
    assert ended.code == 0
    assert "tokens/s" not in ended.out
    said = [record.getMessage() for record in caplog.records if "--live" in record.getMessage()]
    assert said == ["--live shows nothing: standard output is no terminal to show it on"]


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_live_and_quiet_are_refused_by_name(name: str, bundled: Path, command: Command) -> None:
    prompt = ("--prompt", "hello") if name == "generate" else ()
    ended = command(name, bundled, *prompt, *ON_BUNDLED, "--live", "--quiet")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "error: --live and --quiet were both given; leave one of them out\n"
