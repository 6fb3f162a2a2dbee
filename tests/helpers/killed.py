"""A process that ends at a chosen moment."""

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any


class Killed:
    """Ends the process, as kill -9 does, at the n-th of the moments that it passes."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.passed = 0

    def patch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.passed += 1
            if self.passed == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(owner, name, counted)


def killed_at(at: int, moments: Sequence[tuple[Any, str]], work: Callable[[], object]) -> bool:
    """Do `work` in a process of its own, killed at its n-th call of any of these; whether it lived.

    moments  owner and name of each function
    """
    child = os.fork()
    if not child:
        try:
            killed = Killed(at)
            for owner, name in moments:
                killed.patch(owner, name)
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)
