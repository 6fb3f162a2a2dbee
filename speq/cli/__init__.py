"""The `speq` command. Heavy imports wait until a command runs."""

import logging
import sys
from typing import Annotated, NoReturn

import typer

from speq.cli.batch import batch
from speq.cli.bench import bench_app
from speq.cli.cache import cache_app
from speq.cli.chat import chat
from speq.cli.check import check
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

app = typer.Typer(
    name="speq",
    help="Run Mixture-of-Experts models larger than memory, with exactly the full model's output.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = (
    *(generate, chat, batch, serve, stage, profile, report, dashboard),
    *(check, prove, pack, quantize, train_head, plan, tune, doctor, demo),
)
for function in COMMANDS:
    app.command(function.__name__.replace("_", "-"))(command(function))
# As other programs that run models call it.
app.command("run", hidden=True)(command(chat))
app.add_typer(cache_app, name="cache")
app.add_typer(bench_app, name="bench")


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
