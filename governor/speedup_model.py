"""MoESD: the speed-up of speculation by batch size (Huang et al., NeurIPS 2025).

N(t) assumes that tokens choose experts independently; real routes share more. If routes were
measured, their counts replace N(t), and both are reported.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from speq.errors import SpeqError


def activated_experts(num_experts: int, top_k: float, tokens: float) -> float:
    """N(t) = E (1 - (1 - K/E)^t): distinct experts of a layer that t independent tokens choose."""
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def target_efficiency(single_s: float, verify_s: float) -> float:
    """T_T(B, 1) / T_T(B, gamma): time of a pass over one token over that of a verification.

    1: verification is free.
    """
    return single_s / verify_s


@dataclass(frozen=True, slots=True)
class DistinctExperts:
    """Distinct experts of a layer by number of tokens, by N(t) and as measured.

    measured  (tokens, distinct experts) in rising order; empty without routes
    """

    num_experts: int
    top_k: int
    measured: tuple[tuple[int, float], ...] = ()

    def independent(self, tokens: int) -> float:
        return activated_experts(self.num_experts, self.top_k, tokens)


def distinct_of_routes(
    routes: Sequence[Sequence[Sequence[int]]], num_experts: int, longest: int
) -> DistinctExperts:
    """Count distinct experts of windows of 1 to `longest` tokens, averaged over windows and layers.

    Windows do not overlap.

    routes  expert ids by layer and token
    """
    if not routes or len(routes[0]) < longest:
        raise SpeqError(
            f"windows of {longest} tokens were asked for and there are "
            f"{len(routes[0]) if routes else 0}; record longer routes"
        )
    measured = []
    for tokens in range(1, longest + 1):
        counts = [
            len({expert for chosen in layer[at : at + tokens] for expert in chosen})
            for layer in routes
            for at in range(0, len(layer) - tokens + 1, tokens)
        ]
        measured.append((tokens, sum(counts) / len(counts)))
    return DistinctExperts(num_experts, len(routes[0][0]), tuple(measured))
