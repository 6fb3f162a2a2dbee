"""`--live` of the commands that write text."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from speq.errors import OptionError
from speq.options.declared import Option
from speq.options.kinds import Switch

if TYPE_CHECKING:
    from speq.generator import Generator

logger = logging.getLogger("speq")

Live = Annotated[
    bool,
    Option(
        "Show a line below the text, while it comes: pace, drafts, experts moved. Needs standard "
        "output to be a terminal.",
        Switch(),
    ),
]


def check_live(live: bool, quiet: bool) -> bool:
    """Return whether the line is shown. Warn where it was asked for and there is no terminal.

    Raises SpeqError where nothing but results was asked for as well.
    """
    if not live:
        return False
    if quiet:
        raise OptionError("--live and --quiet were both given; leave one of them out")
    from speq.dashboard.status_line import is_terminal

    if not is_terminal():
        logger.warning("--live shows nothing: standard output is no terminal to show it on")
        return False
    return True


@contextmanager
def text_writer(generator: "Generator", live: bool) -> Iterator[Callable[[str], None]]:
    """What writes text to standard output, with a line below it if it is live."""
    if not live:
        yield write_text
        return
    from speq.dashboard.status_line import status_line

    with status_line(generator.runtime.recorder) as line:
        yield line.write


def write_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
