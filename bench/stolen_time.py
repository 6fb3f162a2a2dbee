"""Processor time that a virtual machine asked for and its host gave to others.

A run that lost much of it says little of a system: repeat it.
"""

from dataclasses import dataclass
from pathlib import Path

from speq.stats import ratio

STAT = Path("/proc/stat")
# Columns of /proc/stat's first line (proc(5)); guests' time is within user and nice.
USER, NICE, SYSTEM, IRQ, SOFTIRQ, STEAL = 0, 1, 2, 5, 6, 7


@dataclass(frozen=True, slots=True)
class ProcessorTime:
    """Of all processors since the machine started, in the kernel's ticks."""

    used: int = 0
    stolen: int = 0

    @classmethod
    def now(cls, stat: Path = STAT) -> "ProcessorTime":
        """What the kernel counts; nothing where it does not tell, and on a machine of its own."""
        try:
            words = stat.read_text().split("\n", 1)[0].split()
        except OSError:
            return cls()
        if words[:1] != ["cpu"] or len(words) <= STEAL + 1:
            return cls()
        ticks = [int(count) for count in words[1:]]
        return cls(sum(ticks[at] for at in (USER, NICE, SYSTEM, IRQ, SOFTIRQ)), ticks[STEAL])

    def stolen_share(self, later: "ProcessorTime") -> float:
        """Of the time wanted between the two, the share that was given to others."""
        stolen = later.stolen - self.stolen
        return ratio(stolen, later.used - self.used + stolen) or 0.0
