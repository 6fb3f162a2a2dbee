"""What fits a budget and what it would give, before anything is loaded: `speq plan`.

Memory is planned by the same code as a run's (`speq.planning.memory`); times are the governor's
(`speq.governor.planner`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from speq.governor.holding import Holding
from speq.governor.planner import choose
from speq.planning.assumptions import Assumptions
from speq.planning.demand import Budget
from speq.planning.fitting import fit, fitted, least_refusal
from speq.planning.host_memory import HostPlan, host_plan
from speq.planning.memory import BudgetTooSmall, MemoryPlan
from speq.planning.settle import outlook_of
from speq.planning.subject import Subject
from speq.planning.ways import ways_of, with_measured_head
from speq.units import format_bytes


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """Ways to hold a model under a budget, each with its memory, the best of them, and where
    speculation breaks even (`Outlook.break_even_acceptance`, `break_even_link`).

    reason    why the best one is
    worst     the reason if tokens chose experts independently (MoESD's N(t))
    left_out  by name of the ways that do not fit: why
    with_head  memory with the head beside the model for a drafter; None where there is none, or
               where it does not fit
    """

    subject: Subject
    budget: Budget
    assumptions: Assumptions
    candidates: list[Holding]
    memory: list[MemoryPlan]
    reason: str
    worst: str
    break_even_acceptance: float | None
    break_even_link_bytes_per_s: float | None
    left_out: dict[str, str] = field(default_factory=dict)
    with_head: MemoryPlan | None = None

    @property
    def host(self) -> HostPlan | None:
        """The host's memory with the best of them; None where no limit is set to it."""
        return host_plan(self.subject, self.candidates[self.best], self.budget)

    @property
    def best(self) -> int:
        """Index of the candidate of the least expected time per token."""
        return min(range(len(self.candidates)), key=lambda at: self.candidates[at].cost_s)

    def to_dict(self) -> dict[str, Any]:
        """The object of `--json`."""
        entries = [candidate_entry(candidate) for candidate in self.candidates]
        host = self.host
        best = self.memory[self.best]
        return {
            "model": self.subject.name,
            "budget_bytes": self.budget.budget_bytes,
            "context_length": self.budget.context,
            "expert_bytes": self.subject.count * self.subject.codec.shape.nbytes,
            "dense": self.subject.dense.name,
            "items": dict(best.items),
            "unused_bytes": best.report()["unused"],
            "host": host and host.to_dict(),
            "with_head": self.with_head
            and {
                "items": dict(self.with_head.items),
                "slots": self.with_head.slots,
            },
            "candidates": entries,
            "best": entries[self.best],
            "reason": self.reason,
            "independent_routes": self.worst,
            "left_out": self.left_out,
            "break_even_acceptance": self.break_even_acceptance,
            "break_even_link_bytes_per_s": self.break_even_link_bytes_per_s,
            "assumptions": {
                "machine": self.assumptions.source,
                "link_bytes_per_s": self.assumptions.link.bandwidth_bytes_per_s,
                "locality": self.assumptions.locality.source,
                "acceptance": self.assumptions.acceptance,
            },
        }


def candidate_entry(holding: Holding) -> dict[str, Any]:
    """One of `candidates` in the object of `--json`. encoded: from words, as they are read;
    draft_experts: of each layer that an INT4 draft holds, None of one that holds all. The two
    TPOTs beside the expected one are those with all transfers exposed (Eq. 3 of MoE-SpeQ) and with
    all hidden that can be.
    """
    cycle = holding.cycle
    return {
        "codec": holding.codec,
        "encoded": holding.encode_s > 0,
        "draft": holding.drafts,
        "drafter": holding.drafter,
        "draft_experts": holding.draft_experts,
        "slots": holding.slots,
        "draft_length": cycle.draft_length,
        "tpot_ms": holding.tpot_s * 1e3,
        "exposed_tpot_ms": cycle.serial_s / cycle.tokens * 1e3,
        "hidden_tpot_ms": cycle.overlapped_s / cycle.tokens * 1e3,
        "moved_bytes_per_token": holding.moved_bytes_per_token,
        "limit": cycle.limit,
    }


def plan(subject: Subject, budget: Budget, assumptions: Assumptions) -> BudgetPlan:
    """Plan every way to hold the experts.

    Raises SpeqError, item by item, where not even the smallest fits without a draft, and where the
    host's memory is too small.
    """
    left_out: dict[str, str] = {}
    ways = [way for way in ways_of(subject, budget.on_cpu) if assumptions.timed(way, budget.on_cpu)]
    ways += with_measured_head(subject, ways)
    if subject.draft is None:
        left_out["with a draft"] = "no INT4 copy of these experts is much smaller than they are"
    elif not assumptions.drafted:
        left_out["with a draft"] = "the profile was measured without one"
        ways = [way for way in ways if way.drafter != "int4"]
    words_bytes = subject.codec.shape.nbytes
    ways = [assumptions.priced(way, words_bytes, budget.on_cpu, subject.count) for way in ways]
    fitting, refused = fitted(subject, ways, budget)
    left_out |= {
        way.name: f"takes {format_bytes(error.needed_bytes)} at the least" for way, error in refused
    }
    if not fitting:
        raise least_refusal(refused)
    holdings = [holding for holding, _ in fitting]
    outlook = outlook_of(subject, assumptions, holdings)
    independent = replace(assumptions.locality, curve=None)
    made = BudgetPlan(
        subject,
        budget,
        assumptions,
        [outlook.weighed(holding) for holding in holdings],
        [made for _, made in fitting],
        choose(outlook, holdings)[1],
        choose(replace(outlook, locality=independent), holdings)[1],
        outlook.break_even_acceptance(holdings),
        outlook.break_even_link(holdings),
        left_out,
        with_head(subject, holdings, budget, left_out),
    )
    _ = made.host  # refuses a host budget that is too small
    return made


def with_head(
    subject: Subject, holdings: Sequence[Holding], budget: Budget, left_out: dict[str, str]
) -> MemoryPlan | None:
    """Memory of the first way without a draft, if the model's head drafts in it.

    left_out  is told why it does not fit
    """
    plain = next((holding for holding in holdings if not holding.drafts), None)
    if subject.head is None or plain is None:
        return None
    try:
        return fit(subject, replace(plain, drafter="head"), budget)[1]
    except BudgetTooSmall as error:
        left_out["with a head"] = f"takes {format_bytes(error.needed_bytes)} at the least"
        return None
