"""Says when a run gives memory back to a machine that runs short of it, and takes it again."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from speq.control_groups import PROC, memory_stalls
from speq.errors import OptionError
from speq.host_memory import BUDGET_STEP, ChosenBytes, available_bytes
from speq.machine import machine_memory_bytes
from speq.units import Clock, format_bytes

# Between two looks, between two times that memory is given back for stalls (which the kernel tells
# of ten seconds), and after which memory is taken again.
LOOK_S, STALL_S, QUIET_S = 1.0, 10.0, 30.0
# Of slots: memory comes back by and by.
WORTH = 1.125
# Of the time, from which on a machine is short of memory.
STALLED_PERCENT = 10.0
# Of the first budget: less free memory is too little. A budget that is chosen leaves four times as
# much.
LEAST_FREE_SHARE = 1 / 16


@dataclass(slots=True)
class MemoryWatch:
    """Watches the memory that is free beside a run whose budget was chosen for it.

    most  the budget at first, which is not exceeded
    proc  the kernel's folder of processes
    """

    most: int
    proc: Path = PROC
    clock: Clock = time.monotonic
    _looked_s: float = field(default=-math.inf, init=False)
    _short_s: float = field(default=-math.inf, init=False)

    def budget(self, present: int) -> int:
        """Return the budget that follows the present one, in bytes; most often it is the same."""
        now_s = self.clock()
        if now_s < self._looked_s + LOOK_S:
            return present
        self._looked_s = now_s
        least = int(self.most * LEAST_FREE_SHARE)
        free = available_bytes(self.proc)
        if free < least or self._stalls(now_s):
            self._short_s = now_s
            return max(present - max(2 * least - free, int(present * LEAST_FREE_SHARE)), 0)
        # Half of what is free beyond twice the least, so that it does not swing.
        spare = (free - 2 * least) // 2
        if now_s < self._short_s + QUIET_S or spare < BUDGET_STEP:
            return present
        return min(present + spare, self.most)

    def _stalls(self, now_s: float) -> bool:
        told = now_s >= self._short_s + STALL_S  # else it may be of before
        return told and memory_stalls(self.proc) >= STALLED_PERCENT


@dataclass(slots=True)
class LiveBudget:
    """The budget of a loaded run, which may change.

    wanted  bytes that the next step follows
    watch   changes it; None: only who asks does
    """

    wanted: int
    watch: MemoryWatch | None = None

    @classmethod
    def of(cls, budget_bytes: int, on_cpu: bool) -> "LiveBudget":
        """Watch a budget that was chosen for the run."""
        watched = on_cpu and isinstance(budget_bytes, ChosenBytes)
        return cls(budget_bytes, MemoryWatch(budget_bytes) if watched else None)

    def ask(self, budget_bytes: int, least: int) -> None:
        """Follow another budget, and watch it no more. Any thread may ask.

        Raises OptionError for less than `least`, and for more than the machine has.
        """
        most = machine_memory_bytes()
        if not least <= budget_bytes <= most:
            raise OptionError(
                f"memory_budget is {format_bytes(budget_bytes)}; what is loaded needs "
                f"{format_bytes(least)} ({least} bytes) at the least, and this machine has "
                f"{format_bytes(most)}"
            )
        self.watch, self.wanted = None, budget_bytes

    def next(self, least: int) -> int:
        """The budget of the next step, at least so many bytes."""
        if self.watch is not None:
            self.wanted = max(self.watch.budget(self.wanted), least)
        return self.wanted

    @property
    def worth_laying_out(self) -> float:
        """Times the slots that are laid out: more are worth laying all of them out anew, which
        loses experts and KV caches.
        """
        return 1.0 if self.watch is None else WORTH
