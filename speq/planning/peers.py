"""What further GPUs hold of a model, by their budgets and by which experts are used most."""

from collections.abc import Sequence

from speq.errors import NoRoom
from speq.planning.cost.peers import ALONE, Peers, dealt
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.demand import Budget
from speq.planning.memory import MAX_CHUNK, MIN_CHUNK, WORKSPACE_SHARE
from speq.planning.model_spec import ModelSpec
from speq.planning.used_experts import UsedExperts
from speq.scheduler.expert_key import ExpertKey
from speq.units import format_bytes


def peers_of(
    model_spec: ModelSpec, budgets: Sequence[int], used: UsedExperts, budget: Budget
) -> Peers:
    """budgets: bytes of each further GPU; budget: of the first

    Results of a layer's rows take what they do on the first GPU.
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
    taken = workspace(rows)
    if budget.beside is not None:
        taken += budget.beside.overhead((), False)
    room = tuple(size - taken for size in budgets)
    return Peers(room, rows, used.shares, shape.top_k, row_bytes)


def held_experts(plan: ResidencyPlan, peers: Peers, used: UsedExperts) -> list[list[ExpertKey]]:
    """The experts of each further GPU, as many of each layer as planned or as fit.

    Raises NoRoom for a budget that holds no expert of each layer.
    """
    room = peers.room(plan.slot_bytes, used.num_layers)
    for at, (fits, size) in enumerate(zip(room, peers.slots_bytes, strict=True)):
        if fits == 0:
            raise NoRoom(
                f"peer_budget leaves {format_bytes(max(size, 0))} of further GPU {at + 1} for "
                f"experts, and one of each layer takes "
                f"{format_bytes(used.num_layers * plan.slot_bytes)}; give it more, or leave it out"
            )
    held = [min(counts) for counts in zip(plan.peers, room, strict=True)]
    by_layer = [dealt(held, used.ranked(layer)) for layer in range(used.num_layers)]
    return [
        [ExpertKey(layer, expert) for layer, each in enumerate(by_layer) for expert in each[gpu]]
        for gpu in range(len(held))
    ]
