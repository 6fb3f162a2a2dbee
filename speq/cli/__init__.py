"""The `speq` command. Heavy imports wait until a command runs."""

import logging
import sys
from difflib import get_close_matches
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from speq.cli.batch import batch
from speq.cli.bench import bench_app
from speq.cli.cache import cache_app
from speq.cli.chat import chat
from speq.cli.dashboard import dashboard
from speq.cli.demo import demo
from speq.cli.doctor import doctor
from speq.cli.from_dataclass import command
from speq.cli.generate import generate
from speq.cli.options import broken_pipe
from speq.cli.pack import pack
from speq.cli.plan import plan
from speq.cli.profile import profile
from speq.cli.prove import prove
from speq.cli.quantize import quantize
from speq.cli.report import report
from speq.cli.serve import serve
from speq.cli.stage import stage
from speq.cli.train_head import train_head
from speq.cli.tune import tune
from speq.errors import Broken, SpeqError

# What other programs, or earlier versions, have as commands of their own.
ELSEWHERE = {
    "check": "`speq prove --minutes 0` compares a model with transformers, a pack with checksums",
    "pull": "a command that is given a hub id downloads the model",
    "list": "`speq cache list` shows what speq keeps on the disk",
    "rm": "`speq cache clear` removes what speq keeps on the disk",
}


class Commands(TyperGroup):
    """The commands; one that there is not is answered with the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, known = args[0], self.list_commands(ctx)
        unknown = self.get_command(ctx, name) is None and not name.startswith("-")
        if unknown and not ctx.resilient_parsing:  # as of completion
            near = [each for each in known if name and each.startswith(name)]
            near = near or get_close_matches(name, known)
            hint = f"did you mean {' or '.join(near)}?" if near else "--help lists the commands"
            ctx.fail(f"there is no command {name!r:.80}; {ELSEWHERE.get(name, hint)}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="speq",
    cls=Commands,
    help="Run Mixture-of-Experts models larger than memory, with exactly the full model's output.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
MEASURE, FILES = "Measure", "Model files"
PANELS = {
    "Begin": (demo, plan, doctor),
    "Generate text": (generate, chat, serve, batch, stage),
    "Compare with the full model": (prove,),
    MEASURE: (tune, profile, report, dashboard),
    FILES: (pack, quantize, train_head),
}
for panel, functions in PANELS.items():
    for function in functions:
        name = function.__name__.replace("_", "-")
        app.command(name, rich_help_panel=panel)(command(function))
# As other programs that run models call it.
app.command("run", hidden=True)(command(chat))
app.add_typer(cache_app, name="cache", rich_help_panel=FILES)
app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)


def _show_version(wanted: bool) -> None:
    if wanted:
        from speq.version import installed

        typer.echo(installed())
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Run Mixture-of-Experts models larger than memory, with exactly the full model's output."""


def main(app: typer.Typer = app) -> None:
    """Run a command line; errors are one sentence on stderr and exit status 1."""
    logging.basicConfig(format="speq: %(message)s", level=logging.WARNING)
    logging.getLogger("speq").setLevel(logging.INFO)
    if sys.stdout is None:  # closed by who started us
        fail("standard output is closed; send it to a file, or to /dev/null")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except SpeqError as error:
        fail(str(error))
    except Broken as error:
        fail(f"{error}; this is a fault of speq: please report it, with the command")
    except BrokenPipeError as error:
        broken_pipe()
        fail(f"input or output failed: {error}")
    except UnicodeError as error:
        fail(f"{error}; the terminal or file is not in UTF-8")
    except OSError as error:
        fail(f"input or output failed: {error}")


def fail(sentence: str) -> NoReturn:
    print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(1)
