"""One request's part in a step: its draft and the outcome."""

from collections.abc import Callable
from dataclasses import dataclass, field

from speq.engine.draft import Draft, Outcome
from speq.engine.drafter import Drafter, DraftLimits
from speq.engine.request import Request
from speq.errors import SpeqError
from speq.models.kv_cache import KVCache
from speq.models.packed_batch import SequenceTokens
from speq.scheduler.row_pruning import RowValues


@dataclass(slots=True)
class RequestStep:
    """One request's part in a step.

    cache      its KV
    drafter    proposes tokens for it
    limits     of its draft
    first_row  row of the verification that has its pending token
    active     nodes of the draft that were not pruned in the verification
    outcome    of acceptance
    stopped    True if the governor stopped the draft
    error      set if its logits are not finite, while other requests of the batch continue
    """

    request: Request
    cache: KVCache
    drafter: Drafter
    limits: DraftLimits
    draft: Draft = field(default_factory=Draft)
    first_row: int = 0
    active: list[int] = field(default_factory=list)
    outcome: Outcome = field(default_factory=lambda: Outcome([0], []))
    stopped: bool = False
    error: SpeqError | None = None

    @property
    def tokens(self) -> SequenceTokens:
        """Tokens that the verification runs: the pending one and the draft."""
        token_ids = [self.request.pending_id, *self.draft.token_ids]
        return SequenceTokens(self.cache, token_ids, self.draft.tree)

    @property
    def accepted_ids(self) -> list[int]:
        """Tokens whose KV is kept: the pending one, and those that were accepted."""
        nodes = self.tokens.token_ids
        return [nodes[node] for node in self.outcome.path]


@dataclass(frozen=True, slots=True)
class PackedDrafts:
    """Drafts of a batch that one pass verifies: the rows of each follow those of the one before.

    first_rows  row of each draft's pending token
    """

    drafts: list[Draft]
    first_rows: list[int]

    @classmethod
    def of(cls, drafts: list[Draft]) -> "PackedDrafts":
        first_rows, row = [], 0
        for draft in drafts:
            first_rows.append(row)
            row += draft.nodes
        return cls(drafts, first_rows)

    @property
    def node_counts(self) -> list[int]:
        return [draft.nodes for draft in self.drafts]

    def nodes_among(self, rows: list[int], at: int) -> list[int]:
        """Nodes of draft `at` whose rows are among these."""
        first = self.first_rows[at]
        return [row - first for row in rows if first <= row < first + self.drafts[at].nodes]

    def row_values(
        self,
        probability: Callable[[float | None], float],
        expert_s: float,
        token_s: float,
    ) -> RowValues:
        """Return the values by which rows are pruned.

        probability  that a token is accepted if its ancestors are, by its logit margin
        """
        parents: list[int] = []
        accept_prob: list[float] = []
        for draft, first in zip(self.drafts, self.first_rows, strict=True):
            parents += [-1, *(first + parent for parent in draft.parents)]
            accept_prob += draft.accept_prob(probability)
        return RowValues(parents, accept_prob, expert_s, token_s)
