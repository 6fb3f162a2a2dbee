"""Where tables and sentences are shown: standard output, or standard error beside it."""

from rich.console import Console


def console(stderr: bool = False) -> Console:
    """Takes texts as they are. Shows no style at all where NO_COLOR is set, which rich reads: its
    own way is to leave bold and italics.
    """
    made = Console(stderr=stderr, markup=False, emoji=False)
    if not made.no_color:
        return made
    return Console(stderr=stderr, markup=False, emoji=False, color_system=None)
