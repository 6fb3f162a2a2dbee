"""Loss terms of a head's training (Jakiro, Eqs. 12 to 16), as functions of tensors.

Unlike the paper, the mixture itself is trained on the model's distribution, so that branches learn
different tokens, and the regression of the contrast has half the weight, as in the authors' code.
The cross entropy below is the expectation of -log sum_j pi_j p_j(x) over tokens x of the model's
distribution; no tokens are sampled.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional

from speq.heads.moe_head import mix_logits


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Weights of the terms. The regression of the next feature has weight 1."""

    after: float = 0.5
    next_tokens: float = 0.1
    after_tokens: float = 0.05
    mixture: float = 0.1


def regression(found: Tensor, wanted: Tensor) -> Tensor:
    """Mean SmoothL1 of rows [R, H] over elements: e^2 / 2 within 1, |e| - 1/2 beyond."""
    return functional.smooth_l1_loss(found, wanted)


def cross_entropy(log_probs: Tensor, wanted: Tensor) -> Tensor:
    """Mean over rows of -sum_x wanted(x) log_probs(x), both [R, V]; wanted are probabilities."""
    return -(wanted * log_probs).sum(-1).mean()


@dataclass(frozen=True, slots=True)
class Targets:
    """Training targets of rows: features [R, H] of the model's next token and of the one after, and
    the model's probabilities [R, V] from each of them.
    """

    feature: Tensor
    after: Tensor
    probs: Tensor
    after_probs: Tensor


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of a head for rows: as `BranchState`, [R, ...], with the logits of its parts [..,
    V].
    """

    feature: Tensor
    mixing: Tensor
    logits: Tensor
    branch_logits: Tensor
    after: Tensor | None = None
    after_logits: Tensor | None = None


def terms(found: Predictions, wanted: Targets) -> dict[str, Tensor]:
    """Compute each term, unweighted, by name."""
    parts = regressions(found.feature, found.after, wanted.feature, wanted.after)
    return parts | cross_entropies(found, wanted)


def regressions(
    feature: Tensor, after: Tensor | None, wanted: Tensor, wanted_after: Tensor
) -> dict[str, Tensor]:
    """Compute the terms of features [..., H]."""
    parts = {"feature": regression(feature, wanted)}
    if after is not None:
        parts["after"] = regression(after, wanted_after)
    return parts


def cross_entropies(found: Predictions, wanted: Targets) -> dict[str, Tensor]:
    """Compute the terms of tokens."""
    parts = {
        "next_tokens": cross_entropy(found.logits.log_softmax(-1), wanted.probs),
        "mixture": cross_entropy(mix_logits(found.mixing, found.branch_logits), wanted.probs),
    }
    if found.after_logits is not None:
        after_log_probs = found.after_logits.log_softmax(-1)
        parts["after_tokens"] = cross_entropy(after_log_probs, wanted.after_probs)
    return parts


def total(parts: dict[str, Tensor], weights: LossWeights) -> Tensor:
    factors = {"feature": 1.0, **asdict(weights)}
    return torch.stack([factors[name] * part for name, part in parts.items()]).sum()
