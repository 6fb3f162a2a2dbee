"""Which drafted tokens stand: the rule that keeps output exactly that of the exact model.

Greedy: a token stands where the exact model would have chosen it. Sampled: rejection sampling
(Leviathan et al., arXiv:2211.17192, Alg. 1), for trees child by child, each rejection taking the
child's distribution out of what is left (SpecInfer, arXiv:2305.09781, section 4.3).
"""

import torch
from torch import Tensor

from speq.sampling import distribution, draw, greedy
from speq.sequence import Draft, Outcome, Sequence


def accept(draft: Draft, logits: Tensor, sequence: Sequence) -> Outcome:
    """Walk down the draft from the pending token as far as the exact model agrees.

    logits  [N + 1, V] of the exact model at the draft's nodes
    """
    if sequence.sampling.greedy:
        return accept_greedy(draft, greedy(logits))
    return accept_sampled(draft, distribution(logits, sequence.sampling), sequence.rng)


def accept_greedy(draft: Draft, chosen: list[int]) -> Outcome:
    """chosen[i]: the exact model's choice after node i."""
    path = [0]
    while True:
        wanted = chosen[path[-1]]
        matching = [c for c in draft.children(path[-1]) if draft.token_ids[c - 1] == wanted]
        if not matching:
            break
        path.append(matching[0])
    return Outcome(path, [chosen[node] for node in path])


def accept_sampled(draft: Draft, probs: Tensor, rng: torch.Generator) -> Outcome:
    """probs [N + 1, V]: the exact model's distribution after each node."""
    path: list[int] = [0]
    tokens: list[int] = []
    while True:
        target = probs[path[-1]]
        for child in draft.children(path[-1]):
            token = draft.token_ids[child - 1]
            proposal = None if draft.probs is None else draft.probs[child - 1]
            odds = target[token] if proposal is None else target[token] / proposal[token]
            if torch.rand((), generator=rng) < odds:
                path.append(child)
                tokens.append(token)
                break
            target = _without(target, token, proposal)
        else:
            return Outcome(path, [*tokens, draw(target, rng)])


def _without(target: Tensor, token: int, proposal: Tensor | None) -> Tensor:
    """What is left of `target` once a token drawn from `proposal` was rejected."""
    if proposal is None:
        left = target.clone()
        left[token] = 0
    else:
        left = (target - proposal).clamp(min=0)
    total = left.sum()
    # Equal distributions leave nothing but rounding errors, and reject nothing but by them.
    return left / total if total > 0 else target
