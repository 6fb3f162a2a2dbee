"""Trains what names experts over a head that is done, and tells in which layers that is worth it.

Of a token, a linear map of its embedding and of the feature before it says the experts of every
layer at once. It is trained on the exact model's choices, which the pass that makes features hears.
It names a layer's experts a whole draft early, where the router of a layer, asked on what enters
the one before it, names them one layer early. So the map is kept in those layers alone in which it
finds more of the experts than that.
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
from speq.training.trainer import TrainedAttention, Vocabulary
from speq.units import Progress, no_progress

# At most, and no more than the head took; each of one window.
STEPS = 400
# The highest rate, which falls in a line.
RATE, BETAS = 3e-3, (0.9, 0.95)
# Windows that are held out to judge by.
HELD_OUT = 8


class Rows(NamedTuple):
    """What experts are named by, embedded [R, H] and features [R, H], of tokens `first` and on of a
    window, and those experts [R, L, K].
    """

    first: int
    embedded: Tensor
    features: Tensor
    wanted: Tensor


@dataclass(frozen=True, slots=True)
class Recalls:
    """Shares of the experts that the exact model chooses, by layer, each by as many names.

    tokens     they were counted on
    drafted    named behind a token that was drafted, by the head's own feature
    pending    named behind one whose feature is the exact model's
    guessed    named by the layer's router a layer early; None: there is no layer before it
    most_used  the same experts for all tokens, those that these use most
    """

    tokens: int
    drafted: list[float]
    pending: list[float]
    guessed: list[float | None]
    most_used: list[float]

    def won(self) -> tuple[int, ...]:
        """Layers in which drafted tokens are better told by the map than by any of the others."""
        rivals = zip(self.drafted, self.guessed, self.most_used, strict=True)
        return tuple(
            layer
            for layer, (own, guess, used) in enumerate(rivals)
            if own > max(guess or 0.0, used)
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def rows_of(head: MoEHead, window: Window, vocabulary: Vocabulary) -> tuple[Rows, Rows]:
    """Of a window, tokens behind the exact model's features, and behind the head's own."""
    device, count = vocabulary.table.device, len(window.tokens) - 2
    embedded = functional.embedding(window.tokens.long().to(device), vocabulary.table)
    features, wanted = window.features.float().to(device), window.routes.long().to(device)
    attention = TrainedAttention(count, head.shape.window, device)
    rotation = rotations(torch.arange(count, device=device), head.shape.head_width)
    given = embedded[None, 1 : count + 1], features[None, :count]
    drafted = head(*given, rotation, attention.first).feature[0]
    ends = slice(1, count + 1), slice(2, count + 2)
    return (
        Rows(1, embedded[ends[0]], features[:count], wanted[ends[0]]),
        Rows(2, embedded[ends[1]], drafted, wanted[ends[1]]),
    )


def fitted(
    head: MoEHead,
    features: FeatureFile,
    vocabulary: Vocabulary,
    num_experts: int,
    steps: int,
    seed: int,
    progress: Progress = no_progress,
) -> Tensor:
    """Weights [L, E, 2H] of `MoEHead.route_logits`, in float32, in so many steps."""
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
    head: MoEHead, weight: Tensor, held_out: Sequence[HeldOut], vocabulary: Vocabulary
) -> Recalls:
    """What weights [L, E, 2H] find in windows that are held out, and what others find in them."""
    layers, num_experts = weight.shape[:2]
    top_k = held_out[0].window.routes.shape[-1]
    # Of each kind, found by layer; and how often each expert was wanted.
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
    """By layer [L], how many of the experts wanted [R, L, K] are among those named [R, L, K]."""
    among = (named[..., :, None] == wanted[..., None, :]).any(-2)
    return among.sum((0, 2)).double()


def naming(head: MoEHead, weight: Tensor, layers: tuple[int, ...], top_k: int) -> MoEHead:
    """The same head, naming experts in some of the layers that weights [L, E, 2H] are of, perhaps
    in none.
    """
    if not layers:
        return head
    named = NamedLayers(layers, weight.shape[1], top_k)
    weights = head.weights() | {"routes": weight[list(layers)]}
    return MoEHead(replace(head.shape, named=named), weights, head.stand).requires_grad_(False)
