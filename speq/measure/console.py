"""Consoles for tables and sentences: standard output or standard error."""

from rich.console import Console


def console(stderr: bool = False) -> Console:
    """Make a console without markup, and without any style if NO_COLOR is set.

    rich itself keeps bold and italics then.
    """
    made = Console(stderr=stderr, markup=False, emoji=False)
    if not made.no_color:
        return made
    return Console(stderr=stderr, markup=False, emoji=False, color_system=None)
