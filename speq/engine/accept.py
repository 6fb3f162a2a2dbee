"""Accepts the drafted tokens that the exact model, greedy or sampled, chooses itself.

So the output is the exact model's own, token for token.
"""

from collections.abc import Callable, Container

from torch import Tensor

from speq.engine.draft import Draft, Outcome
from speq.engine.request import Request
from speq.engine.sampler import HostSampler, Sampler


def accept(
    draft: Draft,
    logits: Tensor,
    request: Request,
    sampler: Sampler | None = None,
    active_rows: Container[int] | None = None,
) -> Outcome:
    """Walk down the draft from the pending token as far as the exact model agrees.

    logits       [N + 1, V] of the exact model at the draft's nodes
    sampler      chooses on the logits' device; None: in host memory
    active_rows  nodes that were not pruned, whose logits are the exact model's; None: all
    """
    outcome = walk(draft, (sampler or HostSampler()).choices(draft, logits, request), active_rows)
    if request.logprobs is not None:
        request.logprobs.note(logits, outcome)
    return outcome


def walk(
    draft: Draft, choice: Callable[[int], int], active_rows: Container[int] | None = None
) -> Outcome:
    """Walk down the draft. choice: returns the exact model's token after a node of the path"""
    path: list[int] = [0]
    tokens: list[int] = []
    while True:
        tokens.append(choice(path[-1]))
        children = [c for c in draft.children(path[-1]) if active_rows is None or c in active_rows]
        matching = [c for c in children if draft.token_ids[c - 1] == tokens[-1]]
        if not matching:
            return Outcome(path, tokens)
        path.append(matching[0])
