"""What a run takes from a profile before it loads: its codec, and whether it drafts.

The planner weighs the ways to hold experts that options and files leave open, in the run's budget
and by what was measured; without a profile nothing is weighed, and nothing assumed.
"""

import logging
import math
from dataclasses import dataclass, replace

from speq.config import RunConfig
from speq.errors import SpeqError
from speq.governor.adaptive import LONGEST
from speq.governor.planner import Holding, Outlook, choose
from speq.governor.profile import Profile
from speq.governor.slo import Objectives, longest_within
from speq.planning import memory
from speq.planning.budget_plan import Assumptions
from speq.planning.subject import Budget, Subject, Way

logger = logging.getLogger("speq")


@dataclass(frozen=True, slots=True)
class Course:
    """What a run is to do.

    config       its options, with what the planner settled of them
    reason       the planner's; None where there was nothing to choose
    gives_up_draft  a draft would fit and is expected to lose
    longest      no draft is longer: by the profile, no longer one meets the time objectives
    """

    config: RunConfig
    reason: str | None = None
    gives_up_draft: bool = False
    longest: int = LONGEST


def course_of(config: RunConfig, profile: Profile, subject: Subject, budget: Budget) -> Course:
    """Let the planner choose among the ways that are left open, if there are several that fit."""
    assumptions = Assumptions.of_profile(profile, subject.shape)
    fitting = [
        (way, holding)
        for way in left_open(config, profile, subject, budget.on_cpu)
        if (holding := _fitted(subject, budget, assumptions, way)) is not None
    ]
    if not profile.drafted and any(way.drafts for way, _ in fitting):
        logger.info("nothing is planned: a draft fits, and the profile was measured without one")
        return Course(config)
    if must_draft(config):  # as far as there is room
        fitting = [pair for pair in fitting if pair[0].drafts] or fitting
    holdings = [holding for _, holding in fitting]
    if not holdings:
        return Course(config)
    outlook = assumptions.outlook(subject.num_layers, subject.pass_bytes, holdings)
    outlook = replace(outlook, ahead=config.prefetch != "none")
    if len(holdings) == 1:
        return Course(config, longest=_longest(config, outlook, holdings[0]))
    if config.draft_length:
        outlook = replace(outlook, lengths=(config.draft_length,))
    choice = choose(outlook, holdings)
    gives_up = not choice.draft and any(way.drafts for way, _ in fitting)
    logger.info(
        "planned (%s; %s): %s%s",
        assumptions.source,
        assumptions.locality.source,
        "no draft, though one would fit: " if gives_up else "",
        choice.reason,
    )
    draft = "none" if gives_up else config.draft
    return Course(
        replace(config, codec=choice.codec, draft=draft),
        choice.reason,
        gives_up,
        _longest(config, outlook, choice.holding),
    )


def _longest(config: RunConfig, outlook: Outlook, holding: Holding) -> int:
    """Where the profile finds no length that meets the objectives, cycles will have to tell."""
    objectives = objectives_of(config)
    if config.draft_length is not None or objectives == Objectives():
        return LONGEST
    longest = longest_within(
        objectives, (outlook.cycle(holding, length) for length in range(LONGEST + 1))
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


def must_draft(config: RunConfig) -> bool:
    """Whether a draft is asked for by name or by its length."""
    return config.draft not in ("auto", "none") or bool(config.draft_length)


def left_open(config: RunConfig, profile: Profile, subject: Subject, on_cpu: bool) -> list[Way]:
    """Ways to hold experts that options and files allow, in codecs whose speeds were measured."""
    computed = {*profile.decode_bytes_per_s, profile.codec}
    # What a GPU reads, host memory holds encoded already: no speed needs to be known.
    encoded = set(profile.encode_bytes_per_s) if on_cpu else computed
    may_draft = config.draft != "none" and config.draft_length != 0
    return [
        way
        for way in subject.ways(encoded)
        if (way.encoded or way.codec == subject.codec.name)
        and way.codec in computed
        and config.codec in ("auto", way.codec)
        and (may_draft or not way.drafts)
    ]


def _fitted(subject: Subject, budget: Budget, assumptions: Assumptions, way: Way) -> Holding | None:
    """With the slots that the budget leaves; None where it leaves too few."""
    try:
        made = memory.plan(subject.demand(way, budget), budget.budget_bytes, budget.context)
    except SpeqError:
        return None
    return assumptions.holding(subject, budget, way, made.slots)
