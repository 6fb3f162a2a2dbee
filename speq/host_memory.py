"""Memory of this machine that is free, and how much of it a run takes that is not told."""

import logging
import os
from pathlib import Path

from speq.control_groups import PROC, granted_bytes
from speq.errors import OptionError
from speq.units import format_bytes

logger = logging.getLogger("speq")

# Memory of Python, torch (its CPU build) and transformers, outside the budget; a test measures it.
PROCESS_BYTES = 448 << 20
# Share of the host's free memory that is taken where nothing is said: the rest is for programs
# beside this one.
HOST_SHARE = 0.8
# Budgets that are chosen here are multiples of it: profiles are kept by budget.
BUDGET_STEP = 256 << 20


class ChosenBytes(int):
    """A memory budget that was chosen here, so that a run may give some of it back."""


def available_bytes(proc: Path = PROC) -> int:
    """Host memory available without swapping, within the limits of the process's control groups.

    proc  the kernel's folder of processes
    """
    # macOS does not say what is free there: all of its memory counts.
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    free = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # not Linux
    granted = granted_bytes(proc)
    return free if granted is None else min(free, granted)


def free_budget() -> ChosenBytes:
    """The memory budget of a run that gives none, in bytes.

    Raises SpeqError for a machine with a GPU, whose memory it would be, and for one without room.
    """
    import torch  # takes seconds, and few commands come here

    if torch.cuda.is_available():
        raise OptionError(
            "memory_budget is auto, which takes the host's memory, and there is a GPU; give what "
            "the run may take of the GPU's memory, such as 8GiB"
        )
    free = available_bytes()
    budget = int(free * HOST_SHARE) - PROCESS_BYTES
    if budget < BUDGET_STEP:
        raise OptionError(
            f"memory_budget is auto and {format_bytes(free)} are free; give a memory_budget, or "
            "end other programs"
        )
    budget -= budget % BUDGET_STEP
    logger.info("memory budget: %s of %s that are free", format_bytes(budget), format_bytes(free))
    return ChosenBytes(budget)
