"""The token that a draft's pass chooses, and its routes: on the host, or read from a device once.

An accelerator is given the whole pass and the choice before the host waits for any of it.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from speq.devices.staged import Readback
from speq.engine.draft_pass import OnLayer
from speq.engine.request import Request
from speq.engine.sampler import DeviceSampler, Sampler
from speq.engine.sampling import runners_up, standings
from speq.routing import Route

# Runs a pass, given who is told its routes; logits [1, V].
Run = Callable[[OnLayer], Tensor]
# Tokens that may follow in a tree, besides the one that is chosen.
OTHERS = 2


class Alternative(NamedTuple):
    """behind: by how much, in logits, the token is behind the one that is chosen."""

    token_id: int
    behind: float


class Chosen(NamedTuple):
    """lead: by how much, in logits, the token leads the next one; None: not known.

    others  those that come next, which the exact model may choose in its place; perhaps none
    """

    token_id: int
    logit_margin: float | None
    others: tuple[Alternative, ...] = ()


class SamplePosition(NamedTuple):
    """A request that wants to know what follows its tokens and the drafted ones behind them.

    on_layer  told (layer, route) of its row of a pass, routes that the host has read or can
    """

    request: Request
    drafted: list[int]
    on_layer: OnLayer


class NextTokens(Protocol):
    def __call__(self, run: Run, positions: Sequence[SamplePosition]) -> list[Chosen | None]:
        """The token at each position, whose row of one pass it is; None where its logits are not
        finite.
        """


def next_tokens_on(sampler: Sampler, others: int = OTHERS) -> NextTokens:
    """others: tokens besides the one that is chosen, at most."""
    if isinstance(sampler, DeviceSampler):
        return read_tokens(sampler, others)
    return host_tokens(others)


def host_tokens(others: int = OTHERS) -> NextTokens:
    """Routes are told in the midst of the pass, while the next layers are still to come."""

    def choose(run: Run, positions: Sequence[SamplePosition]) -> list[Chosen | None]:
        def on_layer(layer: int, route: Route) -> None:
            for each, row in zip(positions, route.split(), strict=True):
                each.on_layer(layer, row)

        rows = zip(run(on_layer), positions, strict=True)
        return [host_choice(logits, each.request, each.drafted, others) for logits, each in rows]

    return choose


def host_choice(
    logits: Tensor, request: Request, drafted: list[int], others: int = OTHERS
) -> Chosen | None:
    """By logits [V] in host memory."""
    if not logits.isfinite().all():
        return None
    standing = standings(logits, request, drafted)
    return chosen_token(int(standing.argmax()), *runners_up(standing, request.sampling, others))


def read_tokens(sampler: DeviceSampler, others: int = OTHERS) -> NextTokens:
    """Routes, where there are any, and tokens in one read, when the pass is through."""
    readback = Readback(sampler.device)

    def read(run: Run, positions: Sequence[SamplePosition]) -> list[Chosen | None]:
        routes: list[Route] = []
        scores = run(lambda layer, route: routes.append(route)).float()
        choices: list[Tensor] = []
        for row, each in zip(scores.split(1), positions, strict=True):
            standing = sampler.standings(row, each.request, each.drafted)[0]
            choices.append(standing.argmax(-1)[None])
            choices.extend(runners_up(standing, each.request.sampling, others))
        lowest, highest, *found = readback.read(
            scores.amin(-1), scores.amax(-1), *choices, *stacked_routes(routes)
        )
        count = len(positions)
        by_layer = zip(*(part.split(count) for part in found[3 * count :]), strict=True)
        for layer, parts in enumerate(by_layer):
            rows = zip(*(part.split(1) for part in parts), strict=True)
            for each, row_parts in zip(positions, rows, strict=True):
                each.on_layer(layer, Route(*row_parts))
        # Neither bound is finite where any logit is not a number.
        finite = (lowest.isfinite() & highest.isfinite()).tolist()
        triples = [found[3 * at : 3 * at + 3] for at in range(count)]
        return [
            chosen_token(int(token_id), ids, behind) if is_finite else None
            for (token_id, ids, behind), is_finite in zip(triples, finite, strict=True)
        ]

    return read


def stacked_routes(routes: list[Route]) -> list[Tensor]:
    """Ids and weights of all layers [L, K], as two tensors; none where there are no routes."""
    if not routes:
        return []
    ids = torch.cat([route.topk_ids for route in routes])
    return [ids, torch.cat([route.topk_weights for route in routes])]


def chosen_token(token_id: int, ids: Tensor, behind: Tensor) -> Chosen:
    """ids, behind: of `runners_up`. Of equals the one that is chosen may be among them."""
    following = [Alternative(*pair) for pair in zip(ids.tolist(), behind.tolist(), strict=True)]
    drawable = (each for each in following if math.isfinite(each.behind))
    others = tuple(each for each in drawable if each.token_id != token_id)
    return Chosen(token_id, following[0].behind if following else None, others)
