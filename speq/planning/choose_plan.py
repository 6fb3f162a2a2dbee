"""Decides how a run holds its experts and who drafts: one decision, made before anything is loaded.

Options and files leave some ways open, and the budget leaves some of those. The planner takes the
way of the least expected time per token: by a profile of `speq tune`, or else by a survey of the
machine, which takes some tenths of a second. A draft is held only where it is expected to win.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from speq.config import DraftOptions
from speq.errors import present
from speq.experts.codec import codec_of
from speq.governor.draft_length import LONGEST
from speq.governor.objectives import Objectives, longest_within
from speq.governor.prior import Prior
from speq.governor.profile import Profile
from speq.kernels import library
from speq.planning.assumptions import Assumptions
from speq.planning.candidates import drafter_of, open_candidates
from speq.planning.cost.peers import ALONE, Peers
from speq.planning.cost.planner import Outlook, choose
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.cost.survey import Survey
from speq.planning.demand import Budget
from speq.planning.fitting import FittingPlan, fit, fit_all, least_refusal, smallest
from speq.planning.forecasts import correction, way_of
from speq.planning.host_memory import host_plan
from speq.planning.memory import BudgetTooSmall, MemoryPlan
from speq.planning.model_spec import ModelSpec
from speq.planning.peers import ways_with
from speq.planning.reader_survey import LEAST_BYTES
from speq.units import format_bytes, format_forecast

logger = logging.getLogger("speq")

# A survey is rougher than a profile, and a draft takes slots for good: it must be expected to save
# this share of the time.
SURVEYED_MARGIN = 0.05


@dataclass(frozen=True, slots=True)
class PlanDecision:
    """How a run holds its experts.

    memory          planned for it
    reason          the planner's; None where there was nothing to weigh
    gives_up_draft  whether a draft would fit and is expected to lose
    longest         no draft is longer: by the plan, longer ones miss the time objectives
    prior           of the run's steps; None where nothing was weighed, or nothing is known of who
                    drafts
    """

    residency_plan: ResidencyPlan
    memory: MemoryPlan
    reason: str | None = None
    gives_up_draft: bool = False
    longest: int = LONGEST
    prior: Prior | None = None

    def replan(
        self, model_spec: ModelSpec, residency_plan: ResidencyPlan, budget: Budget
    ) -> "PlanDecision":
        """The same decision, with sizes of which more is known."""
        plan, memory = replan(model_spec, residency_plan, budget)
        return replace(self, residency_plan=plan, memory=memory)


@dataclass(frozen=True, slots=True)
class PlanChooser:
    """Chooses how a run holds its experts, of the ways that options and the budget leave.

    codec       the option
    prefetches  whether experts come before they are needed
    on_host     whether the host of a GPU computes missing experts, where a profile timed them
    peers       further GPUs
    """

    model_spec: ModelSpec
    budget: Budget
    drafts: DraftOptions
    codec: str
    prefetches: bool
    on_host: bool
    peers: Peers = ALONE

    def choose(
        self, profile: Profile | None, survey: Callable[[Sequence[str]], Survey]
    ) -> PlanDecision:
        """The way to hold the experts, and its memory.

        survey  measures the machine with codecs of these names; called where there is something to
                weigh and no profile can tell

        Raises SpeqError where options and files contradict each other or nothing fits.
        """
        spec, budget = self.model_spec, self.budget
        candidates = self._candidates
        fitting, refused = fit_all(spec, candidates, budget)
        # Records may turn out smaller than they usually are; the planner does not count on it.
        more, _ = fit_all(spec, [smallest(spec, way) for way, _ in refused], budget)
        if not fitting and not more:
            raise least_refusal(refused)
        decision = None
        if profile is not None:
            decision = self._by_profile(profile, fitting)
        if decision is None:
            decision = self._by_survey(survey, fitting + more)
        plan = smallest(spec, decision.residency_plan)
        if plan.slot_bytes != decision.residency_plan.slot_bytes:
            plan, memory = fit(spec, plan, budget)
            decision = replace(decision, residency_plan=plan, memory=memory)
        decision = replace(decision, residency_plan=self._with_peers(plan, profile, survey))
        host_plan(spec, plan, budget)  # refuses a host budget that is too small
        if drafter_of(self.drafts) != "none" and not plan.drafts and not decision.gives_up_draft:
            self._warn_of_no_draft()
        return decision

    @property
    def _candidates(self) -> Sequence[ResidencyPlan]:
        """The ways that options, files and further GPUs allow."""
        spec = self.model_spec
        ways = open_candidates(spec, self.drafts, self.codec, self.budget.on_cpu)
        return ways_with(self.peers, ways, spec.num_layers)

    def _with_peers(
        self,
        plan: ResidencyPlan,
        profile: Profile | None,
        survey: Callable[[Sequence[str]], Survey],
    ) -> ResidencyPlan:
        """The plan with what further GPUs hold, where it was not weighed."""
        spec = self.model_spec
        if plan.peers or not self.peers.slots_bytes:
            return plan
        if profile is None or plan.codec not in {*profile.decode_bytes_per_s, profile.codec}:
            assumptions = Assumptions.of_survey(survey((plan.codec,)), spec.shape)
        else:
            assumptions = Assumptions.of_profile(profile, spec.shape)
        known = replace(assumptions, peers=self.peers)
        return outlook_of(spec, known, [plan]).with_peers(plan)

    def expected_s(self, survey: Callable[[Sequence[str]], Survey]) -> float:
        """Seconds per token that the best way is expected to take, by what is measured."""
        spec = self.model_spec
        candidates = self._weighed(fit_all(spec, self._candidates, self.budget)[0])
        assumptions = self._surveyed(survey, candidates)
        chosen, _, _, _ = self._cheapest(assumptions, candidates, SURVEYED_MARGIN)
        return chosen.tpot_s

    def _warn_of_no_draft(self) -> None:
        spec = self.model_spec
        if spec.draft is None:
            logger.warning(
                "an INT4 draft would be about as large as the experts themselves: running without "
                "one; --drafter ngram needs none"
            )
            return
        unsized = self.drafts.draft_experts is None and not spec.codec.needs_draft
        least = min(map(spec.draft_bytes_of, spec.draft_parts))
        logger.warning(
            "the INT4 draft takes %s and does not fit the budget: running without one%s",
            format_bytes(least),
            "; --draft-experts has it hold a part of the experts" if unsized else "",
        )

    def _by_survey(
        self, survey: Callable[[Sequence[str]], Survey], fitting: Sequence[FittingPlan]
    ) -> PlanDecision:
        """Without a profile: the way of the least expected time per token, by what is measured. A
        single one is weighed where its survey is kept: a run of it corrects what is expected.
        """
        candidates = self._weighed(fitting)
        if len(candidates) == 1:
            [(plan, memory)] = candidates
            if not self.budget.on_cpu or self.model_spec.count * plan.moved_bytes < LEAST_BYTES:
                return PlanDecision(plan, memory)
        return self._by_cost(self._surveyed(survey, candidates), candidates, SURVEYED_MARGIN)

    def _surveyed(
        self, survey: Callable[[Sequence[str]], Survey], fitting: Sequence[FittingPlan]
    ) -> Assumptions:
        surveyed = survey(tuple(dict.fromkeys(way.codec for way, _ in fitting)))
        return replace(Assumptions.of_survey(surveyed, self.model_spec.shape), peers=self.peers)

    def _weighed(self, fitting: Sequence[FittingPlan]) -> list[FittingPlan]:
        """Those between which a survey tells."""
        candidates, on_cpu = self._prefer_drafts(fitting), self.budget.on_cpu
        if self.codec == "auto":
            candidates = drop_reference_kernels(self.model_spec, candidates, on_cpu)
        if not on_cpu:  # where codecs that need a draft are not tried
            candidates = [entry for entry in candidates if not entry[0].needs_draft] or candidates
        return candidates

    def _prefer_drafts(self, fitting: Sequence[FittingPlan]) -> list[FittingPlan]:
        """Those that draft, where options ask for a draft and there is room for one; or all."""
        drafting = [entry for entry in fitting if entry[0].drafts]
        return drafting if asks_for_draft(self.drafts) and drafting else list(fitting)

    def _by_profile(self, profile: Profile, fitting: Sequence[FittingPlan]) -> PlanDecision | None:
        """The way of the least expected time per token, of those whose speeds were measured; None
        where the profile cannot tell.
        """
        spec, on_cpu = self.model_spec, self.budget.on_cpu
        assumptions = replace(Assumptions.of_profile(profile, spec.shape), peers=self.peers)
        if not self.on_host:
            assumptions = replace(assumptions, host_bytes_per_s=0.0)
        computed = {*profile.decode_bytes_per_s, profile.codec}
        known = [
            (way, memory)
            for way, memory in fitting
            if way.codec in computed and (assumptions.knows_encoding(way, on_cpu) or not on_cpu)
        ]
        if not profile.drafted and any(way.drafter == "int4" for way, _ in known):
            logger.info("a draft fits, and the profile was measured without one: it is left aside")
            return None
        known = self._prefer_drafts(known)
        if not known:
            return None
        if len(known) > 1:
            return self._by_cost(assumptions, known)
        [(plan, memory)] = known
        if any(way.codec != plan.codec for way, _ in fitting):
            return None  # other codecs were not measured
        outlook = replace(outlook_of(spec, assumptions, [plan]), ahead=self.prefetches)
        return PlanDecision(plan, memory, longest=longest_for(self.drafts, outlook, plan))

    def _by_cost(
        self, assumptions: Assumptions, fitting: Sequence[FittingPlan], margin: float = 0.0
    ) -> PlanDecision:
        """The way of the least expected time per token, and why.

        margin  share of the time that a draft which takes slots must be expected to save
        """
        spec = self.model_spec
        chosen, reason, plans, outlook = self._cheapest(assumptions, fitting, margin)
        gives_up = any(way.drafts for way in plans) and not chosen.drafts
        step = present(chosen.expected, "a plan that was chosen has no estimate of its step")
        tuned = isinstance(assumptions.machine, Profile)
        way = way_of(chosen, self.budget.on_cpu, tuned)
        ratio = correction(spec.name, way, self.budget.budget_bytes)
        least_s, most_s = step.range_s
        paces = [1 / ratio / each_s for each_s in (step.token_s, most_s, least_s)]
        logger.info(
            "about %s ms per token expected (%s tokens/s, %s to %s) once slots are filled, %s%s",
            format_forecast(1e3 / paces[0]),
            *map(format_forecast, paces),
            "with a draft" if chosen.drafts else "without a draft",
            ", though one would fit" if gives_up else "",
        )
        reason = f"{reason} ({assumptions.source}; {assumptions.locality.source})"
        memory = fitting[plans.index(replace(chosen, expected=None, peers=()))][1]
        longest = longest_for(self.drafts, outlook, chosen)
        prior = None if outlook.drafts(chosen) is None else outlook.prior(chosen)
        return PlanDecision(chosen, memory, reason, gives_up, longest, prior)

    def _cheapest(
        self, assumptions: Assumptions, fitting: Sequence[FittingPlan], margin: float
    ) -> tuple[ResidencyPlan, str, list[ResidencyPlan], Outlook]:
        """`cost.planner.choose`, of what plans, and by which outlook."""
        spec = self.model_spec
        words_bytes = spec.codec.shape.nbytes
        plans = [
            assumptions.with_encoding_cost(way, words_bytes, self.budget.on_cpu)
            for way, _ in fitting
        ]
        outlook = replace(outlook_of(spec, assumptions, plans), ahead=self.prefetches)
        if self.drafts.draft_length:
            outlook = replace(outlook, lengths=(self.drafts.draft_length,))
        return *choose(outlook, plans, margin), plans, outlook


def drop_reference_kernels(
    model_spec: ModelSpec, fitting: Sequence[FittingPlan], on_cpu: bool
) -> list[FittingPlan]:
    """Drop the ways that encode experts which only the slow reference could then run."""
    device, kept = "cpu" if on_cpu else "cuda", []
    slow: dict[str, str] = {}
    for way, made in fitting:
        backend = library.backend_of(codec_of(way.codec, model_spec.codec.shape).op, device)
        if way.encoded and backend.name == "reference":
            slow[way.codec] = backend.reason
        else:
            kept.append((way, made))
    for name, reason in slow.items():
        logger.info(
            "codec %s: %s has no fast kernel here (%s)", model_spec.codec.name, name, reason
        )
    return kept or list(fitting)


def outlook_of(
    model_spec: ModelSpec, assumptions: Assumptions, residency_plans: Sequence[ResidencyPlan]
) -> Outlook:
    """The outlook of a model, with what is known of its head."""
    return assumptions.outlook(
        model_spec.num_layers, model_spec.pass_bytes, residency_plans, model_spec.head_acceptance
    )


def asks_for_draft(drafts: DraftOptions) -> bool:
    """True if a draft is asked for by name, by its experts or by its length."""
    named = drafts.draft not in ("auto", "none") or drafts.drafter not in ("auto", "none")
    sized = drafts.draft_experts not in (None, "auto")
    return named or sized or bool(drafts.draft_length)


def longest_for(drafts: DraftOptions, outlook: Outlook, residency_plan: ResidencyPlan) -> int:
    """The longest draft within the time objectives. Where the profile finds none, steps will have
    to tell.
    """
    objectives = objectives_of(drafts)
    timed = outlook.drafts(residency_plan) is not None
    if not timed or drafts.draft_length is not None or objectives == Objectives():
        return LONGEST
    longest = longest_within(
        objectives, (outlook.step_estimate(residency_plan, length) for length in range(LONGEST + 1))
    )
    if longest is None:
        logger.info("by the profile no draft length meets the objectives")
        return LONGEST
    logger.info("drafts are no longer than %d: by the profile, longer ones miss the goals", longest)
    return longest


def objectives_of(drafts: DraftOptions) -> Objectives:
    def seconds(limit_ms: float | None) -> float:
        return math.inf if limit_ms is None else limit_ms / 1e3

    return Objectives(seconds(drafts.tpot_slo_ms), seconds(drafts.latency_slo_ms))


def replan(model_spec: ModelSpec, residency_plan: ResidencyPlan, budget: Budget) -> FittingPlan:
    """Memory for another context, or for slots of which more is known: with the draft as before,
    or without it where only that fits.
    """
    try:
        return fit(model_spec, residency_plan, budget)
    except BudgetTooSmall:
        if not residency_plan.can_drop_draft:
            raise
        return fit(model_spec, residency_plan.without_draft, budget)
