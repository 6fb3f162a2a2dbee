"""One budget for everything on the device, item by item; exact-expert slots get what is left."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from speq.errors import NoRoom
from speq.units import format_bytes

MIN_SLOTS = 2
MIN_CHUNK = 16
MAX_CHUNK = 4096
# Of prompts that others wait for between their steps.
MAX_CHUNK_BESIDE = 512
# Prompts are run in the longest chunks whose activations take no more than this share, or than what
# all slots would leave, and leave room for the fewest slots.
WORKSPACE_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class Demand:
    """What a model asks of memory.

    loading_bytes  what loading the weights takes beside them, before anything else is laid out
    draft_bytes    of the INT4 copy of all experts, and codes of other layers; 0: none is held
    kv_bytes_per_token  of the contexts of all sequences together
    state_bytes    of the same, what layers keep however long a sequence is
    batch_size     sequences that run as one batch, at most
    reading_bytes  what transfers take beside the slots they fill
    slot_bytes     one expert's, with what alignment adds
    head_bytes     of the head that drafts; 0: none does
    workspace      (rows of a pass, tokens attended over) -> bytes of activations
    overhead       tokens of context -> what a device takes beyond all tensors; None on the CPU
    graphs         tokens attended over -> bytes that recorded passes keep; None: there are none
    """

    non_expert_bytes: int
    loading_bytes: int
    draft_bytes: int
    kv_bytes_per_token: int
    reading_bytes: int
    slot_bytes: int
    num_experts: int
    workspace: Callable[[int, int], int]
    batch_size: int = 1
    overhead: Callable[[int], int] | None = None
    graphs: Callable[[int], int] | None = None
    head_bytes: int = 0
    state_bytes: int = 0


class BudgetTooSmall(NoRoom):
    """needed_bytes: the smallest budget that would do for that context."""

    def __init__(self, sentence: str, needed_bytes: int) -> None:
        super().__init__(sentence)
        self.needed_bytes = needed_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a budget is spent. chunk: tokens of a prompt run at a time; context: tokens of KV."""

    budget: int
    context: int
    chunk: int
    slots: int
    items: dict[str, int]

    @property
    def slot_bytes(self) -> int:
        return self.items["slots"] // self.slots

    @property
    def bytes_beside_slots(self) -> int:
        return sum(self.items.values()) - self.items["slots"]

    def least_budget(self, num_experts: int) -> int:
        """The smallest budget of the same run: with the fewest slots."""
        return self.bytes_beside_slots + min(MIN_SLOTS, num_experts) * self.slot_bytes

    def slots_in(self, budget: int, num_experts: int) -> int:
        """Slots of the same run within another budget."""
        return min((budget - self.bytes_beside_slots) // self.slot_bytes, num_experts)

    def with_slots(self, budget: int, slots: int) -> "MemoryPlan":
        """The plan of the same run with more or fewer slots."""
        items = self.items | {"slots": slots * self.slot_bytes}
        return replace(self, budget=budget, slots=slots, items=items)

    def report(self) -> dict[str, int]:
        """The items in bytes, with the budget and what is left of it."""
        return {
            "budget": self.budget,
            **self.items,
            "unused": self.budget - sum(self.items.values()),
        }


def plan_memory(demand: Demand, budget: int, context: int) -> MemoryPlan:
    """Spend `budget` bytes on a context of so many tokens.

    Raises BudgetTooSmall, item by item, where it leaves fewer than two slots.
    """
    fewest = min(MIN_SLOTS, demand.num_experts)
    loading = demand.non_expert_bytes + demand.loading_bytes
    items = {
        "non_expert_weights": demand.non_expert_bytes,
        "draft": demand.draft_bytes,
        "kv_cache": context * demand.kv_bytes_per_token + demand.state_bytes,
        "read_buffers": demand.reading_bytes,
    }
    if demand.head_bytes:
        items["head"] = demand.head_bytes
    if demand.overhead is not None:
        items["device_overhead"] = demand.overhead(context)
    if demand.graphs is not None:
        items["graphs"] = demand.graphs(context)
    room = budget - sum(items.values()) - fewest * demand.slot_bytes
    spare = room - (demand.num_experts - fewest) * demand.slot_bytes
    chunk = _chunk(demand, min(room, max(budget * WORKSPACE_SHARE, spare)), context)
    items["workspace"] = demand.workspace(chunk, context)
    slots = min((budget - sum(items.values())) // demand.slot_bytes, demand.num_experts)
    if slots >= fewest and loading <= budget:
        items["slots"] = slots * demand.slot_bytes
        return MemoryPlan(budget, context, chunk, slots, items)
    items["slots"] = fewest * demand.slot_bytes
    needed = max(sum(items.values()), loading)
    listed = ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in items.items() if size
    )
    if needed > sum(items.values()):
        listed += f", and loading weights that are converted or encoded {format_bytes(loading)}"
    contexts, less = f"a context of {context} tokens", "with a shorter context"
    if demand.batch_size > 1:
        contexts = f"{demand.batch_size} contexts of {context} tokens"
        less = "with a shorter context or a smaller max_batch"
    raise BudgetTooSmall(
        f"memory budget {format_bytes(budget)} is too small for {contexts}: it takes {listed} (at "
        f"the least); the smallest workable budget is {needed} bytes ({format_bytes(needed)}), or "
        f"less {less}",
        needed,
    )


def _chunk(demand: Demand, room: float, context: int) -> int:
    chunk = MIN_CHUNK
    while chunk < min(context, MAX_CHUNK if demand.batch_size == 1 else MAX_CHUNK_BESIDE):
        chunk *= 2
    while chunk > MIN_CHUNK and demand.workspace(chunk, context) > room:
        chunk //= 2
    return chunk
