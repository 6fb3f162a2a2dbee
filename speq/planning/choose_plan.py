"""Decides how a run holds its experts and who drafts: one decision, made before anything is loaded.

Options and files leave some ways open, and the budget leaves some of those. The planner takes the
way of the least expected time per token: by a profile of `speq tune`, or else by a survey of the
machine, which takes some tenths of a second. A draft is held only where it is expected to win.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from speq.config import RunConfig
from speq.experts.codec import codec_of
from speq.governor.draft_length import LONGEST
from speq.governor.objectives import Objectives, longest_within
from speq.governor.planner import Outlook, choose
from speq.governor.prior import Prior
from speq.governor.profile import Profile
from speq.governor.residency_plan import ResidencyPlan
from speq.governor.survey import Survey
from speq.kernels import library
from speq.planning.assumptions import Assumptions
from speq.planning.candidates import drafter_of, open_candidates
from speq.planning.demand import Budget
from speq.planning.fitting import FittingPlan, fit, fit_all, least_refusal, smallest
from speq.planning.host_memory import host_plan
from speq.planning.memory import BudgetTooSmall, MemoryPlan
from speq.planning.model_spec import ModelSpec
from speq.units import format_bytes

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
    prior           of the run's cycles; None where nothing was weighed, or nothing is known of who
                    drafts
    """

    residency_plan: ResidencyPlan
    memory: MemoryPlan
    reason: str | None = None
    gives_up_draft: bool = False
    longest: int = LONGEST
    prior: Prior | None = None


def choose_plan(
    model_spec: ModelSpec,
    budget: Budget,
    config: RunConfig,
    profile: Profile | None,
    survey: Callable[[Sequence[str]], Survey],
) -> PlanDecision:
    """The way to hold the experts, and its memory.

    survey  measures the machine with codecs of these names; called where there is something to
            weigh and no profile can tell

    Raises SpeqError where options and files contradict each other or nothing fits.
    """
    candidates = open_candidates(model_spec, config, budget.on_cpu)
    fitting, refused = fit_all(model_spec, candidates, budget)
    # Records may turn out smaller than they usually are; the planner does not count on it.
    more, _ = fit_all(model_spec, [smallest(model_spec, way) for way, _ in refused], budget)
    if not fitting and not more:
        raise least_refusal(refused)
    settled = None
    if profile is not None:
        settled = by_profile(model_spec, budget, config, profile, fitting)
    if settled is None:
        settled = by_survey(model_spec, budget, config, survey, fitting + more)
    residency_plan = smallest(model_spec, settled.residency_plan)
    if residency_plan.slot_bytes != settled.residency_plan.slot_bytes:
        residency_plan, made = fit(model_spec, residency_plan, budget)
        settled = replace(settled, residency_plan=residency_plan, memory=made)
    host_plan(model_spec, residency_plan, budget)  # refuses a host budget that is too small
    undrafted = (
        drafter_of(config) != "none" and not residency_plan.drafts and not settled.gives_up_draft
    )
    if undrafted and model_spec.draft is None:
        logger.warning(
            "an INT4 draft would be about as large as the experts themselves: running without one; "
            "--drafter ngram needs none"
        )
    elif undrafted:
        unsized = config.draft_experts is None and not model_spec.codec.needs_draft
        least = min(map(model_spec.draft_bytes_of, model_spec.draft_parts))
        logger.warning(
            "the INT4 draft takes %s and does not fit the budget: running without one%s",
            format_bytes(least),
            "; --draft-experts has it hold a part of the experts" if unsized else "",
        )
    return settled


def fast(model_spec: ModelSpec, fitting: Sequence[FittingPlan], on_cpu: bool) -> list[FittingPlan]:
    """Without the ways that encode experts which only the slow reference could then run."""
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


def by_survey(
    model_spec: ModelSpec,
    budget: Budget,
    config: RunConfig,
    survey: Callable[[Sequence[str]], Survey],
    fitting: Sequence[FittingPlan],
) -> PlanDecision:
    """Without a profile: the way of the least expected time per token, by what is measured now."""
    candidates = asked_for(config, fitting)
    if config.codec == "auto":
        candidates = fast(model_spec, candidates, budget.on_cpu)
    if not budget.on_cpu:  # where codecs that need a draft are not tried
        candidates = [entry for entry in candidates if not entry[0].needs_draft] or candidates
    if len(candidates) == 1:
        [(residency_plan, made)] = candidates
        return PlanDecision(residency_plan, made)
    surveyed = survey(list(dict.fromkeys(way.codec for way, _ in candidates)))
    assumptions = Assumptions.of_survey(surveyed, model_spec.shape)
    return choose_by_cost(model_spec, budget, config, assumptions, candidates, SURVEYED_MARGIN)


