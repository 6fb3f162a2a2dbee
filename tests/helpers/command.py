"""The `speq` command, run in this process or in one of its own, and how it ended."""

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import typer

from speq import cli

# Processes that should have ended long before are taken for hung.
PATIENCE_S = 60


@dataclass(frozen=True)
class Ended:
    """How a run of the command ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]


def command_in_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Runs the command inside this process."""

    def run(*arguments: object, stdin: str = "") -> Ended:
        monkeypatch.setenv("COLUMNS", "200")  # tables and help in one piece
        monkeypatch.setattr(sys, "argv", ["speq", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Ended(code or 0, *capsys.readouterr())

    return run


def arguments_of(*arguments: object) -> list[str]:
    """The command line of a process of its own."""
    return [sys.executable, "-m", "speq", *map(str, arguments)]


def parse(words: tuple[str, ...]) -> None:
    """Parse a command as `speq` does, without running it. Raises what the parser raises."""
    command: Any = typer.main.get_command(cli.app)
    arguments = list(words)
    while hasattr(command, "commands"):
        name = arguments.pop(0)
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    command.make_context(words[0], arguments)
