"""What a comparison of draft and exact model counts, on its way to shares."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.lab.route_match import RouteMatch, rank_experts
from speq.config import SamplingParams
from speq.engine.drafter import DraftLimits
from speq.engine.request import Request
from speq.engine.sampling import distribution, draw
from speq.errors import SpeqError, present
from speq.measure.probe import attempt
from speq.measure.teacher_forced import ForcedPass
from speq.runtime import Runtime
from speq.stats import ratio

# What is drawn at temperature 1 is drawn so often for each token.
SEEDS = 16


@dataclass(slots=True)
class NextTokenCounts:
    """What both models make of the tokens to come.

    agreed     of `tokens`, those after which both find the same token likeliest
    overlap    sum over them of sum min(p, q) of both distributions at temperature 1: of drawn
               drafts, the most that any rule accepts
    alike      of `SEEDS` times as many, those after which both draw the same token with the same
               noise: of drawn drafts, what stands
    predicted  tokens that have one before them in their text, and what the models gave those:
               exact_nats, draft_nats, negative logarithms of probabilities, summed
    """

    tokens: int = 0
    agreed: int = 0
    overlap: float = 0.0
    alike: int = 0
    predicted: int = 0
    exact_nats: float = 0.0
    draft_nats: float = 0.0

    def add(self, exact: Tensor, draft: Tensor, following: list[int]) -> None:
        """Count a pass: logits [T, V] of both; the token after each, but for a text's last."""
        exact, draft = exact.float(), draft.float()
        for name, logits in (("exact model", exact), ("draft", draft)):
            if not logits.isfinite().all():
                raise SpeqError(
                    f"the {name} computes logits that are not finite, and there is nothing to "
                    "compare; check its weights, or choose a dtype of wider range"
                )
        self._draw(exact, draft)
        self.tokens += len(exact)
        self.agreed += int((exact.argmax(-1) == draft.argmax(-1)).sum())
        self.predicted += len(following)
        wanted = torch.tensor(following, dtype=torch.int64, device=exact.device)
        self.exact_nats += _nats(exact, wanted)
        self.draft_nats += _nats(draft, wanted)

    def _draw(self, exact: Tensor, draft: Tensor) -> None:
        sampling = SamplingParams(temperature=1.0)
        for at, rows in enumerate(zip(exact, draft, strict=True), start=self.tokens):
            pair = distribution(torch.stack(rows), sampling)
            self.overlap += float(pair.amin(0).sum())
            self.alike += sum(draw(pair[0], s, at) == draw(pair[1], s, at) for s in range(SEEDS))

    def row(self) -> dict[str, Any]:
        exact = _perplexity(self.exact_nats, self.predicted)
        draft = _perplexity(self.draft_nats, self.predicted)
        return {
            "tokens": self.tokens,
            "agreement": ratio(self.agreed, self.tokens),
            "overlap": ratio(self.overlap, self.tokens),
            "drawn_alike": ratio(self.alike, SEEDS * self.tokens),
            "exact_perplexity": exact,
            "draft_perplexity": draft,
            "perplexity_gap": None if exact is None or draft is None else draft - exact,
        }


def _nats(logits: Tensor, wanted: Tensor) -> float:
    return float(cross_entropy(logits[: len(wanted)].double(), wanted, reduction="sum"))


def _perplexity(nats: float, tokens: int) -> float | None:
    """None where nothing was predicted, or so badly that no number holds it."""
    try:
        return math.exp(nats / tokens) if tokens else None
    except OverflowError:
        return None


@dataclass(slots=True)
class Position:
    """What is known at one place of a draft.

    forced, free, kept  routes teacher-forced, of free-running drafts, and of their accepted tokens
    proposed, accepted  drafts that proposed a token here, and those of which it was accepted
    """

    forced: RouteMatch = field(default_factory=RouteMatch)
    free: RouteMatch = field(default_factory=RouteMatch)
    kept: RouteMatch = field(default_factory=RouteMatch)
    proposed: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Fidelity:
    """What a comparison has found so far.

    layers       teacher-forced, by layer
    activations  by layer, the tokens for which the exact model chose each expert
    positions    by place in a draft
    """

    layers: list[RouteMatch]
    activations: list[list[int]]
    positions: list[Position]
    texts: NextTokenCounts = field(default_factory=NextTokenCounts)

    @classmethod
    def empty(cls, num_layers: int, num_experts: int, draft_length: int) -> "Fidelity":
        return cls(
            [RouteMatch() for _ in range(num_layers)],
            [[0] * num_experts for _ in range(num_layers)],
            [Position() for _ in range(draft_length)],
        )

    def add_forced(self, forced: ForcedPass, following: list[int]) -> None:
        """Count a pass over a text; following: the token after each, but for the text's last."""
        draft = present(forced.draft, "a pass without a draft is compared with one")
        self.texts.add(forced.exact, draft, following)
        lookahead = forced.lookahead
        for layer, route in lookahead.used.items():
            for token, used in enumerate(rank_experts(route)):
                drafted = rank_experts(lookahead.predicted[token, layer])[0]
                self.layers[layer].add(drafted, used)
                if token < len(self.positions):
                    self.positions[token].forced.add(drafted, used)
                for expert in used:
                    self.activations[layer][expert] += 1

    def run_freely(self, runtime: Runtime, token_ids: list[int]) -> None:
        """Draft and verify behind `token_ids`, all but the last of which the cache holds."""
        engine = runtime.engine
        sampling = SamplingParams(max_new_tokens=len(self.positions) + 1, ignore_eos=True)
        turn = attempt(engine, Request(token_ids, sampling), DraftLimits(len(self.positions)))
        accepted, lookahead = turn.outcome.accepted, engine.lookahead
        used = {layer: rank_experts(route) for layer, route in lookahead.used.items()}
        for (node, layer), route in lookahead.predicted.items():
            # A draft that broke off has a route more than tokens, and still a node for each.
            drafted = rank_experts(route)[0]
            self.positions[node].free.add(drafted, used[layer][node])
            if node <= accepted:
                self.positions[node].kept.add(drafted, used[layer][node])
        for at, position in enumerate(self.positions):
            position.proposed += at < turn.draft.depth
            position.accepted += at < accepted
