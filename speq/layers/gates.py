"""How a family's router chooses experts by its logits, among those that may be chosen.

Routers of transformers choose among all experts and give ids and weights. Under an expert budget
some rows choose again, among fewer experts, by the same rule (MoE-Spec, Eq. 8).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

# Sums of weights are no less: a division by nothing gives no numbers.
LEAST = 1e-20


class Gate(Protocol):
    def shares(self, logits: Tensor) -> Tensor:
        """How much each row wants each expert: logits [T, E] to float32 [T, E], whose rows sum to
        1 (Eq. 5 of MoE-Spec adds these up).
        """

    def choose(self, logits: Tensor, allowed: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """ids [T, K] int64 and weights [T, K] of rows that choose among `allowed` [E] bool, of
        which there are at least K.
        """


@dataclass(frozen=True, slots=True, eq=False)
class ScoreGate:
    """Takes the K best of scores, softmax or sigmoid of logits, as most routers do.

    Groups that a router would choose first are left out of account: the allowed experts are a
    choice of that kind already.

    sigmoid  scores are sigmoids of logits; otherwise their softmax
    divided  weights are divided by their sum
    scale    weights are multiplied by it
    bias     [E], added to scores to choose by, and not to weights
    added    to the sum that weights are divided by
    factors  [E], what an expert's weight is multiplied by
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
    """Takes the best expert and then the next one, each weighed against those near it
    (https://huggingface.co/papers/2409.12136).

    jitter_eps  experts are near that are behind the best by less than twice this share
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


# Of a block's router, and of what the block gives it beside hidden states.
GateOf = Callable[[Any, tuple[Tensor | None, ...]], Gate]


def softmax_gate(router: Any, beside: tuple[Tensor | None, ...]) -> Gate:
    """Divides by the sum where the configuration says so."""
    return ScoreGate(divided=bool(router.norm_topk_prob))


def dividing_gate(router: nn.Module, beside: tuple[Tensor | None, ...]) -> Gate:
    return ScoreGate(divided=True)


def scaled_gate(router: Any, beside: tuple[Tensor | None, ...]) -> Gate:
    """DeepSeek-V2's, which never divides."""
    return ScoreGate(scale=float(router.routed_scaling_factor))


def corrected_gate(router: Any, beside: tuple[Tensor | None, ...]) -> Gate:
    """DeepSeek-V3's: sigmoids, chosen by a bias beside them."""
    return ScoreGate(
        sigmoid=True,
        divided=bool(router.norm_topk_prob),
        scale=float(router.routed_scaling_factor),
        bias=router.e_score_correction_bias,
    )


def factored_gate(router: Any, beside: tuple[Tensor | None, ...]) -> Gate:
    """Gemma 4's: divided by their sum, and then by expert."""
    return ScoreGate(divided=True, factors=router.per_expert_scale)


def minimax_gate(router: nn.Module, beside: tuple[Tensor | None, ...]) -> Gate:
    (bias,) = beside
    return ScoreGate(sigmoid=True, divided=True, bias=bias)


def lfm2_gate(router: Any, beside: tuple[Tensor | None, ...]) -> Gate:
    """LFM2's: sigmoids, chosen by a bias beside them where it has one."""
    (bias,) = beside
    return ScoreGate(
        sigmoid=True,
        divided=bool(router.norm_topk_prob),
        scale=float(router.routed_scaling_factor),
        bias=bias,
        added=1e-6,
    )


def ernie_gate(router: Any, beside: tuple[Tensor | None, ...]) -> Gate:
    return ScoreGate(divided=True, bias=router.moe_statics.e_score_correction_bias.squeeze())


def sparse_mixer(router: Any, beside: tuple[Tensor | None, ...]) -> Gate:
    return SparseMixer(float(router.router_jitter_noise))
