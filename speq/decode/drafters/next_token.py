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


def host_token(others: int = OTHERS) -> NextToken:
    """Routes are told in the midst of the pass, while the next layers are still to come."""

    def choose(
        run: Run, sequence: Sequence, drafted: list[int], on_layer: OnLayer
    ) -> Chosen | None:
        logits = run(on_layer)
        if not logits.isfinite().all():
            return None
        standing = standings(logits[0], sequence, drafted)
        return chosen(int(standing.argmax()), *runners_up(standing, sequence.sampling, others))

    return choose


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
