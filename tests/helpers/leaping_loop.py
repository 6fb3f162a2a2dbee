"""An event loop whose clock leaps to the next timer when there is nothing to do: nobody waits."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class LeapingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        super().__init__()
        own = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None) -> Any:
            events = own(0)
            if not events:
                assert timeout is not None, "nothing would ever happen"
                self.now += timeout
            return events

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


def leaping(main: Coroutine[Any, Any, None]) -> None:
    """Run to its end without waiting."""
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        runner.run(main)
