"""A draft, the tree of tokens proposed for a request, and what acceptance makes of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from speq.models.tree import Tree


@dataclass(slots=True)
class Draft:
    """A tree of proposed tokens. Node 0 is the pending token, node i + 1 is `token_ids[i]`.

    token_ids  proposed tokens, parents before children
    parents    node of each token's parent; a chain is 0, 1, 2, ...
    leads      by how much, in logits, each token leads the one that the drafter would have chosen
               next; below 0 for a token that it would not have chosen: by how much that is behind.
               None where the drafter does not know; empty where it knows none
    passes     of what drafted
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    logit_margins: list[float | None] = field(default_factory=list)
    passes: int = 0

    @classmethod
    def chain(
        cls, token_ids: list[int], logit_margins: list[float | None] | None = None, passes: int = 0
    ) -> "Draft":
        """Each token behind the one before it."""
        unknown: list[float | None] = [None] * len(token_ids)
        known = unknown if logit_margins is None else logit_margins
        return cls(token_ids, list(range(len(token_ids))), known, passes)

    @property
    def nodes(self) -> int:
        return len(self.token_ids) + 1

    @property
    def tree(self) -> Tree:
        """The shape of it, from the pending token down."""
        return Tree.of(self.parents)

    @property
    def is_chain(self) -> bool:
        return self.tree.is_chain

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        return max(self.tree.depths())

    def accept_prob(self, probability: Callable[[float | None], float]) -> list[float]:
        """Of each node, how likely it and all above it are to stand; 1 for the pending token.

        probability  that a token stands if those above it do, by its lead
        """
        accept_prob = [1.0]
        unknown: list[float | None] = [None] * len(self.parents)
        for parent, logit_margin in zip(self.parents, self.logit_margins or unknown, strict=True):
            accept_prob.append(accept_prob[parent] * probability(logit_margin))
        return accept_prob

    def tried(self, outcome: "Outcome") -> Iterator[tuple[float | None, bool]]:
        """Tokens behind those that stand: the lead of each, and whether it was the right one."""
        for node, token_id in zip(outcome.path, outcome.token_ids, strict=True):
            for child in self.children(node) if self.logit_margins else []:
                yield self.logit_margins[child - 1], self.token_ids[child - 1] == token_id

    def above(self, node: int) -> list[int]:
        """Proposed tokens from below the pending one down to `node`, its own last."""
        token_ids: list[int] = []
        while node:
            token_ids.append(self.token_ids[node - 1])
            node = self.parents[node - 1]
        return token_ids[::-1]

    def children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents, start=1) if parent == node]


@dataclass(slots=True)
class Outcome:
    """What acceptance made of a draft.

    path       accepted nodes from the pending token (node 0) down
    token_ids  tokens to emit: the accepted ones and one of the exact model's own
    """

    path: list[int]
    token_ids: list[int]

    @property
    def accepted(self) -> int:
        return len(self.path) - 1
