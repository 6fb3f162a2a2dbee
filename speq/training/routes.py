"""Training of a finished head's prediction of experts, and choice of the layers that have it.

A linear map of a token's embedding and of the feature before it predicts the experts of every layer
at once. It is trained on the exact model's choices, recorded with the features. It predicts a
layer's experts a whole draft early. A layer's router, applied to the input of the layer before,
predicts them one layer early. So the map is kept only in layers in which it finds more of the
experts than that.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from speq.heads.head_shape import NamedLayers
from speq.heads.moe_head import MoEHead, rotations
from speq.routing import top_experts
from speq.training.features import FeatureFile, HeldOut, Window
from speq.training.trainer import TrainedAttention, TrainingVocabulary
from speq.units import Progress, no_progress

# Most steps, and no more than the head took; each over one window.
STEPS = 400
# Peak learning rate, which falls linearly.
RATE, BETAS = 3e-3, (0.9, 0.95)
# Held-out windows for evaluation.
HELD_OUT = 8


class RouteRows(NamedTuple):
    """Training rows for the tokens of a window from `first` on: embeddings [R, H] and features [R,
    H], and their experts [R, L, K].
    """

    first: int
    embedded: Tensor
    features: Tensor
    wanted: Tensor


@dataclass(frozen=True, slots=True)
class Recalls:
    """Recall of the exact model's experts by layer, with as many predictions as choices.

    tokens     number of tokens evaluated
    drafted    after a drafted token, from the head's own feature
    pending    after a verified token, from the exact model's feature
    guessed    by the layer's router one layer early; None: there is no layer before it
    most_used  by the experts used most, the same for all tokens
    """

    tokens: int
    drafted: list[float]
    pending: list[float]
    guessed: list[float | None]
    most_used: list[float]

    def won(self) -> tuple[int, ...]:
        """Layers in which the map predicts experts of drafted tokens better than any
        alternative.
        """
        rivals = zip(self.drafted, self.guessed, self.most_used, strict=True)
        return tuple(
            layer
            for layer, (own, guess, used) in enumerate(rivals)
            if own > max(guess or 0.0, used)
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def rows_of(
    head: MoEHead, window: Window, vocabulary: TrainingVocabulary
) -> tuple[RouteRows, RouteRows]:
    """Build the rows of a window: from the exact model's features, and from the head's own."""
    device, count = vocabulary.table.device, len(window.tokens) - 2
    embedded = functional.embedding(window.tokens.long().to(device), vocabulary.table)
    features, wanted = window.features.float().to(device), window.routes.long().to(device)
    attention = TrainedAttention(count, head.shape.window, device)
    rotation = rotations(torch.arange(count, device=device), head.shape.head_width)
    given = embedded[None, 1 : count + 1], features[None, :count]
    drafted = head(*given, rotation, attention.first).feature[0]
    ends = slice(1, count + 1), slice(2, count + 2)
    return (
        RouteRows(1, embedded[ends[0]], features[:count], wanted[ends[0]]),
        RouteRows(2, embedded[ends[1]], drafted, wanted[ends[1]]),
    )


def fit(
    head: MoEHead,
    features: FeatureFile,
    vocabulary: TrainingVocabulary,
    num_experts: int,
    steps: int,
    seed: int,
    progress: Progress = no_progress,
) -> Tensor:
    """Train weights [L, E, 2H] of `MoEHead.route_logits` in float32."""
    num_layers, hidden_size = features.routed[0], features.hidden_size
    shape = (num_layers, num_experts, 2 * hidden_size)
    weight = torch.zeros(shape, device=vocabulary.table.device, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.0, betas=BETAS)
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for step in range(steps):
        if not order:
            order = torch.randperm(len(features), generator=generator).tolist()
        with torch.no_grad():
            pending, drafted = rows_of(head, features.read(order.pop()), vocabulary)
        embedded = torch.cat((pending.embedded, drafted.embedded))
        given = torch.cat((pending.features, drafted.features))
        wanted = torch.cat((pending.wanted, drafted.wanted))
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / steps)
        optimizer.zero_grad(set_to_none=True)
        logits = head.route_logits(embedded, given, weight)
        chosen = logits.log_softmax(-1).gather(2, wanted.transpose(0, 1))
        (-chosen.mean()).backward()
        optimizer.step()
        progress("training routes", step + 1, steps)
    return weight.detach()


@torch.no_grad()
def recalls(
    head: MoEHead, weight: Tensor, held_out: Sequence[HeldOut], vocabulary: TrainingVocabulary
) -> Recalls:
    """Evaluate weights [L, E, 2H] and their alternatives on held-out windows."""
    layers, num_experts = weight.shape[:2]
    top_k = held_out[0].window.routes.shape[-1]
    # Hits by layer, of each kind; and how often each expert was chosen.
    found = {kind: torch.zeros(layers, dtype=torch.float64) for kind in ("pending", "drafted")}
    guessed = torch.zeros(layers, dtype=torch.float64)
    used = torch.zeros(layers, num_experts, dtype=torch.float64)
    tokens = 0
    for window, guesses in held_out:
        pending, drafted = rows_of(head, window, vocabulary)
        for kind, rows in (("pending", pending), ("drafted", drafted)):
            logits = head.route_logits(rows.embedded, rows.features, weight)
            named = top_experts(logits.flatten(0, 1), top_k)[0].unflatten(0, logits.shape[:2])
            found[kind] += hits(named.transpose(0, 1), rows.wanted).cpu()
        wanted, ends = drafted.wanted.cpu(), slice(drafted.first, drafted.first + len(drafted[1]))
        for layer, ids in enumerate(guesses, start=1):
            guessed[layer] += hits(ids[ends, None].long(), wanted[:, layer : layer + 1])[0]
        for layer in range(layers):
            used[layer] += torch.bincount(wanted[:, layer].flatten(), minlength=num_experts)
        tokens += len(wanted)
    choices = tokens * top_k
    most_used = used.topk(top_k).values.sum(-1)
    shares = (guessed / choices).tolist()
    return Recalls(
        tokens,
        (found["drafted"] / choices).tolist(),
        (found["pending"] / choices).tolist(),
        [None, *shares[1:]],
        (most_used / choices).tolist(),
    )


def hits(named: Tensor, wanted: Tensor) -> Tensor:
    """Count by layer [L] the experts wanted [R, L, K] that are among those predicted [R, L, K]."""
    among = (named[..., :, None] == wanted[..., None, :]).any(-2)
    return among.sum((0, 2)).double()


def with_predictions(head: MoEHead, weight: Tensor, layers: tuple[int, ...], top_k: int) -> MoEHead:
    """Build the head that predicts experts in `layers`, possibly none, with weights [L, E, 2H] of
    all layers.
    """
    if not layers:
        return head
    named = NamedLayers(layers, weight.shape[1], top_k)
    weights = head.weights() | {"routes": weight[list(layers)]}
    return MoEHead(replace(head.shape, named=named), weights, head.acceptance_rates).requires_grad_(
        False
    )
