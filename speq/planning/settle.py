"""Decides how a run holds its experts and who drafts: one decision, made before anything is loaded.

Options and files leave some ways open, and the budget leaves some of those. With a profile of
`speq tune` the planner takes the way of the least expected time per token. Without one a rule
decides, which assumes nothing: whether drafts pay is left to the governor, which measures them.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from speq.config import RunConfig
from speq.experts.codec import ExpertCodec, codec_of, codecs_for
from speq.governor.draft_length import LONGEST
from speq.governor.holding import Holding
from speq.governor.planner import Outlook, choose
from speq.governor.profile import Profile
from speq.governor.slo import Objectives, longest_within
from speq.kernels import library
from speq.planning.assumptions import Assumptions
from speq.planning.demand import Budget
from speq.planning.fitting import Fitting, fit, fitted, least_refusal, smallest
from speq.planning.host_memory import host_plan
from speq.planning.memory import BudgetTooSmall, MemoryPlan
from speq.planning.subject import Subject
from speq.planning.trial import Trial, Trials, Use
from speq.planning.ways import drafter_of, open_ways
from speq.units import format_bytes

logger = logging.getLogger("speq")


@dataclass(frozen=True, slots=True)
class Settled:
    """How a run holds its experts.

    memory          planned for it
    reason          the planner's; None where there was nothing to weigh
    gives_up_draft  whether a draft would fit and is expected to lose
    longest         no draft is longer: by the profile, longer ones miss the time objectives
    """

    holding: Holding
    memory: MemoryPlan
    reason: str | None = None
    gives_up_draft: bool = False
    longest: int = LONGEST


def settle(
    subject: Subject, budget: Budget, config: RunConfig, profile: Profile | None, trials: Trials
) -> Settled:
    """The way to hold the experts, and its memory.

    Raises SpeqError where options and files contradict each other or nothing fits.
    """
    ways = open_ways(subject, config, budget.on_cpu)
    fitting, refused = fitted(subject, ways, budget)
    # Records may turn out smaller than they usually are; the planner does not count on it.
    more, _ = fitted(subject, [smallest(subject, way) for way, _ in refused], budget)
    if not fitting and not more:
        raise least_refusal(refused)
    settled = None
    if profile is not None:
        settled = by_profile(subject, budget, config, profile, fitting)
    if settled is None:
        settled = by_rule(subject, budget, config, fitting + more, trials)
    holding = smallest(subject, settled.holding)
    if holding.slot_bytes != settled.holding.slot_bytes:
        holding, made = fit(subject, holding, budget)
        settled = replace(settled, holding=holding, memory=made)
    host_plan(subject, holding, budget)  # refuses a host budget that is too small
    if drafter_of(config) != "none" and not holding.drafts and not settled.gives_up_draft:
        logger.warning(
            "the INT4 draft takes %s and does not fit the budget: running without one",
            format_bytes(subject.draft_bytes),
        )
    return settled


def by_rule(
    subject: Subject, budget: Budget, config: RunConfig, fitting: Sequence[Fitting], trials: Trials
) -> Settled:
    """Without a profile: a draft where it fits; the codec by `automatic`, or by `by_use`, where it
    is left open.
    """
    codec = config.codec if subject.published else subject.codec.name
    if codec == "auto":
        published = [entry for entry in fitting if entry[0].codec == subject.codec.name]
        all_fit = bool(published) and drafting_first(published)[0].slots == subject.count
        if trials.use is None:
            codec = automatic(subject, all_fit, budget, trials.encoding)
        else:
            codec = by_use(subject, all_fit, fitting, trials.use)
    allowed = [entry for entry in fitting if entry[0].codec == codec]
    return Settled(*drafting_first(allowed or fitting))


def drafting_first(fitting: Sequence[Fitting]) -> Fitting:
    """The first that drafts, or else the first."""
    return next((entry for entry in fitting if entry[0].drafts), fitting[0])


def automatic(
    subject: Subject, all_fit: bool, budget: Budget, trial: Callable[[ExpertCodec], Trial]
) -> str:
    """On the CPU, the codec of published experts where the words of some lie outside the slots.

    As published where all fit, where no compact codec codes them or where only the slow reference
    could run records; else compact where the reading threads together encode faster than one of
    them reads; else as published.
    """
    given = subject.codec
    codec = None if all_fit else compact_codec(subject, "cpu")
    if codec is None:
        return given.name
    speeds = trial(codec)
    encoded = budget.readers * speeds.encode_bytes_per_s
    worth = encoded > speeds.read_bytes_per_s
    logger.info(
        "codec %s: encoding experts as they are read would %s (%d threads encode %.2f GB/s, and "
        "one reads %.2f GB/s); `speq pack --codec %s` encodes them once, and less is read",
        codec.name if worth else given.name,
        "keep up with reading" if worth else "hold reading up",
        budget.readers,
        encoded / 1e9,
        speeds.read_bytes_per_s / 1e9,
        codec.name,
    )
    return codec.name if worth else given.name


def compact_codec(subject: Subject, device: str) -> ExpertCodec | None:
    """What published experts can be encoded by without a draft; None where there is none, or only
    the slow reference could run it.
    """
    given = subject.codec
    made = [codec_of(name, given.shape) for name in codecs_for(given.shape.dtype)]
    for codec in made:
        if codec.usual_bits is None or codec.needs_draft:
            continue
        backend = library.backend_of(codec.op, device)
        if backend.name != "reference":
            return codec
        logger.info(
            "codec %s: %s has no fast kernel here (%s)", given.name, codec.name, backend.reason
        )
    return None


def by_use(
    subject: Subject,
    all_fit: bool,
    fitting: Sequence[Fitting],
    use: Callable[[ExpertCodec], Use],
) -> str:
    """On a device with memory of its own, the codec of published experts.

    As published where all fit, or where no fast kernel runs compact records; else that of the least
    time that a token's expert is expected to take (`Use.expected_s`). The disk does not count: host
    memory holds records.
    """
    given = subject.codec
    codec = None if all_fit else compact_codec(subject, "cuda")
    if codec is None:
        return given.name
    held: dict[str, float] = {}
    for name in (given.name, codec.name):
        ways = [entry for entry in fitting if entry[0].codec == name]
        if ways:
            held[name] = drafting_first(ways)[0].slots / subject.count
    if set(held) != {given.name, codec.name}:  # one of them does not fit, or none
        return next(iter(held), given.name)
    uses = {given.name: use(given), codec.name: use(codec)}
    chosen = least_expected(uses, held)
    logger.info(
        "codec %s: of each expert of a token, %s",
        chosen,
        " and ".join(
            f"{name} is expected to take {each.expected_s(held[name]) * 1e6:.0f} us "
            f"({each.run_s * 1e6:.0f} to run, {each.copy_s * 1e6:.0f} to move where it lies in no "
            f"slot, as {1 - held[name]:.0%} do)"
            for name, each in uses.items()
        ),
    )
    return chosen


def least_expected(uses: dict[str, Use], held: dict[str, float]) -> str:
    """The codec whose experts are expected to take least; the first of those that take the same.

    held  by codec: the share of all experts that lie in slots
    """
    return min(uses, key=lambda name: uses[name].expected_s(held[name]))


def by_profile(
    subject: Subject,
    budget: Budget,
    config: RunConfig,
    profile: Profile,
    fitting: Sequence[Fitting],
) -> Settled | None:
    """The way of the least expected time per token, of those whose speeds were measured; None where
    the profile cannot tell.
    """
    assumptions = Assumptions.of_profile(profile, subject.shape)
    computed = {*profile.decode_bytes_per_s, profile.codec}
    words_bytes = subject.codec.shape.nbytes
    weighed = [
        (assumptions.priced(way, words_bytes, budget.on_cpu), made)
        for way, made in fitting
        if way.codec in computed and (assumptions.timed(way, budget.on_cpu) or not budget.on_cpu)
    ]
    if not profile.drafted and any(way.drafter == "int4" for way, _ in weighed):
        logger.info("nothing is planned: a draft fits, and the profile was measured without one")
        return None
    drafting = [entry for entry in weighed if entry[0].drafts]
    if must_draft(config) and drafting:  # as far as there is room
        weighed = drafting
    if not weighed:
        return None
    holdings = [holding for holding, _ in weighed]
    outlook = assumptions.outlook(subject.num_layers, subject.pass_bytes, holdings)
    outlook = replace(outlook, ahead=config.prefetch != "none")
    if len(weighed) == 1:
        [(holding, made)] = weighed
        if any(way.codec != holding.codec for way, _ in fitting):
            return None  # other codecs were not measured: the rule tries one
        return Settled(holding, made, longest=longest_for(config, outlook, holding))
    if config.draft_length:
        outlook = replace(outlook, lengths=(config.draft_length,))
    chosen, reason = choose(outlook, holdings)
    gives_up = bool(drafting) and not chosen.drafts
    logger.info(
        "planned (%s; %s): %s%s",
        assumptions.source,
        assumptions.locality.source,
        "no draft, though one would fit: " if gives_up else "",
        reason,
    )
    at = holdings.index(replace(chosen, expected=None))
    longest = longest_for(config, outlook, chosen)
    return Settled(chosen, weighed[at][1], reason, gives_up, longest)


def must_draft(config: RunConfig) -> bool:
    """Whether a draft is asked for by name or by its length."""
    named = config.draft not in ("auto", "none") or config.drafter not in ("auto", "none")
    return named or bool(config.draft_length)


def longest_for(config: RunConfig, outlook: Outlook, holding: Holding) -> int:
    """The longest draft within the time objectives. Where the profile finds none, cycles will have
    to tell.
    """
    objectives = objectives_of(config)
    timed = holding.drafter == "int4"  # profiles time no other drafts
    if not timed or config.draft_length is not None or objectives == Objectives():
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


def replan(subject: Subject, holding: Holding, budget: Budget) -> Fitting:
    """Memory for another context, or for slots of which more is known: with the draft as before,
    or without it where only that fits.
    """
    try:
        return fit(subject, holding, budget)
    except BudgetTooSmall:
        if not holding.can_drop_draft:
            raise
        return fit(subject, holding.without_draft, budget)
