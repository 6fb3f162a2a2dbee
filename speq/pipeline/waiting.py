"""Waits that Ctrl-C can end: gloo's own waits block signals until they are over."""

import contextlib
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

LOOK_S = 0.5
"""Longest delay of a signal that comes just before a wait begins."""


class Waiter:
    """A daemon thread that runs calls that cannot be interrupted."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]]] = SimpleQueue()
        threading.Thread(target=self._work, name="stages", daemon=True).start()

    def do(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread; return its result or raise its error."""
        answers: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
        self._asked.put((work, answers))
        while True:
            with contextlib.suppress(Empty):
                answer, error = answers.get(timeout=LOOK_S)
                break
        if error is not None:
            raise error
        return answer  # type: ignore[return-value]

    def rest(self, wait_s: float) -> bool:
        """Wait until the thread is idle; return whether it is so in time."""
        answers: SimpleQueue[Any] = SimpleQueue()
        self._asked.put((lambda: None, answers))
        with contextlib.suppress(Empty):
            answers.get(timeout=wait_s)
            return True
        return False

    def _work(self) -> None:
        while True:
            work, answers = self._asked.get()
            try:
                answers.put((work(), None))
            except BaseException as error:
                answers.put((None, error))
            del work, answers
