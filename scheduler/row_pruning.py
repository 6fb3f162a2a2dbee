"""Prunes rows of a verification whose experts cost more than their tokens are worth.

A row depends only on its ancestors. So a subtree of a draft may be pruned in any layer: from there
on its experts are not loaded, and none of its tokens is accepted. All other rows have all their
experts, so the output is the exact model's own. A pending token is never pruned. In a batch each
request has a tree.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from speq.routing import Route
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.lookahead import LookaheadBuffer

# Later layers whose drafted experts are looked up: each lookup takes time on the host.
AHEAD = 4
# Rows that the mean number of missing experts remembers.
HORIZON = 500.0


def rows_worth_keeping(
    parents: Sequence[int],
    worth_s: Sequence[float],
    wanted: Sequence[AbstractSet[Hashable]],
    expert_s: float,
    later_s: Sequence[float],
) -> list[int]:
    """List the nodes of trees that are worth their cost, ascending; roots are always kept.

    parents   parent of each node, before its children; -1 for a root
    worth_s   value of each node's expected token
    wanted    missing experts that each node needs, in any layers; one costs `expert_s` once
    later_s   expected further cost of each node

    From the leaves up: a subtree is pruned if the experts that only its nodes need cost more than
    the nodes are worth.
    """
    count = len(parents)
    wants = [Counter(keys) for keys in wanted]
    worth, later = [*worth_s], [*later_s]
    of_all: Counter[Hashable] = Counter()
    for keys in wants:
        of_all.update(keys)
    pruned = [False] * count
    for node in range(count - 1, 0, -1):
        if parents[node] < 0:
            continue
        # By now `wants` counts what all active nodes of the subtree need.
        own = sum(of_all[key] == times for key, times in wants[node].items())
        if own * expert_s + later[node] > worth[node]:
            pruned[node] = True
            of_all.subtract(wants[node])
        else:
            parent = parents[node]
            wants[parent].update(wants[node])
            worth[parent] += worth[node]
            later[parent] += later[node]
    for node in range(1, count):
        pruned[node] |= parents[node] >= 0 and pruned[parents[node]]
    return [node for node in range(count) if not pruned[node]]


@dataclass(slots=True)
class RowValues:
    """Values that rows are weighed by.

    parents      parent of each node, before its children; -1 for a root
    accept_prob  probability that a node and all its ancestors are accepted
    expert_s     delay of a verification by a missing expert
    token_s      time that a token takes
    """

    parents: list[int]
    accept_prob: list[float]
    expert_s: float
    token_s: float


class RowPolicy(Protocol):
    def active_rows(
        self,
        row_values: RowValues,
        rows: list[int],
        layer: int,
        missing: list[set[ExpertKey]],
        named: Callable[[int], bool],
    ) -> list[int]:
        """List those of `rows` that stay active, ascending and closed under parents.

        missing  for each row, experts that are neither resident nor under way: those of this
                 layer, and those that the draft has named in later layers
        named    tells whether the draft has named a row's experts
        """


@dataclass(slots=True)
class ExpectedValuePruning:
    """Prunes subtrees by their expected cost in this layer and the later ones.

    num_layers  MoE layers
    """

    num_layers: int
    _usual: float = field(default=0.0, init=False)
    _seen: float = field(default=0.0, init=False)

    def active_rows(
        self,
        row_values: RowValues,
        rows: list[int],
        layer: int,
        missing: list[set[ExpertKey]],
        named: Callable[[int], bool],
    ) -> list[int]:
        drafted = [row_values.parents[node] >= 0 for node in rows]
        self._learn(rows, drafted, missing, named)
        lacking = any(keys for keys, prunable in zip(missing, drafted, strict=True) if prunable)
        if row_values.expert_s <= 0 or not lacking:
            return rows
        places = {node: place for place, node in enumerate(rows)}
        # Experts that nobody has named: as many as usual in each later layer.
        later_s = self._usual * (self.num_layers - 1 - layer) * row_values.expert_s
        kept = rows_worth_keeping(
            [places.get(row_values.parents[node], -1) for node in rows],
            [row_values.accept_prob[node] * row_values.token_s for node in rows],
            missing,
            row_values.expert_s,
            [0.0 if named(node) else later_s for node in rows],
        )
        return [rows[place] for place in kept]

    def _learn(
        self,
        rows: list[int],
        drafted: list[bool],
        missing: list[set[ExpertKey]],
        named: Callable[[int], bool],
    ) -> None:
        """Learn the mean number of missing experts of a layer that only one row needs."""
        wanted = Counter(key for keys in missing for key in keys)
        for node, prunable, keys in zip(rows, drafted, missing, strict=True):
            if prunable and not named(node):
                own = sum(wanted[key] == 1 for key in keys)
                self._seen = min(self._seen + 1, HORIZON)
                self._usual += (own - self._usual) / self._seen


class RowPruner:
    """Tracks the active rows of a verification from layer to layer.

    policy  chooses the rows to prune; None: all rows stay active
    """

    def __init__(
        self, loader: ExpertLoader, lookahead: LookaheadBuffer, policy: RowPolicy | None
    ) -> None:
        self.policy = policy
        self._loader = loader
        self._lookahead = lookahead
        self._row_values: RowValues | None = None
        self._active_rows: list[int] = []
        self._roots = 1

    @property
    def active_rows(self) -> list[int]:
        """Active nodes, or those left after the last verification, ascending."""
        return self._active_rows

    def begin(self, row_values: RowValues) -> None:
        """Begin a verification, with all nodes active."""
        self._row_values = row_values
        self._roots = sum(parent < 0 for parent in row_values.parents)
        self._active_rows = [*range(len(row_values.parents))]

    def end(self) -> list[int]:
        """End the verification; return its active nodes."""
        self._row_values = None
        return self._active_rows

    def observe(self, layer: int, route: Route) -> None:
        """Prune rows from this layer on, by its exact route."""
        if self._row_values is None or self.policy is None:
            return
        if len(self._active_rows) > self._roots:
            missing = self._missing(layer, route)
            self._active_rows = self.policy.active_rows(
                self._row_values, self._active_rows, layer, missing, self._named
            )
        if len(self._active_rows) < len(self._row_values.parents):
            route.active_rows = tuple(self._active_rows)

    def _missing(self, layer: int, route: Route) -> list[set[ExpertKey]]:
        """List each active node's missing experts; with any, those of later layers too."""
        missing = [self._loader.missing(layer, route.ids[node]) for node in self._active_rows]
        if any(missing[1:]):
            for node, keys in zip(self._active_rows, missing, strict=True):
                token = self._lookahead.token_of(node)
                for ahead in range(layer + 1, min(layer + 1 + AHEAD, self._lookahead.num_layers)):
                    if self._lookahead.knows(token, ahead):
                        named = self._lookahead.expert_ids(token, ahead)
                        keys |= self._loader.missing(ahead, named)
        return missing

    def _named(self, node: int) -> bool:
        token = self._lookahead.token_of(node)
        return self._lookahead.knows(token, self._lookahead.num_layers - 1)
