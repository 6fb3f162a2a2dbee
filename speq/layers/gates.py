"""Gates: a family's rule for choosing experts by router logits, among the allowed ones.

Routers of transformers choose among all experts and return ids and weights. Under an expert budget
some rows choose again, among fewer experts, by the same rule (MoE-Spec, Eq. 8).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

# Lower bound on sums of weights, against division by 0.
LEAST = 1e-20


class RouterGate(Protocol):
    def shares(self, logits: Tensor) -> Tensor:
        """Map logits [T, E] to each row's shares of the experts, float32 [T, E]; rows sum to 1
        (MoE-Spec, Eq. 5, adds these up).
        """

    def choose(self, logits: Tensor, allowed: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Choose among `allowed` [E] bool, at least K experts. Return ids [T, K] int64 and weights
        [T, K].
        """


@dataclass(frozen=True, slots=True, eq=False)
class ScoreGate:
    """Gate of most routers: the K best scores, which are a softmax or sigmoid of logits.

    It ignores groups that a router would choose first: the allowed experts are such a choice
    already.

    sigmoid  scores are sigmoids of logits; otherwise their softmax
    divided  weights are divided by their sum
    scale    weights are multiplied by it
    bias     [E], added to scores to choose by, and not to weights
    added    added to the sum that weights are divided by
    factors  [E], factor of each expert's weight
    """

    sigmoid: bool = False
    divided: bool = False
    scale: float = 1.0
    bias: Tensor | None = None
    added: float = 0.0
    factors: Tensor | None = None

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.float().sigmoid() if self.sigmoid else logits.float().softmax(-1)

    def shares(self, logits: Tensor) -> Tensor:
        scores = self._scores(logits)
        return scores / scores.sum(-1, keepdim=True).clamp(min=LEAST) if self.sigmoid else scores

    def choose(self, logits: Tensor, allowed: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        scores = self._scores(logits)
        ranked = scores if self.bias is None else scores + self.bias.to(scores.device)
        ids = ranked.masked_fill(~allowed, float("-inf")).topk(top_k, -1).indices
        weights = scores.gather(-1, ids)
        if self.divided:
            weights = weights / (weights.sum(-1, keepdim=True) + self.added).clamp(min=LEAST)
        if self.factors is not None:
            weights = weights * self.factors.to(weights.device)[ids]
        return ids, weights * self.scale


@dataclass(frozen=True, slots=True)
class SparseMixer:
    """Gate that takes the best expert and then the next one, each weighed against those near it
    (https://huggingface.co/papers/2409.12136).

    jitter_eps  experts within twice this share of the best are near
    """

    jitter_eps: float

    def shares(self, logits: Tensor) -> Tensor:
        return logits.float().softmax(-1)

    def choose(self, logits: Tensor, allowed: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        among = logits.masked_fill(~allowed, float("-inf"))
        ids, weights = [], []
        for _ in range(top_k):
            best, at = among.max(-1, keepdim=True)
            behind = (best - logits) / logits.abs().clamp(min=best)
            near = among.masked_fill(behind > 2 * self.jitter_eps, float("-inf"))
            ids.append(at)
            weights.append(near.softmax(-1).gather(-1, at))
            among = among.scatter(-1, at, float("-inf"))
        return torch.cat(ids, -1), torch.cat(weights, -1)


# Builds the gate of a block from its router and the router's arguments besides hidden states.
GateOf = Callable[[Any, tuple[Tensor | None, ...]], RouterGate]


def softmax_gate(router: Any, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    """Softmax, divided by the sum if the configuration says so."""
    return ScoreGate(divided=bool(router.norm_topk_prob))


def normalized_gate(router: nn.Module, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    return ScoreGate(divided=True)


def deepseek_v2_gate(router: Any, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    """DeepSeek-V2: softmax, never divided."""
    return ScoreGate(scale=float(router.routed_scaling_factor))


def deepseek_v3_gate(router: Any, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    """DeepSeek-V3: sigmoids, with a bias for choosing."""
    return ScoreGate(
        sigmoid=True,
        divided=bool(router.norm_topk_prob),
        scale=float(router.routed_scaling_factor),
        bias=router.e_score_correction_bias,
    )


def gemma4_gate(router: Any, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    """Gemma 4: divided by the sum, then scaled by expert."""
    return ScoreGate(divided=True, factors=router.per_expert_scale)


def minimax_gate(router: nn.Module, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    (bias,) = router_inputs
    return ScoreGate(sigmoid=True, divided=True, bias=bias)


def lfm2_gate(router: Any, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    """LFM2: sigmoids, with an optional bias for choosing."""
    (bias,) = router_inputs
    return ScoreGate(
        sigmoid=True,
        divided=bool(router.norm_topk_prob),
        scale=float(router.routed_scaling_factor),
        bias=bias,
        added=1e-6,
    )


def ernie_gate(router: Any, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    return ScoreGate(divided=True, bias=router.moe_statics.e_score_correction_bias.squeeze())


def sparse_mixer(router: Any, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    return SparseMixer(float(router.router_jitter_noise))
