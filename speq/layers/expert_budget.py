"""Expert budgets: verifications that load fewer experts than their rows choose. Not exact, and off
unless requested.

MoE-Spec (section 3) bounds the experts of a layer, whatever the length of a draft. Here the experts
in slots may be free, rows may count by their chance of acceptance, and a share of the routing
weight may replace a number.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speq.config import ExpertBudgetOptions
from speq.errors import OptionError
from speq.layers.expert_counts import ExpertCounts
from speq.layers.gates import RouterGate
from speq.routing import Route, RoutePrediction
from speq.stats import Timed

Scores = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class BudgetRules:
    """Rules that select the experts of a layer that a verification may load.

    experts    most experts, the best ones; None: no limit
    floor      the best experts that together have at least this share of the rows' routing weight
    truncate   other experts are left out; otherwise their rows choose again among the selected ones
    residents  experts in slots or in transfer are always selected
    by_reach   rows count by their chance of acceptance; otherwise equally
    counts     [L, E]: rank by these; None: by the rows' routing weights (Eq. 5)
    """

    experts: int | None
    floor: float = 0.0
    truncate: bool = False
    residents: bool = True
    by_reach: bool = True
    counts: Tensor | None = None

    def shortlist(
        self, scores: Scores, top_k: int, at_hand: Callable[[Sequence[int]], Sequence[int]]
    ) -> NDArray[np.bool_]:
        """Select at least `top_k` experts [E] by scores [E]; ties go to the lower id.

        at_hand  returns those of some experts that need no transfer
        """
        ranked = np.argsort(-scores, kind="stable")
        best = ranked[: self.experts]
        inside = np.zeros(len(scores), dtype=bool)
        inside[best[scores[best] >= self.floor * scores.sum()]] = True
        if self.residents:
            inside[list(at_hand(range(len(scores))))] = True
        lacking = top_k - int(inside.sum())
        if lacking > 0:
            inside[ranked[~inside[ranked]][:lacking]] = True
        return inside


def rules_of(
    options: ExpertBudgetOptions, layers: int, experts: int, top_k: int
) -> BudgetRules | None:
    """The budget that options ask for, of MoE layers with so many experts; None: all they want.

    Raises SpeqError if a budget is below a token's experts, and for counts of another model.
    """
    if not options.approximates:
        return None
    asked = options.expert_budget
    most = math.ceil(asked * experts) if isinstance(asked, float) else asked
    if most is not None and not top_k <= most <= experts:
        raise OptionError(
            f"expert_budget is {asked if isinstance(asked, int) else f'{asked:.0%}'}, which is "
            f"{most} of {experts} experts; each token chooses {top_k}: give {top_k} to {experts}"
        )
    counts = None
    if options.expert_counts is not None:
        known = ExpertCounts.read(options.expert_counts)
        known.check_sizes(options.expert_counts, layers, experts, top_k)
        counts = torch.tensor(known.counts)
    return BudgetRules(
        most,
        options.expert_floor or 0.0,
        truncate=options.expert_policy == "truncate",
        residents=options.expert_residents == "free",
        by_reach=options.expert_rows == "reach",
        counts=counts,
    )


class LayerBudgets(NamedTuple):
    """One budget for all MoE layers, and the layers' gates, in order."""

    rules: BudgetRules
    gates: Sequence[RouterGate]


@dataclass(slots=True)
class BudgetUse:
    """What verifications under a budget kept of what their rows wanted.

    wanted, kept  [T]: routing weight of each row's own experts, summed over layers, and the part of
                  it that was served
    natural       distinct experts that rows chose; served: that were run
    """

    wanted: Scores
    kept: Scores
    natural: int = 0
    served: int = 0


class Loader(Protocol):
    """The part of `ExpertLoader` that the budget uses."""

    def at_hand(self, layer: int, experts: Sequence[int]) -> list[int]: ...


