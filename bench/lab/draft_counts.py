"""What became of drafted tokens: by depth, by rank among those behind one token, and by name.

`Watched` besides notes how evenly a drafter's likeliest tokens stand (Jakiro, Eq. 18).
"""

import math
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from speq.engine.draft import Draft, Outcome
from speq.engine.draft_pass import OnLayer
from speq.engine.drafters.next_token import Chosen, NextTokens, Run, SamplePosition
from speq.engine.engine import Engine
from speq.stats import StepStats, ratio

# Of the token diversity index, for all drafters alike: as many as a head offers to a tree.
CANDIDATES = 8
# Of Eq. 22: of the logarithms of unique drafted, unique accepted and all tokens.
WEIGHTS = (0.4, 0.4, 0.2)


@dataclass(slots=True)
class Tried:
    """Drafted tokens behind tokens that stand, and how many of them stood."""

    tried: int = 0
    stood: int = 0

    def add(self, stood: bool) -> None:
        self.tried += 1
        self.stood += stood

    @property
    def share(self) -> float | None:
        return ratio(self.stood, self.tried)


@dataclass(slots=True)
class TextTokens:
    """Of one text: the distinct tokens that were drafted, those that were accepted, and how many
    tokens it has.
    """

    drafted: set[int] = field(default_factory=set)
    accepted: set[int] = field(default_factory=set)
    emitted: int = 0

    @property
    def diversity(self) -> float | None:
        """The text's term of Eq. 22; None where nothing was accepted."""
        counts = (len(self.drafted), len(self.accepted), self.emitted)
        if not all(counts):
            return None
        return sum(w * math.log(each) for w, each in zip(WEIGHTS, counts, strict=True))


@dataclass(slots=True)
class DraftCounts:
    """Of drafts over some texts.

    depths     from the first token behind the pending one on: whether the path went so far, of
               steps whose draft did and whose path came to the depth before
    ranks      of the tokens behind one that stands, the drafter's first choice and the others
    passes     of what drafted
    diversity  the sum of the token diversity indices of `chosen` choices
    """

    steps: int = 0
    emitted: int = 0
    passes: int = 0
    nodes: int = 0
    depths: list[Tried] = field(default_factory=list)
    ranks: list[Tried] = field(default_factory=list)
    texts: list[TextTokens] = field(default_factory=list)
    diversity: float = 0.0
    chosen: int = 0

    def begin_sequence(self) -> None:
        self.texts.append(TextTokens())

    def add(self, draft: Draft, outcome: Outcome, live: Container[int]) -> None:
        """Count a step. live: nodes that were verified; the others were given up."""
        text = self.texts[-1]
        self.steps += 1
        self.passes += draft.passes
        self.nodes += len(draft.token_ids)
        self.emitted += len(outcome.token_ids)
        text.emitted += len(outcome.token_ids)
        text.drafted |= set(draft.token_ids)
        text.accepted |= {draft.token_ids[node - 1] for node in outcome.path[1:]}
        following = [*outcome.path[1:], None]
        for depth, (node, stands) in enumerate(zip(outcome.path, following, strict=True)):
            children = [child for child in draft.children(node) if child in live]
            if children:
                _at(self.depths, depth).add(stands is not None)
            for rank, child in enumerate(children):
                _at(self.ranks, rank).add(child == stands)

    def note(self, logits: Tensor) -> None:
        """A choice by logits [V]."""
        index = diversity_index(logits)
        if index is not None:
            self.diversity += index
            self.chosen += 1

    def row(self) -> dict[str, Any]:
        """The figures; None where there is none of a kind."""
        texts, diversities = self.texts, [text.diversity for text in self.texts]
        known = [each for each in diversities if each is not None]
        drafts = self.nodes > 0
        return {
            "accept_length": ratio(self.emitted, self.steps),
            "nodes_mean": ratio(self.nodes, self.steps),
            "passes_mean": ratio(self.passes, self.steps),
            "by_depth": [each.share for each in self.depths],
            "tried_by_depth": [each.tried for each in self.depths],
            "by_rank": [each.share for each in self.ranks],
            "tried_by_rank": [each.tried for each in self.ranks],
            "tdi": ratio(self.diversity, self.chosen),
            "unique_drafted": ratio(sum(len(t.drafted) for t in texts), len(texts) * drafts),
            "unique_accepted": ratio(sum(len(t.accepted) for t in texts), len(texts) * drafts),
            "diversity": sum(known) / len(known) if known and len(known) == len(texts) else None,
        }


def _at(counts: list[Tried], place: int) -> Tried:
    while len(counts) <= place:
        counts.append(Tried())
    return counts[place]


def diversity_index(logits: Tensor, candidates: int = CANDIDATES) -> float | None:
    """The token diversity index of a choice by logits [V] (Eq. 18): the entropy of the likeliest
    tokens among themselves, as a share of the most there may be. The temperature has no part in
    it. None for logits that are no numbers.
    """
    best = logits.float().topk(candidates).values
    if not best.isfinite().all():
        return None
    chances = best.double().softmax(-1)
    return float(-torch.xlogy(chances, chances).sum()) / math.log(candidates)


class WatchedDrafts:
    """Chooses as the drafter does, and has what it chose by counted."""

    def __init__(self, chooses: NextTokens, counts: DraftCounts) -> None:
        self._chooses, self._counts = chooses, counts

    def __call__(self, run: Run, positions: Sequence[SamplePosition]) -> list[Chosen | None]:
        def seen(on_layer: OnLayer) -> Tensor:
            logits = run(on_layer)
            self._counts.note(logits[0])
            return logits

        return self._chooses(seen, positions)


@contextmanager
def counting(engine: Engine, counts: DraftCounts) -> Iterator[None]:
    """Count the steps of single texts that the block takes. Watching takes time of its own."""
    drafter: Any = engine.drafters[0]
    chooses = getattr(drafter, "next_tokens", None)  # prompt lookup and plain decoding have none

    def listen(step: StepStats) -> None:
        if step.phase == "decode":
            (turn,) = engine.steps
            counts.add(turn.draft, turn.outcome, turn.active)

    engine.recorder.listeners.append(listen)
    if chooses is not None:
        drafter.next_tokens = WatchedDrafts(chooses, counts)
    try:
        yield
    finally:
        engine.recorder.listeners.remove(listen)
        if chooses is not None:
            drafter.next_tokens = chooses
