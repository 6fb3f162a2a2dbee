"""`speq bench NAME`: measurements, each printed as a table and written as one JSON object."""

import typer

bench_app = typer.Typer(
    help="Measure. Every bench prints a table; --json FILE keeps it.", no_args_is_help=True
)


@bench_app.callback()
def bench() -> None:
    """Measure. Every bench prints a table; --json FILE keeps it."""
