"""Gates: a family's rule for choosing experts by router logits, among the allowed ones.

Routers of transformers choose among all experts and return ids and weights. Under an expert budget
some rows choose again, among fewer experts, by the same rule (MoE-Spec, Eq. 8).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from speq.kernels.decoder_ops import RouterRule

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

    It ignores the rule's groups, that a router would choose first: the allowed experts are such a
    choice already. It rounds nothing.
    """

    rule: RouterRule

    def _scores(self, logits: Tensor) -> Tensor:
        wide = logits.float()
        return wide.sigmoid() if self.rule.sigmoid else wide.softmax(-1)

    def shares(self, logits: Tensor) -> Tensor:
        scores = self._scores(logits)
        if not self.rule.sigmoid:
            return scores
        return scores / scores.sum(-1, keepdim=True).clamp(min=LEAST)

    def choose(self, logits: Tensor, allowed: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        scores, rule = self._scores(logits), self.rule
        ranked = scores if rule.bias is None else scores + rule.bias.to(scores.device)
        ids = ranked.masked_fill(~allowed, float("-inf")).topk(top_k, -1).indices
        weights = scores.gather(-1, ids)
        if rule.divided:
            weights = weights / (weights.sum(-1, keepdim=True) + rule.added).clamp(min=LEAST)
        if rule.factors is not None:
            weights = weights * rule.factors.to(weights.device)[ids]
        return ids, weights * rule.scale


@dataclass(frozen=True, slots=True, eq=False)
class SoftplusGate(ScoreGate):
    """ScoreGate whose scores are roots of the softplus of logits; like sigmoids, no shares."""

    def _scores(self, logits: Tensor) -> Tensor:
        return functional.softplus(logits.float()).sqrt()


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


def as_float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().float()


# Builds the gate of a block from its router and the router's arguments besides hidden states.
GateOf = Callable[[Any, tuple[Tensor | None, ...]], RouterGate]


def softmax_gate(router: Any, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    """Softmax, divided by the sum if the configuration says so."""
    return ScoreGate(RouterRule(divided=bool(router.norm_topk_prob)))


def normalized_gate(router: nn.Module, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    return ScoreGate(RouterRule(divided=True))


def deepseek_v2_gate(router: Any, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    """DeepSeek-V2: softmax, never divided; groups by their best expert, where it has some."""
    rule = RouterRule(scale=float(router.routed_scaling_factor))
    if router.topk_method != "greedy":
        rule = replace(rule, groups=router.num_group, kept_groups=router.topk_group)
    return ScoreGate(rule)


def deepseek_v3_gate(router: Any, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    """DeepSeek-V3: sigmoids, with a bias for choosing; groups by their two best experts."""
    return ScoreGate(
        RouterRule(
            sigmoid=True,
            divided=bool(router.norm_topk_prob),
            scale=float(router.routed_scaling_factor),
            bias=as_float(router.e_score_correction_bias),
            added=1e-20,
            groups=router.num_group,
            kept_groups=router.topk_group,
            group_best=2,
        )
    )


def deepseek_v4_gate(router: Any, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    """DeepSeek-V4: roots of softplus, with a bias for choosing where token ids do not choose."""
    bias = as_float(getattr(router, "e_score_correction_bias", None))
    scale = float(router.routed_scaling_factor)
    return SoftplusGate(RouterRule(sigmoid=True, divided=True, scale=scale, bias=bias, added=1e-20))


def mistral4_gate(router: Any, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    """Mistral 4: softmax; groups by their two best experts."""
    return ScoreGate(
        RouterRule(
            divided=bool(router.norm_topk_prob),
            scale=float(router.routed_scaling_factor),
            added=1e-20,
            rounded=True,
            groups=router.num_group,
            kept_groups=router.topk_group,
            group_best=2,
        )
    )


def gemma4_gate(router: Any, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    """Gemma 4: divided by the sum, then scaled by expert."""
    return ScoreGate(RouterRule(divided=True, factors=as_float(router.per_expert_scale)))


def corrected_gate(scale: str) -> GateOf:
    """Hy3 and AFMoE: sigmoids, with a bias for choosing.

    scale  attribute of a router that weights are multiplied by
    """

    def gate(router: Any, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
        (bias,) = router_inputs
        rule = RouterRule(sigmoid=True, divided=True, bias=as_float(bias), added=1e-20)
        return ScoreGate(replace(rule, scale=float(getattr(router, scale))))

    return gate


def laguna_gate(router: Any, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    """Laguna: sigmoids of logits that may be capped, with a bias for choosing."""
    bias = as_float(router.e_score_correction_bias)
    return ScoreGate(RouterRule(sigmoid=True, divided=True, bias=bias))


def minimax_gate(router: nn.Module, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    (bias,) = router_inputs
    return ScoreGate(RouterRule(sigmoid=True, divided=True, bias=as_float(bias)))


def lfm2_gate(router: Any, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    """LFM2: sigmoids, with an optional bias for choosing."""
    (bias,) = router_inputs
    return ScoreGate(
        RouterRule(
            sigmoid=True,
            divided=bool(router.norm_topk_prob),
            scale=float(router.routed_scaling_factor),
            bias=as_float(bias),
            added=1e-6,
            rounded=True,
        )
    )


def ernie_gate(router: Any, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    bias = as_float(router.moe_statics.e_score_correction_bias.squeeze())
    return ScoreGate(RouterRule(divided=True, bias=bias))


def sparse_mixer(router: Any, router_inputs: tuple[Tensor | None, ...]) -> RouterGate:
    return SparseMixer(float(router.router_jitter_noise))
