"""What fits a budget and what it would give, before anything is loaded: `speq plan`.

Memory is planned by the same code as a run's (`speq.planning.memory`); times are the governor's
(`speq.planning.cost.planner`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from speq.governor.profile import Profile
from speq.planning.assumptions import Assumptions
from speq.planning.candidates import candidates_of, with_measured_head
from speq.planning.choose_plan import outlook_of
from speq.planning.cost.planner import Outlook, choose
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.demand import Budget
from speq.planning.fitting import fit, fit_all, least_refusal
from speq.planning.forecasts import correction, way_of
from speq.planning.host_memory import HostPlan, host_plan
from speq.planning.memory import BudgetTooSmall, MemoryPlan
from speq.planning.model_spec import ModelSpec
from speq.planning.peers import ways_with
from speq.units import format_bytes


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """Ways to hold a model under a budget, each with its memory, the best of them, and where
    speculation breaks even (`Outlook.break_even_acceptance`, `break_even_link`).

    reason    why the best one is
    worst     the reason if tokens chose experts independently (MoESD's N(t))
    left_out  by name of the ways that do not fit: why
    host_draft  the best way with the draft's experts on a GPU's host, which no run has yet; None:
               the host computes none, or there is no draft
    with_head  memory with the head beside the model for a drafter; None where there is none, or
               where it does not fit
    """

    model_spec: ModelSpec
    budget: Budget
    assumptions: Assumptions
    candidates: list[ResidencyPlan]
    memory: list[MemoryPlan]
    reason: str
    worst: str
    break_even_acceptance: float | None
    break_even_link_bytes_per_s: float | None
    left_out: dict[str, str] = field(default_factory=dict)
    with_head: MemoryPlan | None = None
    host_draft: ResidencyPlan | None = None

    @property
    def host(self) -> HostPlan | None:
        """The host's memory with the best of them; None where no limit is set to it."""
        return host_plan(self.model_spec, self.candidates[self.best], self.budget)

    @property
    def best(self) -> int:
        """Index of the candidate of the least expected time per token."""
        return min(range(len(self.candidates)), key=lambda at: self.candidates[at].tpot_s)

    @property
    def hit_rates(self) -> tuple[float, float]:
        """Shares of what tokens choose: of experts on further GPUs, and in slots of any."""
        plan = self.candidates[self.best]
        peers, routes = self.assumptions.peers, self.assumptions.locality
        covers = peers.covers[sum(plan.peers)] if plan.peers else 0.0
        own = routes.without(sum(plan.peers), covers)
        missed = own.misses(plan.slots / self.model_spec.num_layers, 1)
        return covers, 1 - missed / routes.top_k

    @property
    def best_s(self) -> float:
        """Its expected time per token."""
        return self.candidates[self.best].tpot_s

    @property
    def correction(self) -> float:
        """What runs of this machine multiply the best one's time by."""
        return self.correction_of(self.candidates[self.best])

    def correction_of(self, candidate: ResidencyPlan) -> float:
        """What runs of this machine that held experts so multiply its time by."""
        way = way_of(candidate, self.budget.on_cpu, isinstance(self.assumptions.machine, Profile))
        return correction(self.model_spec.name, way, self.budget.budget_bytes)

    def to_dict(self) -> dict[str, Any]:
        """The object of `--json`."""
        entries = [candidate_entry(candidate) for candidate in self.candidates]
        host = self.host
        best = self.memory[self.best]
        return {
            "model": self.model_spec.name,
            "budget_bytes": self.budget.budget_bytes,
            "context_length": self.budget.context,
            "expert_bytes": self.model_spec.count * self.model_spec.codec.shape.nbytes,
            "dense": self.model_spec.dense.name,
            "items": dict(best.items),
            "unused_bytes": best.report()["unused"],
            "host": host and host.to_dict(),
            "with_head": self.with_head
            and {"items": dict(self.with_head.items), "slots": self.with_head.slots},
            "host_draft": self.host_draft and candidate_entry(self.host_draft),
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


def candidate_entry(plan: ResidencyPlan) -> dict[str, Any]:
    """One of `candidates` in the object of `--json`. encoded: from words, as they are read;
    draft_experts: of each layer that an INT4 draft holds, None of one that holds all; peers: of
    each layer on each further GPU. The two TPOTs beside the expected one are those with all
    transfers exposed (Eq. 3 of MoE-SpeQ) and with all hidden that can be.
    """
    step = plan.step
    return {
        "codec": plan.codec,
        "encoded": plan.encode_s > 0,
        "draft": plan.drafts,
        "drafter": plan.drafter,
        "draft_experts": plan.draft_experts,
        "slots": plan.slots,
        "peers": list(plan.peers),
        "draft_length": step.draft_length,
        "tpot_ms": plan.tpot_s * 1e3,
        "exposed_tpot_ms": step.serial_s / step.tokens * 1e3,
        "hidden_tpot_ms": step.overlapped_s / step.tokens * 1e3,
        "moved_bytes_per_token": plan.moved_bytes_per_token,
        "limit": step.limit,
    }


def plan_budget(model_spec: ModelSpec, budget: Budget, assumptions: Assumptions) -> BudgetPlan:
    """Plan every way to hold the experts.

    Raises SpeqError, item by item, where not even the smallest fits without a draft, and where the
    host's memory is too small.
    """
    left_out: dict[str, str] = {}
    candidates = [
        way
        for way in candidates_of(model_spec, budget.on_cpu)
        if assumptions.knows_encoding(way, budget.on_cpu)
    ]
    candidates += with_measured_head(model_spec, candidates)
    if model_spec.draft is None:
        left_out["with a draft"] = "no INT4 copy of these experts is much smaller than they are"
    elif not assumptions.drafted:
        left_out["with a draft"] = "the profile was measured without one"
        candidates = [way for way in candidates if way.drafter != "int4"]
    words_bytes = model_spec.codec.shape.nbytes
    candidates = [
        assumptions.with_encoding_cost(way, words_bytes, budget.on_cpu) for way in candidates
    ]
    open_ways = ways_with(assumptions.peers, candidates, model_spec.num_layers)
    alone = [way.name for way in candidates if way not in open_ways]
    left_out |= dict.fromkeys(alone, "further GPUs can hold none of its experts")
    candidates = [*open_ways]
    fitting, refused = fit_all(model_spec, candidates, budget)
    left_out |= {
        way.name: f"takes {format_bytes(error.needed_bytes)} at the least" for way, error in refused
    }
    if not fitting:
        raise least_refusal(refused)
    plans = [plan for plan, _ in fitting]
    outlook = outlook_of(model_spec, assumptions, plans)
    independent = replace(assumptions.locality, curve=None)
    made = BudgetPlan(
        model_spec,
        budget,
        assumptions,
        [outlook.with_estimate(plan) for plan in plans],
        [made for _, made in fitting],
        choose(outlook, plans)[1],
        choose(replace(outlook, locality=independent), plans)[1],
        outlook.break_even_acceptance(plans),
        outlook.break_even_link(plans),
        left_out,
        plan_with_head(model_spec, plans, budget, left_out),
        host_draft_of(model_spec, candidates, budget, outlook),
    )
    _ = made.host  # refuses a host budget that is too small
    return made


def host_draft_of(
    model_spec: ModelSpec, candidates: Sequence[ResidencyPlan], budget: Budget, outlook: Outlook
) -> ResidencyPlan | None:
    """The best way whose draft has its experts in a GPU's host memory, beside the exact ones, and
    computed there: they take no slots. None where there is none.
    """
    if not math.isfinite(outlook.host_draft_token_s):
        return None
    ways = [
        replace(way, draft_on_host=True, draft_bytes=model_spec.dense_draft.nbytes)
        for way in candidates
        if way.drafter == "int4" and way.draft_experts is None and not way.needs_draft
    ]
    beside = budget.beside
    if beside is not None and beside.host_bytes is not None:
        left_bytes = beside.host_bytes - model_spec.base_bytes
        ways = [way for way in ways if left_bytes >= model_spec.count * way.slot_bytes]
    weighed = [outlook.with_estimate(plan) for plan, _ in fit_all(model_spec, ways, budget)[0]]
    return min(weighed, key=lambda plan: plan.tpot_s, default=None)


def plan_with_head(
    model_spec: ModelSpec, plans: Sequence[ResidencyPlan], budget: Budget, left_out: dict[str, str]
) -> MemoryPlan | None:
    """Memory of the first way without a draft, if the model's head drafts in it.

    left_out  is told why it does not fit
    """
    plain = next((plan for plan in plans if not plan.drafts), None)
    if model_spec.head is None or plain is None:
        return None
    try:
        return fit(model_spec, replace(plain, drafter="head"), budget)[1]
    except BudgetTooSmall as error:
        left_out["with a head"] = f"takes {format_bytes(error.needed_bytes)} at the least"
        return None
