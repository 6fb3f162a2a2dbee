"""Waits that Ctrl-C can end: gloo's own waits block signals until they are over."""

import contextlib
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Answers = SimpleQueue[tuple[Any, BaseException | None]]

LOOK_S = 0.5
"""Longest delay of a signal that comes just before a wait begins."""


class Waiter:
    """A daemon thread that runs calls that cannot be interrupted. It ends with this object."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[Callable[[], Any], Answers] | None] = SimpleQueue()
        threading.Thread(target=work, args=[self._asked], name="stages", daemon=True).start()
        weakref.finalize(self, self._asked.put, None)

    def do(self, call: Callable[[], T]) -> T:
        """Run `call` in the thread; return its result or raise its error."""
        answers: Answers = SimpleQueue()
        self._asked.put((call, answers))
        while True:
            with contextlib.suppress(Empty):
                answer, error = answers.get(timeout=LOOK_S)
                break
        if error is not None:
            raise error
        result: T = answer
        return result

    def rest(self, wait_s: float) -> bool:
        """Wait until the thread is idle; return whether it is so in time."""
        answers: Answers = SimpleQueue()
        self._asked.put((lambda: None, answers))
        with contextlib.suppress(Empty):
            answers.get(timeout=wait_s)
            return True
        return False


def work(asked: SimpleQueue[tuple[Callable[[], Any], Answers] | None]) -> None:
    """Run the calls of a queue until it gives None."""
    while (job := asked.get()) is not None:
        call, answers = job
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))
        del job, call, answers
