"""A draft, the tree of tokens proposed for a request, and what acceptance makes of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from speq.models.tree import Tree


@dataclass(slots=True)
class Draft:
    """A tree of proposed tokens. Node 0 is the pending token, node i + 1 is `token_ids[i]`.

    token_ids  proposed tokens, parents before children
    parents    node of each token's parent; a chain is 0, 1, 2, ...
    logit_margins  logit of each token minus that of the best other one; negative for a token that
               the drafter would not have chosen. None: unknown; empty: all are
    passes     of the drafter
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    logit_margins: list[float | None] = field(default_factory=list)
    passes: int = 0

    @classmethod
    def chain(
        cls, token_ids: list[int], logit_margins: list[float | None] | None = None, passes: int = 0
    ) -> "Draft":
        """Make a chain: each token follows the one before it."""
        unknown: list[float | None] = [None] * len(token_ids)
        known = unknown if logit_margins is None else logit_margins
        return cls(token_ids, list(range(len(token_ids))), known, passes)

    @property
    def nodes(self) -> int:
        return len(self.token_ids) + 1

    @property
    def tree(self) -> Tree:
        """Shape of the draft, from the pending token down."""
        return Tree.of(self.parents)

    @property
    def is_chain(self) -> bool:
        return self.tree.is_chain

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path."""
        return max(self.tree.depths())

    def accept_prob(self, probability: Callable[[float | None], float]) -> list[float]:
        """Return each node's probability that it and its ancestors are accepted; 1 at the root.

        probability  that a token is accepted if its ancestors are, by its logit margin
        """
        accept_prob = [1.0]
        unknown: list[float | None] = [None] * len(self.parents)
        for parent, logit_margin in zip(self.parents, self.logit_margins or unknown, strict=True):
            accept_prob.append(accept_prob[parent] * probability(logit_margin))
        return accept_prob

    def tried(self, outcome: "Outcome") -> Iterator[tuple[float | None, bool]]:
        """Yield (logit margin, accepted) of each token whose ancestors were all accepted."""
        for node, token_id in zip(outcome.path, outcome.token_ids, strict=True):
            for child in self.children(node) if self.logit_margins else []:
                yield self.logit_margins[child - 1], self.token_ids[child - 1] == token_id

    def above(self, node: int) -> list[int]:
        """List the proposed tokens from below the pending one down to `node`."""
        token_ids: list[int] = []
        while node:
            token_ids.append(self.token_ids[node - 1])
            node = self.parents[node - 1]
        return token_ids[::-1]

    def children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents, start=1) if parent == node]


@dataclass(slots=True)
class Outcome:
    """The result of accepting a draft.

    path       accepted nodes from the pending token (node 0) down
    token_ids  tokens to emit: the accepted ones and one of the exact model's own
    """

    path: list[int]
    token_ids: list[int]

    @property
    def accepted(self) -> int:
        return len(self.path) - 1
