"""What one text does in a step: it is drafted for, and some of the draft stands."""

from collections.abc import Callable
from dataclasses import dataclass, field

from speq.decode.drafter import DraftBounds, Drafter
from speq.decode.sequence import Draft, Outcome, Sequence
from speq.errors import SpeqError
from speq.models.kv_cache import KVCache
from speq.models.texts import TextTokens
from speq.scheduler.row_pruning import Stakes


@dataclass(slots=True)
class Turn:
    """One text's part in a step.

    cache    of its entries
    drafter  who drafts for it
    first    row of the verification that has its pending token; the draft's nodes follow
    live     nodes of the draft that were not given up in the verification
    outcome  of acceptance
    stopped  whether the governor stopped the draft
    error    that the model's logits are no numbers, where others went on
    """

    sequence: Sequence
    cache: KVCache
    drafter: Drafter
    bounds: DraftBounds
    draft: Draft = field(default_factory=Draft)
    first: int = 0
    live: list[int] = field(default_factory=list)
    outcome: Outcome = field(default_factory=lambda: Outcome([0], []))
    stopped: bool = False
    error: SpeqError | None = None

    @property
    def tokens(self) -> TextTokens:
        """Of the verification."""
        token_ids = [self.sequence.pending_id, *self.draft.token_ids]
        return TextTokens(self.cache, token_ids, self.draft.tree)

    @property
    def accepted_ids(self) -> list[int]:
        """Of the tokens whose entries are kept: the pending one, and those that were accepted."""
        nodes = self.tokens.token_ids
        return [nodes[node] for node in self.outcome.path]

    @property
    def kept(self) -> list[int]:
        """Rows of the verification whose nodes were accepted."""
        return [self.first + node for node in self.outcome.path]


def place(drafts: list[Draft]) -> list[int]:
    """The first row of each draft, where they are verified side by side."""
    firsts, first = [], 0
    for draft in drafts:
        firsts.append(first)
        first += draft.nodes
    return firsts


def stakes_of(
    drafts: list[Draft],
    probability: Callable[[float | None], float],
    expert_s: float,
    token_s: float,
) -> Stakes:
    """What the rows of drafts that are verified side by side are weighed by."""
    parents: list[int] = []
    reach: list[float] = []
    for draft, first in zip(drafts, place(drafts), strict=True):
        parents += [-1, *(first + parent for parent in draft.parents)]
        reach += draft.reach(probability)
    return Stakes(parents, reach, expert_s, token_s)
