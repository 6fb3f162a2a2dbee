"""A draft's tree as it grows: from the token that is likeliest to be reached, whatever its place.

EAGLE-2 (arXiv:2406.16858) grows level by level and then keeps the likeliest nodes. Here each pass
runs one node, as passes over the INT4 copy are what a draft costs. So as many passes as a chain
takes make a tree of the same depth or less. Its other nodes cost a row of the verification each.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from speq.engine.draft import Draft
from speq.engine.drafters.next_token import Chosen
from speq.models.tree import Tree

# A token that is reached less often is worth no row.
LEAST_REACH = 0.01


class Candidate(NamedTuple):
    """A token that may become a node, the likeliest first.

    unlikely  minus the probability that it and all above it stand
    order     in which candidates were found
    lead      as `Draft.logit_margins` has it
    """

    unlikely: float
    order: int
    parent: int
    token_id: int
    logit_margin: float | None


@dataclass(slots=True)
class BestFirst:
    """A tree of nodes that were run, and candidates behind them.

    probability  that a token stands if those above it do, by its lead
    draft        the nodes so far
    """

    probability: Callable[[float | None], float]
    draft: Draft = field(default_factory=Draft)
    _reach: list[float] = field(default_factory=lambda: [1.0])
    _candidates: list[Candidate] = field(default_factory=list)
    _found: int = 0
    _beyond: dict[int, int] = field(default_factory=dict)

    def found(self, node: int, chosen: Chosen, beyond: int | None = None) -> None:
        """A node was run: these tokens may follow it.

        beyond  the token that may follow any of these, by the same pass; None: it says none
        """
        if beyond is not None:
            self._beyond[node] = beyond
        self._offer(node, chosen.token_id, chosen.logit_margin)
        for other in chosen.others:
            self._offer(node, other.token_id, -other.behind)

    def _offer(self, parent: int, token_id: int, logit_margin: float | None) -> None:
        accept_prob = self._reach[parent] * self.probability(logit_margin)
        heappush(
            self._candidates, Candidate(-accept_prob, self._found, parent, token_id, logit_margin)
        )
        self._found += 1

    def best(self, ends: Callable[[int], bool]) -> Candidate | None:
        """The likeliest candidate that does not end the text."""
        return min((each for each in self._candidates if not ends(each.token_id)), default=None)

    def grow(self, candidate: Candidate) -> int:
        """Make a candidate a node; return its number."""
        self._candidates.remove(candidate)
        heapify(self._candidates)
        return self._append(candidate)

    def _append(self, candidate: Candidate) -> int:
        self.draft.token_ids.append(candidate.token_id)
        self.draft.parents.append(candidate.parent)
        self.draft.logit_margins.append(candidate.logit_margin)
        self._reach.append(-candidate.unlikely)
        return len(self.draft.token_ids)

    def as_last(self) -> Tree:
        """The tree of the nodes so far, for a pass of the last one."""
        return Tree.of(self.draft.parents, rows=1)

    def finished(self, nodes: int) -> Draft:
        """The draft with the likeliest candidates as leaves, and what was seen beyond them: so many
        tokens at most.
        """
        while self._candidates and len(self.draft.token_ids) < nodes:
            candidate = heappop(self._candidates)
            if -candidate.unlikely < LEAST_REACH:
                break
            leaf, beyond = self._append(candidate), self._beyond.get(candidate.parent)
            if beyond is not None:
                self._offer(leaf, beyond, None)
        return self.draft
