"""The governors of a run, with what a plan or a profile knows beforehand."""

from dataclasses import replace

from speq.config import ComputeOptions, DraftOptions, RunConfig, TransferOptions
from speq.governor.adaptive import make_governor
from speq.governor.batches import Governors
from speq.governor.learned import LearnedSteps
from speq.governor.prior import Prior
from speq.governor.profile import Profile
from speq.kernels.ops import MAX_LINEAR_ROWS
from speq.planning.choose_plan import PlanDecision, objectives_of
from speq.planning.cost.planner import partial_acceptance
from speq.planning.cost.residency_plan import ResidencyPlan


def run_governors(
    drafts: DraftOptions,
    profile: Profile | None,
    decision: PlanDecision,
    secondary: str | None,
    learned: LearnedSteps | None = None,
) -> Governors:
    """The governor of each batch size.

    A profile knows INT4 drafts, and a plan also those of a head whose acceptance was measured. Of
    others nothing is known beforehand.

    secondary  the drafter besides the run's own
    learned    what an earlier run of that kind measured, which says more than both
    """
    plan, prior = decision.residency_plan, None
    if plan.drafter in ("int4", "head"):
        prior = decision.prior
    if plan.drafter == "int4" and profile is not None:
        prior = profile_prior(profile, plan)
    if learned is not None:
        prior = learned.prior
    longest, nodes = (decision.longest, drafts.draft_nodes) if plan.drafts else (0, None)
    objectives = objectives_of(drafts)
    governor = make_governor(drafts.draft_length, objectives, prior, longest, nodes, secondary)
    if learned is not None:
        learned.teach(governor)
    return Governors(governor, MAX_LINEAR_ROWS)


def run_kind(config: RunConfig, decision: PlanDecision, secondary: str | None) -> str:
    """What decides a step's time besides the key of a profile: how experts are held and moved, and
    who drafts.
    """
    drafts, plan = config.group(DraftOptions), decision.residency_plan
    moved, computed = config.group(TransferOptions), config.group(ComputeOptions)
    parts = (plan.name, plan.drafter, secondary, drafts, decision.longest, moved, computed)
    return "; ".join(map(str, parts))


def profile_prior(profile: Profile, residency_plan: ResidencyPlan) -> Prior:
    """The profile's, which knows drafts of all experts, for a draft that may hold a part."""
    prior = Prior.of_profile(profile)
    if prior.acceptance is None:
        return prior
    acceptance = partial_acceptance(prior.acceptance, residency_plan.draft_covers)
    return replace(prior, acceptance=acceptance)
