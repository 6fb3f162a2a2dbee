"""What every expert of a layer makes of every row, and what budgets would make of that.

The oracle of MoE-Spec (Eq. 6) knows all outputs. It takes the experts, one after another, that
bring the layer's output nearest to the exact one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from bench.lab.budget_settings import BudgetCase
from speq.errors import OptionError
from speq.layers.exact_experts import ExactExperts
from speq.layers.gates import RouterGate
from speq.routing import Route


def oracle_order(outputs: Tensor, shares: Tensor, exact: Tensor) -> list[int]:
    """Experts as the oracle takes them (Eq. 6): outputs [T, E, H], shares [T, E], exact [T, H]."""
    parts = outputs * shares[..., None]
    sizes = parts.square().sum((0, 2))
    left = exact.clone()
    order: list[int] = []
    for _ in range(outputs.shape[1]):
        # |left - part|^2, less |left|^2, which is the same for all.
        errors = sizes - 2 * torch.einsum("teh,th->e", parts, left)
        errors[order] = torch.inf
        best = int(errors.argmin())
        order.append(best)
        left -= parts[:, best]
    return order


def order_of(
    ranking: str, outputs: Tensor, shares: Tensor, exact: Tensor, counts: Tensor | None
) -> list[int]:
    """A layer's experts, the first to be kept first; the lower of two alike."""
    if ranking == "oracle":
        return oracle_order(outputs, shares, exact)
    scores = shares.sum(0) if ranking == "router" else counts
    if scores is None:
        raise OptionError("a static ranking goes by counts, and there are none; give expert_counts")
    return np.argsort(-scores.float().numpy(), kind="stable").tolist()


def kept_output(
    outputs: Tensor, route: Route, logits: Tensor, gate: RouterGate, allowed: Tensor, truncate: bool
) -> Tensor:
    """[T, H] of a layer within a budget: outputs [T, E, H], allowed [E] bool."""
    ids, weights = route.topk_ids, route.topk_weights.float()
    if truncate:
        weights = weights * allowed[ids]
    else:
        lacking = ~allowed[ids].all(-1)
        ids, weights = ids.clone(), weights.clone()
        if lacking.any():
            chosen = gate.choose(logits[lacking], allowed, ids.shape[1])
            ids[lacking], weights[lacking] = chosen[0], chosen[1].float()
    rows = torch.arange(len(ids))[:, None]
    return (outputs[rows, ids] * weights[..., None]).sum(1)


@dataclass(slots=True)
class Reconstruction:
    """|O - O*|^2 and |O*|^2 of each layer, summed over rows (section 4.5 of the paper)."""

    errors: list[float]
    sizes: list[float]

    @property
    def by_layer(self) -> list[float]:
        return [error / size for error, size in zip(self.errors, self.sizes, strict=True)]


@dataclass(slots=True)
class Study:
    """A bank that runs all experts of a layer, compares budgets on them and goes on with one.

    bank      runs experts exactly
    gates     of the layers
    compared  those whose errors are measured, where all experts lie in slots or none counts
    counts    [L, E] that static rankings go by
    goes_on   what later layers see; None: the exact output
    on        whether passes are studied; others are exact
    """

    drafts: ClassVar[bool] = False
    backend: ExactExperts
    gates: Sequence[RouterGate]
    num_experts: int
    compared: Sequence[BudgetCase] = ()
    counts: Tensor | None = None
    goes_on: BudgetCase | None = None
    found: dict[BudgetCase, Reconstruction] = field(default_factory=dict)

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        rows = len(hidden_states)
        every = torch.arange(self.num_experts).repeat(rows, 1)
        whole = Route(every, torch.ones_like(every, dtype=route.topk_weights.dtype))
        outputs = self.backend.outputs(layer, hidden_states, whole).float()
        gate, logits = self.gates[layer], route.logits
        at = torch.arange(rows)[:, None]
        exact = (outputs[at, route.topk_ids] * route.topk_weights.float()[..., None]).sum(1)
        shares = gate.shares(logits)
        counts = None if self.counts is None else self.counts[layer]
        orders: dict[str, list[int]] = {}

        def made(budget: BudgetCase) -> Tensor:
            if budget.ranking not in orders:
                orders[budget.ranking] = order_of(budget.ranking, outputs, shares, exact, counts)
            allowed = torch.zeros(self.num_experts, dtype=torch.bool)
            allowed[orders[budget.ranking][: budget.experts]] = True
            truncate = budget.policy == "truncate"
            return kept_output(outputs, route, logits, gate, allowed, truncate)

        for budget in self.compared:
            self._note(budget, layer, made(budget), exact)
        result = exact if self.goes_on is None else made(self.goes_on)
        return result.to(hidden_states.dtype)

    def _note(self, budget: BudgetCase, layer: int, made: Tensor, exact: Tensor) -> None:
        zeros: Callable[[], list[float]] = lambda: [0.0] * len(self.gates)  # noqa: E731
        found = self.found.setdefault(budget, Reconstruction(zeros(), zeros()))
        found.errors[layer] += float((made - exact).square().sum())
        found.sizes[layer] += float(exact.square().sum())
