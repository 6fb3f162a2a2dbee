"""What fits a budget and what it would give, before anything is loaded.

Memory is planned by the same code as a run's (`speq.planning.memory`); times are the governor's
(`speq.governor.planner`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from speq.errors import SpeqError
from speq.governor.locality import PUBLISHED, Locality, RouteCurve
from speq.governor.planner import Candidate, Choice, Holding, Outlook, PassBytes, Speeds, choose
from speq.governor.presets import Rates
from speq.governor.profile import Profile
from speq.governor.roofline import Link
from speq.models.shape import ModelShape
from speq.planning import memory
from speq.planning.memory import MemoryPlan
from speq.planning.subject import Budget, Subject, Way

# That a token drafted by INT4 experts stands, where it was never measured: "over 90 %" in MoE-SpeQ
# 4.5; 0.92 to 0.98 on the bundled model.
DEFAULT_ACCEPTANCE = 0.9


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What expected times rest on.

    machine  bandwidths, or what was measured of this model
    link     in place of the machine's; None: the machine's
    """

    machine: Rates | Profile
    locality: Locality
    acceptance: float
    link_bytes_per_s: float | None = None

    @classmethod
    def of_profile(cls, profile: Profile, shape: ModelShape) -> "Assumptions":
        """What was measured of this model; published routes and an acceptance where none were."""
        experts = shape.experts
        curve = routes_of(profile, shape) or PUBLISHED
        return cls(
            profile,
            Locality(experts.num_experts, shape.top_k, curve),
            DEFAULT_ACCEPTANCE if profile.acceptance is None else profile.acceptance,
        )

    @property
    def link(self) -> Link:
        machine = self.machine
        link = machine.slow_tier if isinstance(machine, Profile) else Link(machine.link_bytes_per_s)
        given = self.link_bytes_per_s
        return link if given is None else Link(given, link.overhead_s, link.first_fetch_s)

    @property
    def source(self) -> str:
        machine = self.machine
        if isinstance(machine, Rates):
            return machine.source
        given = "" if self.link_bytes_per_s is None else ", link as given"
        return f"profile measured on {machine.key.device}{given}"

    @property
    def drafted(self) -> bool:
        """Whether it is known how fast drafts are."""
        return not isinstance(self.machine, Profile) or self.machine.drafted

    def encoded_by(self, on_cpu: bool) -> frozenset[str]:
        """Codecs by which it is known how fast published words are encoded as they are read. What
        a GPU reads, host memory holds encoded already.
        """
        if not on_cpu or not isinstance(self.machine, Profile):
            return frozenset()
        return frozenset(self.machine.encode_bytes_per_s)

    def holding(self, subject: Subject, budget: Budget, way: Way, slots: int) -> Holding:
        """What a miss and a use cost of experts held so."""
        slot_bytes, words_bytes = way.held.slot_bytes, subject.codec.shape.nbytes
        codes_bytes = way.held.draft_bytes // subject.count if way.codec == "residual" else 0
        encodes = way.encoded and budget.on_cpu
        encode_s = 0.0
        if encodes and isinstance(self.machine, Profile):
            encode_s = words_bytes / self.machine.encode_bytes_per_s[way.codec]
        return Holding(
            way.codec,
            way.drafts,
            slots,
            words_bytes if encodes else slot_bytes,
            slot_bytes + codes_bytes,
            encode_s,
        )

    def outlook(self, num_layers: int, sizes: PassBytes, holdings: Iterable[Holding]) -> Outlook:
        machine, locality = self.machine, self.locality
        if isinstance(machine, Profile):
            speeds = Speeds.of_profile(
                machine, lambda rows: num_layers * locality.distinct(rows), holdings
            )
        else:
            speeds = Speeds.of_rates(machine, sizes, holdings)
        return Outlook(num_layers, locality, speeds, self.link, self.acceptance)


