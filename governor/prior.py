"""What is believed of a run's steps before any is measured: by a profile, or by a plan."""

from dataclasses import dataclass

from speq.governor.profile import Profile
from speq.governor.roofline import Points

# A profile's time of drafts weighs as much as so many steps of the run, and its acceptance, which
# is that of other texts, as much as so many tokens.
PROFILED, PROFILED_TOKENS = 10.0, 16.0


@dataclass(frozen=True, slots=True)
class Prior:
    """Expected terms of a step's time (`speq.governor.step_model.StepModel`).

    verify      (rows, seconds) of verifications with all experts in slots, the first of one row
    distinct    (rows, distinct experts of all layers); empty: not known
    draft_base_s, draft_token_s  T_draft(k) = base + k * token; no token: not known
    drafts      steps of the run that weigh as much as what is known of drafts
    transfer_s, expert_bytes  of an expert that is moved
    missed      experts moved over experts asked for, plainly and with a draft; None: not known
    exposed     share of the transfers that computation does not hide, plainly and with a draft
    acceptance  that a drafted token stands; None: not known
    tokens      tokens of the run that weigh as much as that
    host_s      of an expert that a GPU's host computes
    hosted      such experts over experts asked for, plainly and with a draft
    """

    verify: Points
    distinct: Points
    draft_base_s: float
    draft_token_s: float
    drafts: float
    transfer_s: float
    expert_bytes: float
    missed: tuple[float, float] | None = None
    exposed: tuple[float, float] = (1.0, 1.0)
    acceptance: float | None = None
    tokens: float = 0.0
    host_s: float = 0.0
    hosted: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of_profile(cls, profile: Profile) -> "Prior":
        return cls(
            profile.verify,
            profile.distinct,
            profile.draft_base_s,
            profile.draft_token_s,
            PROFILED,
            profile.slow_tier.transfer_s(profile.expert_bytes),
            profile.expert_bytes,
            acceptance=profile.acceptance,
            tokens=PROFILED_TOKENS,
            host_s=profile.host_expert_s,
        )
