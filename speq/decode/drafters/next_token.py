"""The token that a draft's pass chooses, and its routes: on the host, or read from a device once.

An accelerator is given the whole pass and the choice before the host waits for any of it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from speq.decode.draft_pass import OnLayer
from speq.decode.sampler import DeviceSampler, Sampler
from speq.decode.sampling import runners_up, standings
from speq.decode.sequence import Sequence
from speq.devices.staged import Readback
from speq.routing import Route

# Runs a pass, given who is told its routes; logits [1, V].
Run = Callable[[OnLayer], Tensor]
# Tokens that may follow in a tree, besides the one that is chosen.
OTHERS = 2


class Other(NamedTuple):
    """behind: by how much, in logits, the token is behind the one that is chosen."""

    token_id: int
    behind: float


class Chosen(NamedTuple):
    """lead: by how much, in logits, the token leads the next one; None: not known.

    others  those that come next, which the exact model may choose in its place; perhaps none
    """

    token_id: int
    lead: float | None
    others: tuple[Other, ...] = ()


class NextToken(Protocol):
    def __call__(
        self, run: Run, sequence: Sequence, drafted: list[int], on_layer: OnLayer
    ) -> Chosen | None:
        """The token behind the sequence and what is drafted; None where logits are not finite.

        on_layer  told (layer, route) of all layers, routes that the host has read or can
        """


def next_token_on(sampler: Sampler, others: int = OTHERS) -> NextToken:
    """others: tokens besides the one that is chosen, at most."""
    if isinstance(sampler, DeviceSampler):
        return read_token(sampler, others)
    return host_token(others)


class Asked(NamedTuple):
    """A text that wants to know what follows its tokens and what is drafted behind them.

    on_layer  told (layer, route) of its row of a pass
    """

    sequence: Sequence
    drafted: list[int]
    on_layer: OnLayer


class NextTokens(Protocol):
    def __call__(self, run: Run, asked: list[Asked]) -> list[Chosen | None]:
        """The same for several texts, each of which has a row of one pass."""


def next_tokens_on(sampler: Sampler) -> NextTokens:
    return read_tokens(sampler) if isinstance(sampler, DeviceSampler) else host_tokens


def host_token(others: int = OTHERS) -> NextToken:
    """Routes are told in the midst of the pass, while the next layers are still to come."""

    def choose(
        run: Run, sequence: Sequence, drafted: list[int], on_layer: OnLayer
    ) -> Chosen | None:
        return host_choice(run(on_layer)[0], sequence, drafted, others)

    return choose


def host_tokens(run: Run, asked: list[Asked]) -> list[Chosen | None]:
    """As `host_token`."""

    def on_layer(layer: int, route: Route) -> None:
        for each, row in zip(asked, route.split(), strict=True):
            each.on_layer(layer, row)

    rows = zip(run(on_layer), asked, strict=True)
    return [host_choice(logits, each.sequence, each.drafted) for logits, each in rows]


def host_choice(
    logits: Tensor, sequence: Sequence, drafted: list[int], others: int = OTHERS
) -> Chosen | None:
    """By logits [V] in host memory."""
    if not logits.isfinite().all():
        return None
    standing = standings(logits, sequence, drafted)
    return chosen(int(standing.argmax()), *runners_up(standing, sequence.sampling, others))


def read_token(sampler: DeviceSampler, others: int = OTHERS) -> NextToken:
    """Routes, where there are any, and tokens in one read, when the pass is through."""
    readback = Readback(sampler.device)

    def read(run: Run, sequence: Sequence, drafted: list[int], on_layer: OnLayer) -> Chosen | None:
        routes: list[Route] = []
        scores = run(lambda layer, route: routes.append(route)).float()
        standing = sampler.standings(scores, sequence, drafted)
        token_id, ids, behind, bounds, *routed = readback.read(
            standing.argmax(-1),
            *runners_up(standing[0], sequence.sampling, others),
            torch.stack(scores.aminmax()),
            *together(routes),
        )
        rows = zip(*(part.split(1) for part in routed), strict=True)
        for layer, of_layer in enumerate(rows):
            on_layer(layer, Route(*of_layer))
        # Neither bound is finite where any logit is not a number.
        if not bounds.isfinite().all():
            return None
        return chosen(int(token_id), ids, behind)

    return read


def read_tokens(sampler: DeviceSampler) -> NextTokens:
    """Routes and tokens of all texts in one read, when the pass is through."""
    readback = Readback(sampler.device)

    def read(run: Run, asked: list[Asked]) -> list[Chosen | None]:
        routes: list[Route] = []
        scores = run(lambda layer, route: routes.append(route)).float()
        choices: list[Tensor] = []
        for row, each in zip(scores.split(1), asked, strict=True):
            standing = sampler.standings(row, each.sequence, each.drafted)[0]
            choices.append(standing.argmax(-1)[None])
            choices.extend(runners_up(standing, each.sequence.sampling, OTHERS))
        all_ids, all_weights, lowest, highest, *read_choices = readback.read(
            torch.cat([route.topk_ids for route in routes]),
            torch.cat([route.topk_weights for route in routes]),
            scores.amin(-1),
            scores.amax(-1),
            *choices,
        )
        texts = len(asked)
        of_layers = zip(all_ids.split(texts), all_weights.split(texts), strict=True)
        for layer, (ids, weights) in enumerate(of_layers):
            for each, row_ids, row_weights in zip(
                asked, ids.split(1), weights.split(1), strict=True
            ):
                each.on_layer(layer, Route(row_ids, row_weights))
        # Neither bound is finite where any logit is not a number.
        finite = (lowest.isfinite() & highest.isfinite()).tolist()
        triples = [read_choices[3 * text : 3 * text + 3] for text in range(texts)]
        return [
            chosen(int(token_id), ids, behind) if is_finite else None
            for (token_id, ids, behind), is_finite in zip(triples, finite, strict=True)
        ]

    return read


def together(routes: list[Route]) -> list[Tensor]:
    """Ids and weights of all layers [L, K], as two tensors; none where there are no routes."""
    if not routes:
        return []
    ids = torch.cat([route.topk_ids for route in routes])
    return [ids, torch.cat([route.topk_weights for route in routes])]


def chosen(token_id: int, ids: Tensor, behind: Tensor) -> Chosen:
    """ids, behind: of `runners_up`. Of equals the one that is chosen may be among them."""
    following = [Other(*pair) for pair in zip(ids.tolist(), behind.tolist(), strict=True)]
    drawable = (each for each in following if math.isfinite(each.behind))
    others = tuple(each for each in drawable if each.token_id != token_id)
    return Chosen(token_id, following[0].behind if following else None, others)