def routes_of(profile: Profile, shape: ModelShape) -> RouteCurve | None:
    """The model's own, where they were recorded for long enough."""
    if len(profile.routes) < 2:
        return None
    source = "this model, recorded with the profile"
    return RouteCurve(source, shape.experts.num_experts, shape.top_k, profile.routes)


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """Ways to hold a model under a budget, each with its memory, the best of them, and where
    speculation breaks even (`Outlook.break_even_acceptance`, `break_even_link`).

    worst     the choice if tokens chose experts independently (MoESD's N(t))
    left_out  why, by name, of ways that do not fit
    """

    subject: Subject
    budget: Budget
    assumptions: Assumptions
    candidates: list[Candidate]
    memory: list[MemoryPlan]
    choice: Choice
    worst: Choice
    break_even_acceptance: float | None
    break_even_link_bytes_per_s: float | None
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> int:
        """Index of the candidate of the least expected time per token."""
        return min(range(len(self.candidates)), key=lambda at: self.candidates[at].tpot_s)

    def to_dict(self) -> dict[str, Any]:
        """The object of `--json`."""
        entries = [candidate_entry(candidate) for candidate in self.candidates]
        best = self.memory[self.best]
        return {
            "model": self.subject.name,
            "budget_bytes": self.budget.budget_bytes,
            "context_length": self.budget.context,
            "expert_bytes": self.subject.count * self.subject.codec.shape.nbytes,
            "items": dict(best.items),
            "unused_bytes": best.report()["unused"],
            "candidates": entries,
            "best": entries[self.best],
            "reason": self.choice.reason,
            "independent_routes": self.worst.reason,
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


def candidate_entry(candidate: Candidate) -> dict[str, Any]:
    """One of `candidates` in the object of `--json`. encoded: from words, as they are read. The two
    TPOTs beside the expected one are those with all transfers exposed (Eq. 3 of MoE-SpeQ) and with
    all hidden that can be.
    """
    cycle = candidate.cycle
    return {
        "codec": candidate.holding.codec,
        "encoded": candidate.holding.encode_s > 0,
        "draft": candidate.holding.draft,
        "slots": candidate.holding.slots,
        "draft_length": cycle.draft_length,
        "tpot_ms": candidate.tpot_s * 1e3,
        "exposed_tpot_ms": cycle.serial_s / cycle.tokens * 1e3,
        "hidden_tpot_ms": cycle.overlapped_s / cycle.tokens * 1e3,
        "moved_bytes_per_token": candidate.moved_bytes_per_token,
        "limit": cycle.limit,
    }


def plan(subject: Subject, budget: Budget, assumptions: Assumptions) -> BudgetPlan:
    """Plan every way to hold the experts.

    Raises SpeqError, item by item, where not even the smallest fits without a draft.
    """
    holdings: list[Holding] = []
    plans: list[MemoryPlan] = []
    left_out: dict[str, str] = {}
    refused: dict[int, SpeqError] = {}
    ways = subject.ways(assumptions.encoded_by(budget.on_cpu))
    if subject.draft is None:
        left_out["with a draft"] = "experts of these dimensions have no INT4 copy"
    elif not assumptions.drafted:
        left_out["with a draft"] = "the profile was measured without one"
        ways = [way for way in ways if not way.drafts]
    for way in ways:
        try:
            made = memory.plan(subject.demand(way, budget), budget.budget_bytes, budget.context)
        except SpeqError as error:
            refused[way.held.slot_bytes + way.held.draft_bytes] = error
            left_out[assumptions.holding(subject, budget, way, 0).name] = str(error)
        else:
            plans.append(made)
            holdings.append(assumptions.holding(subject, budget, way, made.slots))
    if not holdings:
        raise refused[min(refused)]
    outlook = assumptions.outlook(subject.num_layers, subject.pass_bytes, holdings)
    independent = replace(assumptions.locality, curve=None)
    return BudgetPlan(
        subject,
        budget,
        assumptions,
        outlook.candidates(holdings),
        plans,
        choose(outlook, holdings),
        choose(replace(outlook, locality=independent), holdings),
        outlook.break_even_acceptance(holdings),
        outlook.break_even_link(holdings),
        left_out,
    )
