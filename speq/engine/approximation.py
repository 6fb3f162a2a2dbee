"""Measures the effect of an expert budget: counted in every verification, and audited in some.

An audited verification runs twice over the same draft: within the budget, and then exactly. The
exact tokens and KV are kept.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor

from speq.engine.request_step import RequestStep
from speq.engine.sampler import Sampler
from speq.errors import present
from speq.layers.expert_budget import BudgetUse, ExpertBudget
from speq.models.moe_model import Scored
from speq.stats import ApproximationStats


@dataclass(slots=True)
class Approximation:
    """Runs verifications within a budget.

    audit_share  of verifications that are audited
    timed        times audits
    """

    budget: ExpertBudget
    audit_share: float
    timed: Callable[[str], AbstractContextManager[None]]
    _due: float = field(default=0.0, init=False)
    _kept: BudgetUse | None = field(default=None, init=False)
    _budgeted: Tensor | None = field(default=None, init=False)

    def score(self, score: Callable[[], Scored], accept_prob: Sequence[float]) -> Scored:
        """Verify a draft whose nodes are accepted with these probabilities, the pending one first.

        score  verifies it, with all experts or within a budget that has begun
        """
        self._kept = self._budgeted = None
        if len(accept_prob) == 1:  # without a draft, fewer experts would only be a worse model
            return score()
        self.budget.begin(accept_prob)
        try:
            scored = score()
        finally:
            self._kept = self.budget.end()
        self._due += self.audit_share
        if self._due < 1:
            return scored
        self._due -= 1
        self._budgeted = scored.logits.float().clone()
        with self.timed("audit"):
            return score()

    def report(
        self, step: RequestStep, scored: Scored, sampler: Sampler
    ) -> ApproximationStats | None:
        """Return the loss of the last verification in its accepted rows; None without a budget.

        Called before the outcome is added to the request.
        """
        if self._kept is None:
            return None
        kept, path = self._kept, step.outcome.path
        stats = ApproximationStats(
            verifications=1,
            natural=kept.natural,
            served=kept.served,
            wanted=float(kept.wanted[path].sum()),
            kept=float(kept.kept[path].sum()),
        )
        if self._budgeted is not None:
            self._compare(stats, step, scored.logits.float(), sampler)
        self._budgeted = None
        return stats

    def _compare(
        self, stats: ApproximationStats, step: RequestStep, exact: Tensor, sampler: Sampler
    ) -> None:
        """Compare the exact model's tokens with those within the budget."""
        budgeted = present(self._budgeted, "an audit comes before its verification")
        choice = sampler.choices(step.draft, budgeted, step.request)
        rows, token_ids = step.outcome.path, step.outcome.token_ids
        both = [logits[rows].log_softmax(-1) for logits in (exact, budgeted)]
        for at, (node, token_id) in enumerate(zip(rows, token_ids, strict=True)):
            stats.audited += 1
            stats.differing += choice(node) != token_id
            nats = float(both[0][at, token_id] - both[1][at, token_id])
            stats.nats += nats
            stats.nats_squared += nats * nats
