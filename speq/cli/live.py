"""`--live` of the commands that write text: whether it can be shown, and the view itself."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from speq.errors import SpeqError
from speq.options.declared import Option
from speq.options.kinds import Switch

if TYPE_CHECKING:
    from speq.dashboard.terminal import Wrote
    from speq.generator import Generator

logger = logging.getLogger("speq")

Live = Annotated[
    bool,
    Option(
        "Show below the text, while it comes, how fast it comes and where the time goes. Needs "
        "standard error to be a terminal.",
        Switch(),
    ),
]


def check_live(live: bool, quiet: bool) -> bool:
    """Whether the view is shown. Says so where it was asked for and there is no terminal.

    Raises SpeqError where nothing but results was asked for as well.
    """
    if not live:
        return False
    if quiet:
        raise SpeqError("--live and --quiet were both given; leave one of them out")
    from speq.dashboard.terminal import is_terminal

    if not is_terminal():
        logger.warning("--live shows nothing: standard error is no terminal to show it on")
        return False
    return True


@contextmanager
def live_view(generator: "Generator", live: bool) -> "Iterator[Wrote]":
    """The view of what is generated in this block, which tells of each text it writes."""
    if not live:
        yield lambda text: None
        return
    from speq.dashboard.terminal import shown

    with shown(generator.runtime.recorder) as wrote:
        yield wrote
