"""The benches of the lab, by what their modules call themselves."""

from functools import cache
from typing import Any

import typer

from bench.lab.command import app_of
from tests.helpers.paths import ROOT

MODULES = sorted((ROOT / "bench" / "lab").glob("*.py"))
NAMES = [path.stem for path in MODULES if f'main("{path.stem}")' in path.read_text("utf-8")]


@cache
def lab_commands() -> dict[str, Any]:
    """The command line of each."""
    return {name: typer.main.get_command(app_of(name)) for name in NAMES}
