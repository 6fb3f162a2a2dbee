"""Grows a draft's tree best-first: each pass runs the node that is likeliest to be accepted.

EAGLE-2 (arXiv:2406.16858) grows level by level and then keeps the likeliest nodes. Here each pass
runs one node, since passes over the INT4 copy are the cost of a draft. So a tree takes as many
passes as a chain, and is as deep or less. Each further node costs a row of the verification.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from speq.engine.draft import Draft
from speq.engine.drafters.next_token import Chosen
from speq.models.tree import Tree

# A token with a lower acceptance probability is not worth a row.
LEAST_ACCEPT_PROB = 0.01


class NodeCandidate(NamedTuple):
    """A token that may become a node; the likeliest sorts first.

    unlikely      minus the probability that it and its ancestors are accepted
    order         in which candidates were found
    logit_margin  see `Draft.logit_margins`
    """

    unlikely: float
    order: int
    parent: int
    token_id: int
    logit_margin: float | None


@dataclass(slots=True)
class BestFirst:
    """A tree of nodes that were run, and candidates after them.

    probability  that a token is accepted if its ancestors are, by its logit margin
    draft        the nodes so far
    """

    probability: Callable[[float | None], float]
    draft: Draft = field(default_factory=Draft)
    _accept_prob: list[float] = field(default_factory=lambda: [1.0])
    _candidates: list[NodeCandidate] = field(default_factory=list)
    _found: int = 0
    _beyond: dict[int, int] = field(default_factory=dict)

    def found(self, node: int, chosen: Chosen, beyond: int | None = None) -> None:
        """Add the candidates that may follow a node that was run.

        beyond  token that may follow any of these, by the same pass; None: unknown
        """
        if beyond is not None:
            self._beyond[node] = beyond
        self._offer(node, chosen.token_id, chosen.logit_margin)
        for other in chosen.others:
            self._offer(node, other.token_id, -other.behind)

    def _offer(self, parent: int, token_id: int, logit_margin: float | None) -> None:
        accept_prob = self._accept_prob[parent] * self.probability(logit_margin)
        heappush(
            self._candidates,
            NodeCandidate(-accept_prob, self._found, parent, token_id, logit_margin),
        )
        self._found += 1

    def best(self, ends: Callable[[int], bool]) -> NodeCandidate | None:
        """Return the likeliest candidate that does not end the sequence."""
        return min((each for each in self._candidates if not ends(each.token_id)), default=None)

    def grow(self, candidate: NodeCandidate) -> int:
        """Make a candidate a node; return its number."""
        self._candidates.remove(candidate)
        heapify(self._candidates)
        return self._append(candidate)

    def _append(self, candidate: NodeCandidate) -> int:
        self.draft.token_ids.append(candidate.token_id)
        self.draft.parents.append(candidate.parent)
        self.draft.logit_margins.append(candidate.logit_margin)
        self._accept_prob.append(-candidate.unlikely)
        return len(self.draft.token_ids)

    def as_last(self) -> Tree:
        """Return the tree of the nodes so far, for a pass of the last one."""
        return Tree.of(self.draft.parents, rows=1)

    def finished(self, nodes: int) -> Draft:
        """Finish the draft: add the likeliest candidates as leaves, up to `nodes` tokens."""
        while self._candidates and len(self.draft.token_ids) < nodes:
            candidate = heappop(self._candidates)
            if -candidate.unlikely < LEAST_ACCEPT_PROB:
                break
            leaf, beyond = self._append(candidate), self._beyond.get(candidate.parent)
            if beyond is not None:
                self._offer(leaf, beyond, None)
        return self.draft
