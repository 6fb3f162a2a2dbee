"""Room of further GPUs for exact experts."""

from collections.abc import Sequence

from speq.planning.cost.peers import ALONE, Peers
from speq.planning.demand import Budget
from speq.planning.memory import MAX_CHUNK, MIN_CHUNK, WORKSPACE_SHARE
from speq.planning.model_spec import ModelSpec
from speq.planning.used_experts import UsedExperts


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
    taken = workspace(rows)
    if budget.beside is not None:
        taken += budget.beside.overhead((), False)
    room = tuple(size - taken for size in budgets)
    return Peers(room, rows, used.shares, shape.top_k, row_bytes)
