"""An event loop whose clock leaps to the next timer when there is nothing to do: nobody waits."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

# Real time in which a thread that works has long said something.
HANG_S = 60.0


def nobody() -> bool:
    return False


class AtOnce(ThreadPoolExecutor):
    """Does what it is given at once, where it is given."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class LeapingLoop(asyncio.SelectorEventLoop):
    """busy: whether another thread works, which will wake the loop; its clock stands still then"""

    def __init__(self, busy: Callable[[], bool] = nobody) -> None:
        self.now = 0.0
        super().__init__()
        own = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None) -> Any:
            events = own(0)
            if not events and timeout != 0 and busy():
                events = own(HANG_S)
                assert events, "a thread works, and says nothing"
            elif not events:
                assert timeout is not None, "nothing would ever happen"
                self.now += timeout
            return events

        self._selector.select = select  # type: ignore[attr-defined]
        self.set_default_executor(AtOnce())

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Nothing is under way."""

    def time(self) -> float:
        return self.now


def leaping(main: Coroutine[Any, Any, None], busy: Callable[[], bool] = nobody) -> None:
    """Run to its end without waiting for anything but a busy thread."""
    with asyncio.Runner(loop_factory=partial(LeapingLoop, busy)) as runner:
        runner.run(main)
