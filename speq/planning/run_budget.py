"""What a run's options say of its memory: the budget to plan for, and the context of requests."""

import logging
from dataclasses import replace

from speq.config import DraftOptions, MemoryOptions
from speq.devices.device import Accelerator, Processor
from speq.errors import NoRoom, OptionError
from speq.files.atomic_file import make_folder
from speq.governor.draft_length import LONGEST, LONGEST_SECONDARY
from speq.machine import default_host_bytes
from speq.models.states import SNAPSHOTS
from speq.planning.demand import Budget, DeviceOverhead
from speq.planning.memory import MemoryPlan
from speq.units import format_bytes

logger = logging.getLogger("speq")

# Contexts grow in these steps, so that a chat does not lay its arenas out anew at every turn.
CONTEXT_STEP = 64


def run_budget(
    memory: MemoryOptions,
    drafts: DraftOptions,
    device: Processor | Accelerator,
    readers: int,
    graphs: bool,
    secondary: str | None = None,
) -> Budget:
    """The budget of a run, before its context is known.

    readers    threads that read
    graphs     whether passes are recorded where the device can
    secondary  the drafter besides the run's own

    Raises SpeqError for a host budget on the CPU, and for a prefix cache that cannot be written.
    """
    on_cpu = isinstance(device, Processor)
    check_host_budget(memory.host_budget, on_cpu)
    if memory.prefix_folder is not None:
        make_folder(memory.prefix_folder)
    budget = Budget(
        memory.memory_budget,
        CONTEXT_STEP,
        on_cpu,
        readers,
        longest_draft(drafts),
        batch_size=memory.max_batch,
        longest_side=0 if secondary is None else LONGEST_SECONDARY,
        snapshots=0 if memory.prefix_reuse == "none" else SNAPSHOTS,
    )
    if isinstance(device, Processor):
        return budget
    host_bytes = memory.host_budget or default_host_bytes()
    return replace(budget, beside=DeviceOverhead(host_bytes, device.overhead_bytes), graphs=graphs)


def longest_draft(drafts: DraftOptions) -> int:
    """Tokens of a draft at most, of a chain or a tree."""
    length = LONGEST if drafts.draft_length is None else drafts.draft_length
    return max(length, drafts.draft_nodes or 0) if length else 0


def check_host_budget(host_budget: int | None, on_cpu: bool) -> None:
    """Raise SpeqError for a host budget where there is one memory, and one budget."""
    if on_cpu and host_budget is not None:
        raise OptionError(
            "host_budget is given and the device is cpu, where experts lie in the memory of "
            "memory_budget or on the disk; leave it out"
        )


def first_context(fixed: int | None, longest: int, wanted: int, draft_nodes: int) -> int:
    """The context that memory is planned for first. Raises SpeqError beyond the model's limit.

    fixed   the option context_length; longest: the model's own limit
    wanted  tokens of the first request; 0 where that is not known
    """
    if fixed is not None and fixed > longest:
        raise OptionError(f"context_length is {fixed}; the model's limit is {longest}")
    return min(fixed or (wanted or CONTEXT_STEP) + draft_nodes, longest)


def check_context(context: int, fixed: int | None, longest: int) -> int:
    """The most tokens of a request. Raises SpeqError where it needs a longer context than that.

    fixed  the option context_length; longest: the model's own limit
    """
    limit = fixed or longest
    if context > limit:
        source = "context_length" if fixed else "the model's limit"
        raise OptionError(
            f"the prompt and max_new_tokens need a context of {context} tokens and {source} is "
            f"{limit}; shorten one of them"
        )
    return limit


def check_free_memory(plan: MemoryPlan, budget_bytes: int, device: Processor | Accelerator) -> None:
    """Raise SpeqError, or warn on the CPU, where the memory that is planned does not exist."""
    planned = sum(plan.items.values())
    free = device.free_bytes()
    on_cpu = isinstance(device, Processor)
    where = "here" if on_cpu else "on the GPU"
    if planned > free:
        sentence = (
            f"the run would take {format_bytes(planned)} of the memory budget and "
            f"{format_bytes(free)} are free {where}; give a smaller budget"
        )
        if not on_cpu:
            raise NoRoom(sentence)
        logger.warning("%s, or the system may end the run", sentence)
    elif budget_bytes > free:
        logger.warning(
            "the memory budget is %s and %s are free %s; a longer context may take what is not "
            "there: give a smaller budget, or a context_length",
            format_bytes(budget_bytes),
            format_bytes(free),
            where,
        )
