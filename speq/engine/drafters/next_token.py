"""Chooses the next tokens of a draft pass, and reports its routes.

On an accelerator the host launches the whole pass and the choice, and then reads once.
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

# Runs a pass, which reports its routes to the argument; returns logits [B, V].
Run = Callable[[OnLayer], Tensor]
# Tokens besides the chosen one that may follow in a tree.
OTHERS = 2


class Alternative(NamedTuple):
    """A token that was not chosen. behind: its difference in logits from the chosen one"""

    token_id: int
    behind: float


class Chosen(NamedTuple):
    """A chosen token, its logit margin (None: unknown), and the next best tokens."""

    token_id: int
    logit_margin: float | None
    others: tuple[Alternative, ...] = ()


class SamplePosition(NamedTuple):
    """A position to sample: after a request's tokens and the drafted ones.

    on_layer  called with (layer, route) of its row of the pass; the host can read these routes
    """

    request: Request
    drafted: list[int]
    on_layer: OnLayer


class NextTokens(Protocol):
    def __call__(self, run: Run, positions: Sequence[SamplePosition]) -> list[Chosen | None]:
        """Choose the token at each position, a row of one pass; None if logits are not finite."""


def next_tokens_on(sampler: Sampler, others: int = OTHERS) -> NextTokens:
    """Choose on the sampler's device. others: most tokens besides the chosen one"""
    if isinstance(sampler, DeviceSampler):
        return read_tokens(sampler, others)
    return host_tokens(others)


def host_tokens(others: int = OTHERS) -> NextTokens:
    """Choose on the host. Routes are reported during the pass, before the next layers."""

    def choose(run: Run, positions: Sequence[SamplePosition]) -> list[Chosen | None]:
        def on_layer(layer: int, route: Route) -> None:
            # One position has the whole route: most drafts are of one request.
            rows = [route] if len(positions) == 1 else route.split()
            for each, row in zip(positions, rows, strict=True):
                each.on_layer(layer, row)

        rows = zip(run(on_layer), positions, strict=True)
        return [host_choice(logits, each.request, each.drafted, others) for logits, each in rows]

    return choose


def host_choice(
    logits: Tensor, request: Request, drafted: list[int], others: int = OTHERS
) -> Chosen | None:
    """Choose from logits [V] in host memory."""
    if not logits.isfinite().all():
        return None
    standing = standings(logits, request, drafted)
    return chosen_token(int(standing.argmax()), *runners_up(standing, request.sampling, others))


def read_tokens(sampler: DeviceSampler, others: int = OTHERS) -> NextTokens:
    """Choose on a device. Tokens and routes, if any, are read together after the pass."""
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
            scores.amin(-1), scores.amax(-1), *choices, *stack_routes(routes)
        )
        count = len(positions)
        by_layer = zip(*(part.split(count) for part in found[3 * count :]), strict=True)
        for layer, parts in enumerate(by_layer):
            rows = zip(*(part.split(1) for part in parts), strict=True)
            for each, row_parts in zip(positions, rows, strict=True):
                each.on_layer(layer, Route(*row_parts))
        # Both bounds are NaN if any logit is.
        finite = (lowest.isfinite() & highest.isfinite()).tolist()
        triples = [found[3 * at : 3 * at + 3] for at in range(count)]
        return [
            chosen_token(int(token_id), ids, behind) if is_finite else None
            for (token_id, ids, behind), is_finite in zip(triples, finite, strict=True)
        ]

    return read


def stack_routes(routes: list[Route]) -> list[Tensor]:
    """Stack the ids and weights of all layers, [L, K] each; empty without routes."""
    if not routes:
        return []
    ids = torch.cat([route.topk_ids for route in routes])
    return [ids, torch.cat([route.topk_weights for route in routes])]


def chosen_token(token_id: int, ids: Tensor, behind: Tensor) -> Chosen:
    """Make a Chosen. ids, behind: of `runners_up`; with ties, the chosen token may be in them"""
    runners = [Alternative(*pair) for pair in zip(ids.tolist(), behind.tolist(), strict=True)]
    possible = (each for each in runners if math.isfinite(each.behind))
    others = tuple(each for each in possible if each.token_id != token_id)
    return Chosen(token_id, runners[0].behind if runners else None, others)
