"""Routes of the exact model along texts that it writes, and of trees that the draft grows there.

A tree is drafted and verified as in a run, and then forgotten: the text goes on from its token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bench.lab.expert_shares import Flags, Floats, choices_of, served_shares
from speq.config import SamplingParams
from speq.engine.drafter import DraftLimits
from speq.engine.engine import Engine
from speq.engine.request import Request
from speq.errors import SpeqError
from speq.generator import Generator
from speq.measure.probe import attempt
from speq.routing import Route
from speq.units import Progress, track

# Tokens drafted a step while a text is written: its routes are the same without.
DRAFT_LENGTH = 4


@dataclass(frozen=True, slots=True)
class RouteSample:
    """What the routers of all MoE layers said of some tokens.

    marks          [L, T, E] which experts each token chose
    weights        [L, T, E] what these were served with, 0 for others
    probabilities  [L, T, E] the softmax of all logits (Eq. 1)
    """

    marks: Flags
    weights: Floats
    probabilities: Floats

    @property
    def tokens(self) -> int:
        return self.marks.shape[1]

    @classmethod
    def of(cls, routes: Sequence[Route], rows: list[int]) -> "RouteSample":
        """Of these rows of a pass, one route for each layer.

        Raises SpeqError for logits that are not finite, and for routers that tell none.
        """
        logits = []
        for layer, route in enumerate(routes):
            if route.router_logits is None:
                raise SpeqError(
                    f"the router of MoE layer {layer} tells no logits, and there is nothing to "
                    "take the softmax of; this bench needs a family whose routers return them"
                )
            logits.append(route.router_logits.detach()[rows].double().cpu().numpy())
        scores = np.stack(logits)
        if not np.isfinite(scores).all():
            raise SpeqError(
                "the exact model's routers compute logits that are not finite; check its weights, "
                "or choose a dtype of wider range"
            )
        ids = np.stack([route.host_ids[rows].numpy() for route in routes])
        weights = np.stack([route.host_weights[rows].double().numpy() for route in routes])
        num_experts = scores.shape[-1]
        return cls(
            choices_of(ids, num_experts), served_shares(ids, weights, num_experts), softmax(scores)
        )

    @classmethod
    def joined(cls, samples: Iterable["RouteSample"]) -> "RouteSample":
        """The tokens of all, one sample behind the other."""
        each = [(one.marks, one.weights, one.probabilities) for one in samples]
        return cls(*(np.concatenate(parts, axis=1) for parts in zip(*each, strict=True)))


@dataclass(frozen=True, slots=True)
class TreeSample:
    """A verification of a drafted tree.

    nodes  tokens that were asked for at most
    start  of its text's tokens, the one that the tree is rooted at
    depth  tokens of its longest path
    marks  [L, T, E] which experts each row chose, the pending token's first
    """

    nodes: int
    start: int
    depth: int
    marks: Flags


@dataclass(slots=True)
class TextSample:
    """Routes of one text. kind: of its prompt; tokens: all that it has, but for the last one."""

    kind: str
    tokens: RouteSample
    trees: list[TreeSample] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TreePlan:
    """Which trees are drafted.

    nodes   tokens of a tree at most, each size in turn at each place
    passes  of the draft for a tree; None: half as many as tokens are asked for
    every   tokens of a text from one place to the next
    """

    nodes: tuple[int, ...]
    passes: int | None
    every: int

    def passes_of(self, nodes: int) -> int:
        return max(nodes // 2, 1) if self.passes is None else self.passes


def softmax(logits: Floats) -> Floats:
    """Over the last axis."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    shares: Floats = powers / powers.sum(-1, keepdims=True)
    return shares


def record_routes(
    generator: Generator,
    texts: list[tuple[str, str]],
    max_new_tokens: int,
    trees: TreePlan,
    progress: Progress | None = None,
) -> list[TextSample]:
    """Write a text behind each (kind, prompt), and keep its routes. Trees need an INT4 copy."""
    encoded = [(kind, generator.encode(prompt)) for kind, prompt in texts]
    generator.reserve(
        max(len(prompt_token_ids) for _, prompt_token_ids in encoded) + max_new_tokens
    )
    return [
        of_text(generator, kind, prompt_token_ids, max_new_tokens, trees)
        for kind, prompt_token_ids in track("recording routes", encoded, len(encoded), progress)
    ]


def of_text(
    generator: Generator,
    kind: str,
    prompt_token_ids: list[int],
    max_new_tokens: int,
    trees: TreePlan,
) -> TextSample:
    """One text to its full length."""
    runtime = generator.runtime
    engine = runtime.engine
    request = Request(
        prompt_token_ids, SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    )
    engine.prefill(request)
    steps: list[RouteSample] = []
    grown: list[TreeSample] = []
    done = next_trees = 0
    while request.finish_reason is None:
        if runtime.draft_backend is not None and done >= next_trees:
            grown += trees_at(engine, request, done, trees)
            next_trees = done + trees.every
        engine.step([request], DRAFT_LENGTH)
        steps.append(RouteSample.of(routes_of(engine), engine.steps[0].outcome.path))
        done += len(engine.steps[0].outcome.path)
    return TextSample(kind, RouteSample.joined(steps), grown)


def trees_at(engine: Engine, request: Request, start: int, plan: TreePlan) -> list[TreeSample]:
    """Draft and verify a tree of each size behind the pending token, and accept nothing of them.

    Trees that may have more rows than the text goes on are left out.
    """
    grown = []
    for nodes in plan.nodes:
        if nodes >= request.remaining:
            continue
        passes = plan.passes_of(nodes)
        turn = attempt(engine, request, DraftLimits(passes, nodes))
        marks = marks_of(routes_of(engine))
        grown.append(TreeSample(nodes, start, turn.draft.depth, marks))
    return grown


def routes_of(engine: Engine) -> list[Route]:
    """Of the last verification, layer by layer."""
    used = engine.lookahead.used
    return [used[layer] for layer in range(engine.lookahead.num_layers)]


def marks_of(routes: Sequence[Route]) -> Flags:
    """Which experts all rows of a pass chose."""
    logits = routes[0].logits
    ids: NDArray[np.int64] = np.stack([route.host_ids.numpy() for route in routes])
    return choices_of(ids, logits.shape[-1])