def asked_for(config: RunConfig, fitting: Sequence[FittingPlan]) -> list[FittingPlan]:
    """Those that draft, where options ask for a draft and there is room for one; or all."""
    drafting = [entry for entry in fitting if entry[0].drafts]
    return drafting if must_draft(config) and drafting else list(fitting)


def by_profile(
    model_spec: ModelSpec,
    budget: Budget,
    config: RunConfig,
    profile: Profile,
    fitting: Sequence[FittingPlan],
) -> PlanDecision | None:
    """The way of the least expected time per token, of those whose speeds were measured; None where
    the profile cannot tell.
    """
    assumptions = Assumptions.of_profile(profile, model_spec.shape)
    computed = {*profile.decode_bytes_per_s, profile.codec}
    known = [
        (way, made)
        for way, made in fitting
        if way.codec in computed and (assumptions.timed(way, budget.on_cpu) or not budget.on_cpu)
    ]
    if not profile.drafted and any(way.drafter == "int4" for way, _ in known):
        logger.info("a draft fits, and the profile was measured without one: it is left aside")
        return None
    known = asked_for(config, known)
    if not known:
        return None
    if len(known) == 1:
        [(residency_plan, made)] = known
        if any(way.codec != residency_plan.codec for way, _ in fitting):
            return None  # other codecs were not measured
        outlook = outlook_of(model_spec, assumptions, [residency_plan])
        outlook = replace(outlook, ahead=config.prefetch != "none")
        return PlanDecision(
            residency_plan, made, longest=longest_for(config, outlook, residency_plan)
        )
    return choose_by_cost(model_spec, budget, config, assumptions, known)


def choose_by_cost(
    model_spec: ModelSpec,
    budget: Budget,
    config: RunConfig,
    assumptions: Assumptions,
    fitting: Sequence[FittingPlan],
    margin: float = 0.0,
) -> PlanDecision:
    """The way of the least expected time per token, and why.

    margin  share of the time that a draft which takes slots must be expected to save
    """
    words_bytes = model_spec.codec.shape.nbytes
    residency_plans = [
        assumptions.priced(way, words_bytes, budget.on_cpu, model_spec.count) for way, _ in fitting
    ]
    outlook = outlook_of(model_spec, assumptions, residency_plans)
    outlook = replace(outlook, ahead=config.prefetch != "none")
    if config.draft_length:
        outlook = replace(outlook, lengths=(config.draft_length,))
    chosen, reason = choose(outlook, residency_plans, margin)
    gives_up = any(way.drafts for way in residency_plans) and not chosen.drafts
    logger.info(
        "planned (%s; %s): %s%s",
        assumptions.source,
        assumptions.locality.source,
        "no draft, though one would fit: " if gives_up else "",
        reason,
    )
    at = residency_plans.index(replace(chosen, expected=None))
    longest = longest_for(config, outlook, chosen)
    prior = None if outlook.drafts(chosen) is None else outlook.prior(chosen)
    return PlanDecision(chosen, fitting[at][1], reason, gives_up, longest, prior)


def outlook_of(
    model_spec: ModelSpec, assumptions: Assumptions, residency_plans: Sequence[ResidencyPlan]
) -> Outlook:
    """A subject's, with what is known of its head."""
    return assumptions.outlook(
        model_spec.num_layers, model_spec.pass_bytes, residency_plans, model_spec.head_stand
    )


def must_draft(config: RunConfig) -> bool:
    """Whether a draft is asked for by name, by its experts or by its length."""
    named = config.draft not in ("auto", "none") or config.drafter not in ("auto", "none")
    sized = config.draft_experts not in (None, "auto")
    return named or sized or bool(config.draft_length)


def longest_for(config: RunConfig, outlook: Outlook, residency_plan: ResidencyPlan) -> int:
    """The longest draft within the time objectives. Where the profile finds none, cycles will have
    to tell.
    """
    objectives = objectives_of(config)
    timed = outlook.drafts(residency_plan) is not None
    if not timed or config.draft_length is not None or objectives == Objectives():
        return LONGEST
    longest = longest_within(
        objectives, (outlook.cycle(residency_plan, length) for length in range(LONGEST + 1))
    )
    if longest is None:
        logger.info("by the profile no draft length meets the objectives")
        return LONGEST
    logger.info("drafts are no longer than %d: by the profile, longer ones miss the goals", longest)
    return longest


def objectives_of(config: RunConfig) -> Objectives:
    def seconds(limit_ms: float | None) -> float:
        return math.inf if limit_ms is None else limit_ms / 1e3

    return Objectives(seconds(config.tpot_slo_ms), seconds(config.latency_slo_ms))


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