@dataclass(slots=True)
class ExpertBudget:
    """Expert budget of a verification, applied layer by layer.

    gates  gates of the MoE layers, in order
    timed  timer of the selection
    """

    rules: BudgetRules
    gates: Sequence[RouterGate]
    loader: Loader
    timed: Timed
    _reach: Scores | None = field(default=None, init=False)
    _kept: BudgetUse = field(init=False)

    def __post_init__(self) -> None:
        self._kept = BudgetUse(np.zeros(0, np.float32), np.zeros(0, np.float32))

    def begin(self, accept_prob: Sequence[float]) -> None:
        """Begin a verification whose rows are accepted with these probabilities."""
        rows = len(accept_prob)
        self._reach = np.asarray(accept_prob if self.rules.by_reach else [1.0] * rows, np.float32)
        self._kept = BudgetUse(np.zeros(rows, np.float32), np.zeros(rows, np.float32))

    def end(self) -> BudgetUse:
        """It is over; others have all their experts."""
        self._reach = None
        return self._kept

    def serve(self, layer: int, route: Route, active_rows: Sequence[int]) -> Route:
        """Choose the route to serve for an exact route that the host has read.

        active_rows  rows that are not pruned
        """
        if self._reach is None:
            return route
        with self.timed("select", layer):
            return self._within(layer, route, list(active_rows), self._reach)

    def _within(
        self, layer: int, route: Route, active_rows: list[int], accept_prob: Scores
    ) -> Route:
        gate, natural = self.gates[layer], route.host_ids
        logits = route.logits.cpu()
        shares = gate.shares(logits).numpy()
        if self.rules.counts is None:
            scores = accept_prob[active_rows] @ shares[active_rows]
        else:
            scores = self.rules.counts[layer].float().numpy()
        top_k = natural.shape[1]
        inside = self.rules.shortlist(scores, top_k, lambda ids: self.loader.at_hand(layer, ids))
        served = self._chosen(route, gate, logits, inside, active_rows)
        self._note(natural.numpy(), shares, served, active_rows)
        return served

    def _chosen(
        self,
        route: Route,
        gate: RouterGate,
        logits: Tensor,
        inside: NDArray[np.bool_],
        active_rows: list[int],
    ) -> Route:
        ids = route.host_ids
        lacking = ~inside[ids.numpy()].all(axis=1)
        if not lacking[active_rows].any():
            return route
        if self.rules.truncate:
            route.left_out = frozenset(np.flatnonzero(~inside).tolist())
            return route
        # Rows with all their experts keep them in the router's own order, so their result keeps
        # every bit.
        rows = torch.from_numpy(np.flatnonzero(lacking))
        ids, weights = ids.clone(), route.host_weights.clone()
        others = gate.choose(logits[rows], torch.from_numpy(inside), ids.shape[1])
        ids[rows], weights[rows] = others[0], others[1].to(weights.dtype)
        return route.instead(ids, weights)

    def _note(
        self, natural: NDArray[np.int64], shares: Scores, served: Route, active_rows: list[int]
    ) -> None:
        """Add a layer to the weights wanted and kept."""
        weights = np.take_along_axis(shares, natural, axis=1)
        given = (natural[:, :, None] == served.host_ids.numpy()[:, None, :]).any(-1)
        if served.left_out:
            given &= ~np.isin(natural, [*served.left_out])
        kept = self._kept
        kept.wanted += weights.sum(1)
        kept.kept += (weights * given).sum(1)
        kept.natural += len(np.unique(natural[active_rows]))
        kept.served += len(set(served.host_ids[active_rows].flatten().tolist()) - served.left_out)


class PredictedBudget:
    """Prediction of the experts that a verification will select, from its draft's routes so far.

    Experts outside it are not prefetched. Prefetched ones need no transfer, so they are selected.
    """

    def __init__(self, rules: BudgetRules, gates: Sequence[RouterGate], num_experts: int) -> None:
        self._rules, self._gates = rules, gates
        self._none = np.zeros(num_experts, np.float32)
        self._scores: dict[int, Scores] = {}
        self._inside: dict[int, frozenset[int]] = {}

    def begin(self) -> None:
        """Begin another draft."""
        self._scores.clear()
        self._inside.clear()

    def named(self, layer: int, route: Route, accept_prob: float) -> None:
        """Add the route of a drafted token (T = 1), accepted with this probability."""
        if route.router_logits is not None:
            shares = self._gates[layer].shares(route.router_logits.cpu())[0].numpy()
        else:  # a recorded pass has only the chosen experts
            shares = self._none.copy()
            weights = np.asarray(route.weights[0], np.float32)
            shares[route.ids[0]] = weights / weights.sum()
        self._add(layer, shares * np.float32(self._count(accept_prob)))

    def predicted(
        self, layer: int, prediction: RoutePrediction, accept_prob: Sequence[float]
    ) -> None:
        """Add predicted routes of tokens that no draft has run, with their acceptance
        probabilities.
        """
        shares = self._none.copy()
        for ids, chance in zip(prediction.ids, accept_prob, strict=True):
            shares[ids] += self._count(chance) / len(ids)
        self._add(layer, shares)

    def worth(self, layer: int, experts: list[int]) -> list[int]:
        """Filter a layer's experts to those that are worth a transfer, in the same order."""
        if layer not in self._inside:
            counts = self._rules.counts
            known = None if counts is None else counts[layer].float().numpy()
            scores = self._scores.get(layer, self._none) if known is None else known
            best = self._rules.shortlist(scores, 0, lambda experts: ())
            self._inside[layer] = frozenset(np.flatnonzero(best).tolist())
        inside = self._inside[layer]
        return [expert for expert in experts if expert in inside]

    def _count(self, accept_prob: float) -> float:
        return accept_prob if self._rules.by_reach else 1.0

    def _add(self, layer: int, shares: Scores) -> None:
        self._scores[layer] = self._scores.get(layer, self._none) + shares
        self._inside.pop(layer, None)
