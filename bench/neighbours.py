"""Busy loops beside a measurement: other programs compute too, on machines that people use."""

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

from speq.errors import present

P = ParamSpec("P")
R = TypeVar("R")

# Each says that it runs, and then does so until its parent's end of the pipe is closed or it is
# killed: none outlives a bench that was killed itself.
LOOP = """
import os, select, sys

from speq.errors import present
print("busy", flush=True)
while True:
    for _ in range(1_000_000):
        pass
    if select.select([sys.stdin], [], [], 0)[0]:
        break
"""


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run `count` processes, each a busy loop of one thread, during the block."""
    with ExitStack() as loops:
        for _ in range(count):
            loop = subprocess.Popen(
                [sys.executable, "-c", LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            loops.callback(end_loop, loop)
            present(loop.stdout, "a pipe was asked for").readline()  # it is busy from here on
        yield


def end_loop(loop: subprocess.Popen[bytes]) -> None:
    loop.kill()
    loop.communicate()


def beside_neighbours(run: Callable[P, R]) -> Callable[P, R]:
    """A bench's `run` beside as many neighbours as its settings say."""
    signature = inspect.signature(run)

    @wraps(run)
    def beside(*args: P.args, **kwargs: P.kwargs) -> R:
        settings = signature.bind(*args, **kwargs).arguments["settings"]
        with neighbours(settings.neighbours):
            return run(*args, **kwargs)

    return beside
