"""Room of further GPUs for exact experts."""

from collections.abc import Sequence

from speq.errors import NoRoom, OptionError
from speq.planning.cost.peers import ALONE, Peers
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.demand import Budget
from speq.planning.memory import MAX_CHUNK, MIN_CHUNK, WORKSPACE_SHARE
from speq.planning.model_spec import ModelSpec
from speq.planning.used_experts import UsedExperts
from speq.units import format_bytes


def peers_of(
    model_spec: ModelSpec, budgets: Sequence[int], used: UsedExperts, budget: Budget
) -> Peers:
    """Divide the budgets of further GPUs between slots and what computing takes beside them.

    budgets  bytes of each; budget: of the first GPU
    """
    if not budgets:
        return ALONE
    shape, size = model_spec.shape, model_spec.dtype.itemsize
    codec, experts = model_spec.codec, shape.experts
    row_bytes = shape.hidden_size * size
    row = (1 + 2 * shape.top_k) * row_bytes + 4 * experts.expert_width * size

    def workspace(rows: int) -> int:
        words = codec.shape.dtype
        decoded = experts.weights * words.itemsize
        return rows * row + shape.gpu_kernel_bytes(rows, model_spec.dtype, words, decoded)

    rows = MAX_CHUNK
    while rows > MIN_CHUNK and workspace(rows) > min(budgets) * WORKSPACE_SHARE:
        rows //= 2
    layers = len(experts.layers) if experts.biased else 0
    biases = [
        experts.num_experts * columns * size
        for _ in range(layers)
        for columns in (2 * experts.expert_width, shape.hidden_size)
    ]
    taken = workspace(rows) + sum(biases)
    if budget.beside is not None:
        taken += budget.beside.overhead(biases, False)
    room = tuple(size - taken for size in budgets)
    return Peers(room, rows, used.shares, shape.top_k, row_bytes)


def check_room(peers: Peers, slot_bytes: int, num_layers: int) -> None:
    """Raise SpeqError where some further GPU would hold no expert of each layer."""
    count, most = len(peers.slots_bytes), len(peers.covers) - 2
    if count > most:
        raise OptionError(
            f"peer_budget names {count} further GPUs, and a layer has {most + 1} experts, of which "
            f"the first GPU keeps one; name {most} at most"
        )
    for at, fits in enumerate(peers.room(slot_bytes, num_layers)):
        if fits == 0:
            raise NoRoom(
                f"peer_budget leaves {format_bytes(max(peers.slots_bytes[at], 0))} of further GPU "
                f"{at + 1} for experts, and one of each layer takes "
                f"{format_bytes(num_layers * slot_bytes)}; give it more, or leave it out"
            )


def ways_with(
    peers: Peers, ways: Sequence[ResidencyPlan], num_layers: int
) -> Sequence[ResidencyPlan]:
    """Those of the ways to hold experts in which further GPUs can hold some, and run them.

    Raises SpeqError where there is none.
    """
    if not peers.slots_bytes or not ways:
        return ways
    alone = [way for way in ways if not way.needs_draft]
    if not alone:
        raise OptionError(
            f"peer_budget is given and experts of codec {ways[0].codec} are read over a draft's "
            "codes, which the first GPU has; leave peer_budget out, or take another codec"
        )
    found = [way for way in alone if all(peers.room(way.slot_bytes, num_layers))]
    if not found:
        check_room(peers, min(way.slot_bytes for way in alone), num_layers)
    return found
