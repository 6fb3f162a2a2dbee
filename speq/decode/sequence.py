"""State of one request: its tokens, and the tree of tokens a draft proposes for it."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from speq.config import SamplingParams
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
    leads: list[float | None] = field(default_factory=list)
    passes: int = 0

    @classmethod
    def chain(
        cls, token_ids: list[int], leads: list[float | None] | None = None, passes: int = 0
    ) -> "Draft":
        """Each token behind the one before it."""
        unknown: list[float | None] = [None] * len(token_ids)
        known = unknown if leads is None else leads
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

    def reach(self, probability: Callable[[float | None], float]) -> list[float]:
        """Of each node, how likely it and all above it are to stand; 1 for the pending token.

        probability  that a token stands if those above it do, by its lead
        """
        reach = [1.0]
        unknown: list[float | None] = [None] * len(self.parents)
        for parent, lead in zip(self.parents, self.leads or unknown, strict=True):
            reach.append(reach[parent] * probability(lead))
        return reach

    def tried(self, outcome: "Outcome") -> Iterator[tuple[float | None, bool]]:
        """Tokens behind those that stand: the lead of each, and whether it was the right one."""
        for node, token_id in zip(outcome.path, outcome.token_ids, strict=True):
            for child in self.children(node) if self.leads else []:
                yield self.leads[child - 1], self.token_ids[child - 1] == token_id

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


class Text(Protocol):
    def write(self, token_id: int, last: bool) -> bool:
        """Take the next token, the last one or not; return whether a stop string ends the text."""


class Odds(Protocol):
    def note(self, logits: Tensor, outcome: Outcome) -> None:
        """Take what the exact model [N, V] thought at the nodes of a draft, and what came of it."""


@dataclass(slots=True)
class Sequence:
    """One request. Its KV entries are exact for every token but the last, the pending one.

    text  reads the tokens as they are appended; without one there are no stop strings
    row   number of the KV cache that has its entries, among those of texts side by side
    odds  hears how likely the tokens were; without one nobody asks
    owner who may learn from times and figures what it begins with
    seed  of what is drawn: the request's, or one of its own
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    text: Text | None = None
    row: int = 0
    odds: Odds | None = None
    owner: str = ""
    generated_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        given = self.sampling.seed
        self.seed = secrets.randbits(63) if given is None else given

    @property
    def pending_id(self) -> int:
        return self.generated_ids[-1] if self.generated_ids else self.prompt_ids[-1]

    @property
    def position(self) -> int:
        """Of the token that comes next, in the generated text."""
        return len(self.generated_ids)

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.sampling.max_new_tokens - len(self.generated_ids)

    def ends(self, token_id: int) -> bool:
        return token_id in self.eos_ids and not self.sampling.ignore_eos

    def extend(self, token_ids: list[int]) -> list[int]:
        """Append tokens up to the first that ends the sequence; return those appended.

        Nothing else sets `finish_reason`: to "eos", "length", or "stop" where a stop string is
        complete, which goes before the other two.
        """
        for at, token_id in enumerate(token_ids, start=1):
            self.generated_ids.append(token_id)
            if self.ends(token_id):
                self.finish_reason = "eos"
            elif self.remaining == 0:
                self.finish_reason = "length"
            last = self.finish_reason is not None
            if self.text is not None and self.text.write(token_id, last):
                self.finish_reason = "stop"
            if self.finish_reason is not None:
                return token_ids[:at]
        return token_ids
