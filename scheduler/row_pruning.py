"""Gives up rows of a verification whose experts would cost more than their tokens are worth.

A row depends on the rows above it and on no other. So a subtree of a draft may be declared dead in
any layer: from there on its experts are not asked for, and none of its tokens is accepted. All
other rows have all their experts, and the output is the exact model's own. A pending token never
dies. Several texts that are verified in one pass are a tree each.
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

# Layers ahead of which the draft's names are looked up: each lookup takes the host a moment.
AHEAD = 4
# Rows that the usual number of missing experts is the mean of.
HORIZON = 500.0


def rows_worth_keeping(
    parents: Sequence[int],
    worth_s: Sequence[float],
    wanted: Sequence[AbstractSet[Hashable]],
    expert_s: float,
    later_s: Sequence[float],
) -> list[int]:
    """The nodes of trees that are worth what they cost, ascending; the roots are among them.

    parents   of the nodes, before their children; a root's is -1
    worth_s   what the expected token of each is worth
    wanted    missing experts that each wants, of any layers; one costs `expert_s`, however many
              nodes want it
    later_s   what each is expected to cost besides

    From the leaves up: a subtree dies if what only its nodes want costs more than they are worth.
    """
    count = len(parents)
    wants = [Counter(keys) for keys in wanted]
    worth, later = [*worth_s], [*later_s]
    of_all: Counter[Hashable] = Counter()
    for keys in wants:
        of_all.update(keys)
    dead = [False] * count
    for node in range(count - 1, 0, -1):
        if parents[node] < 0:
            continue
        # By now `wants` has what all live nodes of the subtree want.
        own = sum(of_all[key] == times for key, times in wants[node].items())
        if own * expert_s + later[node] > worth[node]:
            dead[node] = True
            of_all.subtract(wants[node])
        else:
            parent = parents[node]
            wants[parent].update(wants[node])
            worth[parent] += worth[node]
            later[parent] += later[node]
    for node in range(1, count):
        dead[node] |= parents[node] >= 0 and dead[parents[node]]
    return [node for node in range(count) if not dead[node]]


@dataclass(slots=True)
class RowValues:
    """What rows are weighed by.

    parents   of the trees' nodes, before their children; a root's is -1
    reach     of each node, how likely it and all above it are to stand
    expert_s  that a missing expert delays a verification
    token_s   that a token takes
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
        """Those of `rows`, ascending and closed under parents, that stay so; roots do.

        missing  of each of `rows`, experts that are neither in slots nor on their way: those that
                 it wants now, and those that the draft has named for it in later layers
        named    whether the draft has named a row's experts
        """


@dataclass(slots=True)
class ExpectedValuePruning:
    """Gives subtrees up by what they are expected to cost, in this layer and the ones behind it.

    num_layers  of MoE
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
        lacking = any(keys for keys, may_die in zip(missing, drafted, strict=True) if may_die)
        if row_values.expert_s <= 0 or not lacking:
            return rows
        places = {node: place for place, node in enumerate(rows)}
        # Nobody has named what the rest will want: as much, layer by layer, as is usual.
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
        """The mean of experts that a row lacks in a layer and no other row wants."""
        wanted = Counter(key for keys in missing for key in keys)
        for node, may_die, keys in zip(rows, drafted, missing, strict=True):
            if may_die and not named(node):
                own = sum(wanted[key] == 1 for key in keys)
                self._seen = min(self._seen + 1, HORIZON)
                self._usual += (own - self._usual) / self._seen


class RowPruner:
    """Which rows of the verification under way are live, from layer to layer.

    policy  gives rows up; None: all live
    """

    def __init__(
        self, loader: ExpertLoader, lookahead: LookaheadBuffer, policy: RowPolicy | None
    ) -> None:
        self.policy = policy
        self._loader = loader
        self._lookahead = lookahead
        self._stakes: RowValues | None = None
        self._active_rows: list[int] = []
        self._roots = 1

    @property
    def active_rows(self) -> list[int]:
        """The nodes that are live, or that lived through the last verification, ascending."""
        return self._active_rows

    def begin(self, row_values: RowValues) -> None:
        """A verification follows of trees whose nodes are all live."""
        self._stakes = row_values
        self._roots = sum(parent < 0 for parent in row_values.parents)
        self._active_rows = [*range(len(row_values.parents))]

    def end(self) -> list[int]:
        """The verification is over; its `active_rows` nodes."""
        self._stakes = None
        return self._active_rows

    def observe(self, layer: int, route: Route) -> None:
        """Choose the live rows of a layer, whose exact route this is, and of those behind it."""
        if self._stakes is None or self.policy is None:
            return
        if len(self._active_rows) > self._roots:
            missing = self._missing(layer, route)
            self._active_rows = self.policy.active_rows(
                self._stakes, self._active_rows, layer, missing, self._named
            )
        if len(self._active_rows) < len(self._stakes.parents):
            route.active_rows = tuple(self._active_rows)

    def _missing(self, layer: int, route: Route) -> list[set[ExpertKey]]:
        """Of each live node, what is missing now; and where anything is, what will be."""
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
