"""Gives a terminal back before a signal ends or stops the process."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from speq.dashboard.bottom_rows import BottomRows

# What a shell says of a process that a signal ended is this and the signal's number.
ENDED_BY_SIGNAL = 128


def end(number: int, frame: FrameType | None) -> None:
    """Leave all blocks in order, so that each gives back what it holds."""
    raise SystemExit(ENDED_BY_SIGNAL + number)


@contextmanager
def given_back(rows: BottomRows) -> Iterator[None]:
    """In this block SIGTERM ends the process in order, and SIGTSTP (Ctrl-Z) stops it without rows.

    They are drawn again when the process goes on. Signals that are ignored, or that somebody else
    waits for, are left alone, and so are all of them outside the main thread.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        if rows.drawing:
            # A stream does not take a write in the midst of another one.
            rows.when_drawn = lambda: stop(number, None)
            return
        rows.close()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        # Here the process goes on, below what the shell wrote meanwhile.
        signal.signal(number, stop)
        rows.text.at = 0

    handlers = {signal.SIGTERM: end, signal.SIGTSTP: stop}
    taken = [
        number
        for number in handlers
        if threading.current_thread() is threading.main_thread()
        and signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in taken:
        signal.signal(number, handlers[number])
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def in_foreground(rows: BottomRows) -> bool:
    """Whether the shell has left its terminal to this process."""
    try:
        return os.tcgetpgrp(rows.stream.fileno()) == os.getpgrp()
    except OSError:  # a terminal that no shell controls us by
        return True
