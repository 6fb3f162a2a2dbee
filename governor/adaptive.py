"""Chooses each cycle's draft length from what the cycles before it took (MoE-SpeQ 3.2.3).

A roofline model, learnt online, expects the time of a cycle of every length. Measured cycles
correct it. Acceptance gives the tokens that a cycle yields. The governor takes the length of the
highest throughput, 0 included. It probes other lengths within a small share of the time. So
speculation that does not pay is off, except for the few cycles that would notice if it did.

Where drafts may be trees, a tree of each length is one more choice. Trees yield other tokens than
chains and take other times, so both are measured apart. The terms of the model are common to them.

A drafter beside the run's own has a draft for some cycles only, and is a choice in these. What is
known of its drafts is known apart from the others.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from speq.governor.acceptance import Acceptance
from speq.governor.draft_length import (
    LENGTHS,
    LONGEST,
    LONGEST_SIDE,
    Decision,
    DecisionReason,
    FixedDraftLength,
    Governor,
)
from speq.governor.measured_steps import MeasuredSteps
from speq.governor.objectives import Objectives
from speq.governor.prior import Prior
from speq.governor.roofline import StepEstimate
from speq.governor.step_model import Apart, StepModel
from speq.stats import Forecast, StepStats

# The shares of the time that probing drafts may lose, and plain cycles between better drafts.
DRAFT_SHARE, PLAIN_SHARE = 0.008, 0.015
# The same of drafts of a drafter beside the run's own.
SIDE_SHARE = 0.004
# Plain cycles between drafts come in bursts. The first ones of a burst do not count, because slots
# must fill again with the experts that a single token needs.
BURST, SETTLE = 8, 3
# The very first plain cycles ran before slots were full. After so many cycles in favour of drafts
# they are measured anew, unless they took so many times as long.
SECOND_LOOK, HOPELESS = 12, 2.5
# Probes of a run that begins with a prior may lose so many plain cycles at once, over the cycles
# that the prior weighs: one that was planned knows less than one that was measured.
BELIEVED = 1.0
# A probe is charged at least this, in tokens' time: a cheap outcome may be luck.
LEAST_LOSS = 0.1
# A probe may go so many lengths beyond the longest measured one. A length is measured if more than
# this share of a cycle is remembered.
REACH, MEASURED = 2, 0.3
# Where nothing is known so many plain cycles come first: all other lengths are compared with them.
FIRST_PLAIN = 4
# A length is worth a probe if it might be better by this share. It may have luck of so many
# standard deviations if the credit is full, and of fewer if not.
LUCK, WORTHWHILE = 3.0, 0.02
# Plain decoding has the benefit of the doubt: it is granted so many standard deviations.
DOUBT = 0.5
# The governor leaves a length only for one that is expected to be better by this share.
HYSTERESIS = 0.01
# A draft stops if one more token is expected to cost so many times its yield. It does so only after
# so many drafts have shown how many new experts are usual.
STOP, USUAL = 1.25, 8


class LengthEstimate(NamedTuple):
    """The present expectation of a draft length.

    cycle      the cycle by the model alone
    cycle_s    its time, corrected by measurements
    token_s    the same per expected token
    deviation  standard deviation of the logarithm of both times
    hoped      tokens if acceptance were better than it seems
    kind       of such drafts
    """

    cycle: StepEstimate
    cycle_s: float
    token_s: float
    deviation: float
    hoped: float
    mode: "DraftMode"

    @property
    def name(self) -> str:
        drafted = f"k={self.cycle.draft_length}"
        if self.mode.drafter is not None:
            drafted = f"{self.mode.drafter} {drafted}"
        return drafted if self.mode.nodes is None else f"{drafted} as a tree"

    def hoped_token_s(self, luck: float) -> float:
        return self.cycle_s * math.exp(-luck * self.deviation) / self.hoped


@dataclass(slots=True)
class ProbeBudget:
    """The seconds that probes may still lose.

    share  of all time, which is added
    first  plain cycles' worth at the start
    most   plain cycles' worth, never more
    """

    share: float
    first: float
    most: float
    left_s: float = 0.0

    def open(self, plain_s: float) -> None:
        self.left_s = self.first * plain_s

    def earn(self, cycle_s: float, plain_s: float) -> None:
        self.left_s = min(self.left_s + self.share * cycle_s, self.most * plain_s)

    def saved(self, plain_s: float) -> float:
        """How full the credit is, from 0 to 1."""
        return max(self.left_s, 0.0) / (self.most * plain_s) if plain_s else 0.0


@dataclass(slots=True)
class DraftMode:
    """What is known of drafts of one kind: chains, trees, or those of another drafter.

    nodes     tokens of a tree at most; None: chains
    measured  cycles of each length, and of plain decoding
    drafter   who drafts; None: the run's own drafter
    apart     what is known of that drafter alone
    """

    nodes: int | None
    acceptance: Acceptance
    measured: MeasuredSteps
    drafter: str | None = None
    apart: Apart | None = None

    @classmethod
    def of(cls, longest: int, nodes: int | None = None, drafter: str | None = None) -> "DraftMode":
        lengths = tuple(k for k in LENGTHS if k <= longest)
        apart = None if drafter is None else Apart()
        return cls(nodes, Acceptance(longest), MeasuredSteps(lengths), drafter, apart)


@dataclass(slots=True)
class AdaptiveDraftLength:
    """The governor of `--draft-length auto`.

    longest     longest draft of the run's own drafter; 0: it has none
    nodes       tokens of a tree at most; None: drafts are chains
    side        a drafter besides, whose drafts are chains; None: there is none
    objectives  bounds on time per token and per cycle, kept to if any length can
    prior       what is believed beforehand. Without it, or where it says nothing of experts, the
                first cycles are the calibration
    """

    longest: int = LONGEST
    objectives: Objectives = field(default_factory=Objectives)
    prior: Prior | None = None
    nodes: int | None = None
    secondary: str | None = None
    model: StepModel = field(init=False)
    chains: DraftMode = field(init=False)
    trees: DraftMode | None = field(init=False)
    secondaries: DraftMode | None = field(init=False)
    # One credit for probes that draft, one for those of the drafter beside, one for plain cycles
    # while drafting is better.
    _drafts: ProbeBudget = field(default_factory=lambda: ProbeBudget(DRAFT_SHARE, 4.0, 8.0))
    _side_drafts: ProbeBudget = field(default_factory=lambda: ProbeBudget(SIDE_SHARE, 2.0, 4.0))
    _plains: ProbeBudget = field(default_factory=lambda: ProbeBudget(PLAIN_SHARE, 0.0, 4.0))
    _plain_s: float = 0.0
    _burst: int = 0
    _first_plain: int = FIRST_PLAIN
    # Plain cycles since the last draft, and cycles for which a draft was held to be better.
    _plain_run: int = SETTLE
    _in_favour: int = 0
    # Plain decoding and chains, by place in the lengths that are measured; then trees, then drafts
    # of the drafter beside.
    _options: list[LengthEstimate] = field(default_factory=list)
    # Indices of options: the one held on to, and the one under way.
    _held: int = 0
    _chosen: int = 0
    _stopped: bool = False
    _cold: bool = False

    def __post_init__(self) -> None:
        prior = self.prior
        self.model = StepModel() if prior is None else StepModel.of(prior)
        self.chains = DraftMode.of(self.longest)
        self.trees = None if self.nodes is None else DraftMode.of(self.longest, self.nodes)
        self.secondaries = (
            None if self.secondary is None else DraftMode.of(LONGEST_SIDE, drafter=self.secondary)
        )
        if prior is not None and prior.acceptance is not None:
            for mode in self._modes:
                if mode is not self.secondaries:
                    mode.acceptance.believe(prior.acceptance, prior.tokens)
        if prior is not None:
            self._begin_with(self.model, BELIEVED / prior.drafts)

    def _begin_with(self, model: StepModel, believed: float = BELIEVED) -> None:
        """Spare the calibration where a model was made from what is known.

        believed  plain cycles that probes may lose at once
        """
        self.model = model
        if model.ready:
            self._first_plain = 0
            self._plain_s = model.verify_s(model.single)
            self._drafts.left_s = believed * self._plain_s
            self._side_drafts.open(self._plain_s)

    def beside(self, longest: int, times: float) -> "AdaptiveDraftLength":
        """A governor of batches of so many times as many texts, whose drafts are no longer than
        that, and whose texts are drafted for by the run's own drafter. It begins with what this
        one's cycles say of theirs, and knows what this one knows of acceptance.
        """
        nodes = None if self.nodes is None or not longest else min(self.nodes, longest)
        made = AdaptiveDraftLength(min(longest, self.longest), self.objectives, nodes=nodes)
        made._begin_with(self.model.beside(times))
        made.chains.acceptance = self.chains.acceptance
        if made.trees is not None and self.trees is not None:
            made.trees.acceptance = self.trees.acceptance
        return made

    @property
    def _modes(self) -> list[DraftMode]:
        return [mode for mode in (self.chains, self.trees, self.secondaries) if mode is not None]

    @property
    def acceptance(self) -> Acceptance:
        """Of chains."""
        return self.chains.acceptance

    @property
    def measured(self) -> MeasuredSteps:
        """Of chains."""
        return self.chains.measured

    def begin(self) -> None:
        self._cold = True

    def decide(self, offered: bool = False) -> Decision:
        if self._first_plain:
            return Decision(0, "plain decoding is measured first", "probe")
        if not self.model.draft_token.weight and self.longest:
            return Decision(1, "drafting is measured first", "probe")
        self._options = self._weigh()
        self._stopped = False
        options = self._options
        able = [
            at
            for at, option in enumerate(options)
            if offered or option.mode is not self.secondaries
        ]
        allowed = [
            at for at in able if self.objectives.met(options[at].cycle_s, options[at].cycle.tokens)
        ]
        if not allowed:
            self._held = self._chosen = self._nearest(able)
            return self._decision("bound")
        self._held = self._best(allowed)
        probe = None if self._cold else self._probe_plain(allowed)
        if probe is None and not self._cold:
            probe = self._probe(allowed)
        self._chosen = self._held if probe is None else probe
        return self._decision("best" if probe is None else "probe")

    def continue_draft(self, drafted: int, new_experts: int, accept_prob: float) -> bool:
        """Compare the cost of one more token with its yield.

        The cost is its drafting, its row, and as many new experts as this draft's tokens have
        needed so far, for the part of their transfers that is not hidden. The yield is the chance
        that the token stands: that of all before it, and of a drafted token in general.
        """
        if self.model.drafts < USUAL:
            return True
        model, option = self.model, self._options[self._chosen]
        cycle = option.cycle
        seen = model.new_experts(drafted)
        surprise = (new_experts + 1) / (seen + 1)
        rows, next_rows = (
            1 + model.nodes(passes, option.mode.nodes) for passes in (drafted, drafted + 1)
        )
        more = model.distinct(next_rows) - model.distinct(rows)
        new = (model.new_experts(next_rows) - model.new_experts(rows)) * surprise
        exposed = cycle.exposed if cycle.new_s < cycle.compute_s else 1.0
        cost_s = model.draft_token_s + more * model.compute.slope + new * model.link.value * exposed
        stands = accept_prob * option.mode.acceptance.accepted
        self._stopped = cost_s > STOP * stands * self._options[self._held].token_s
        return not self._stopped

    def observe(self, step: StepStats) -> None:
        cycle_s = step.end_s - step.start_s
        # A stopped draft counts for the length decided on, in its time and in its tokens: else only
        # lucky drafts would count, and the length would look cheap.
        mode, length = self.chains, step.deepest
        if self._options and length:
            mode = self._options[self._chosen].mode
            # A tree that is less deep than it had passes spent them on other branches.
            length = length if mode.nodes is None else step.passes
        drafts = [(length, step.accepted, self._stopped)]
        if step.sequences > 1:
            drafts = [(each.draft_length, each.accepted, each.stopped) for each in step.drafts]
        if self._stopped:
            length = self._options[self._chosen].cycle.draft_length
        for each in self._modes:
            for drafted in drafts:
                each.acceptance.observe(*(drafted if each is mode else (0, 0)))
        # Of each text, as all that follows is.
        emitted = step.emitted / step.sequences
        if self._cold:
            # Slots held what the prompt left in them. Only the first cycle is like that.
            self._cold = False
            # One plain cycle at least is learnt, however short requests are: all else is relative.
            if self._first_plain > 1:
                self._first_plain -= 1
            return
        self.model.observe(step, mode.apart)
        self._plain_run = 0 if step.draft_length else self._plain_run + 1
        settled = step.draft_length > 0 or self._plain_run > SETTLE
        for each in self._modes:
            counts = settled and (each is mode or not step.draft_length)
            each.measured.observe(length if counts else -1, cycle_s, emitted)
        if not step.draft_length:
            if settled:
                weight = max(self.measured.weight(0), 1.0)
                self._plain_s += (cycle_s - self._plain_s) / min(weight, 20.0)
            self._burst = max(self._burst - 1, 0)
            self._first_plain = max(self._first_plain - 1, 0)
        if self._options:
            for credit in (self._drafts, self._side_drafts, self._plains):
                credit.earn(cycle_s, self._plain_s)
        else:
            self._drafts.open(self._plain_s)
            self._side_drafts.open(self._plain_s)
        if self._chosen != self._held:
            credit = self._probe_budget(mode) if self._chosen else self._plains
            token_s = self._options[self._held].token_s
            credit.left_s -= max(cycle_s - token_s * emitted, LEAST_LOSS * token_s)

    def outlook(self) -> list[StepEstimate]:
        return [option.cycle for option in self._options if option.mode is self.chains]

    def _weigh(self) -> list[LengthEstimate]:
        options = self._weigh_mode(self.chains)
        for mode in self._modes[1:]:
            options += self._weigh_mode(mode)[1:]  # plain decoding is among the chains
        return options

    def _weigh_mode(self, mode: DraftMode) -> list[LengthEstimate]:
        # Trees that were never drafted are taken to yield what chains do.
        tried = mode is not self.trees or mode.measured.farthest(0.0)
        acceptance = mode.acceptance if tried else self.chains.acceptance
        luck = 1 + self._luck(mode) * mode.acceptance.deviation / acceptance.overall
        # By k: the tokens of a cycle, and the tokens of a lucky one.
        yields, hopes = [1.0], [1.0]
        stands = stands_hoped = 1.0
        for probability in acceptance.probabilities():
            stands *= probability
            stands_hoped *= min(probability * luck, 1.0)
            yields.append(yields[-1] + stands)
            hopes.append(hopes[-1] + stands_hoped)
        lengths = mode.measured.lengths
        emitted = [yields[length] for length in lengths]
        cycles = self.model.cycles(lengths, emitted, mode.nodes, mode.apart)
        modelled_s = [cycle.cycle_s for cycle in cycles]
        options = []
        for cycle, time_s, (mean, variance) in zip(
            cycles, modelled_s, mode.measured.corrections(modelled_s), strict=True
        ):
            cycle_s = time_s * math.exp(mean)
            hoped = hopes[cycle.draft_length]
            token_s = cycle_s / cycle.tokens
            deviation = math.sqrt(variance)
            options.append(LengthEstimate(cycle, cycle_s, token_s, deviation, hoped, mode))
        return options

    def _best(self, allowed: list[int]) -> int:
        """The length of the highest throughput (Eqs. 4 and 5), with inertia: times are noisy."""

        def judged_s(at: int) -> float:
            option = self._options[at]
            return option.token_s * (1 if at else math.exp(-DOUBT * option.deviation))

        best = min(allowed, key=judged_s)
        held = self._held in allowed and judged_s(self._held) <= judged_s(best) * (1 + HYSTERESIS)
        return self._held if held else best

    def _probe_budget(self, mode: DraftMode) -> ProbeBudget:
        """Of probes of such drafts."""
        return self._side_drafts if mode is self.secondaries else self._drafts

    def _luck(self, mode: DraftMode) -> float:
        """The standard deviations of luck that a probe of such drafts may hope for."""
        return LUCK * self._probe_budget(mode).saved(self._plain_s)

    def _probe_plain(self, allowed: list[int]) -> int | None:
        """0 if plain decoding is to be measured now, so that drafts stay compared with it."""
        if self._held == 0 or 0 not in allowed:
            self._burst = 0
            return None
        token_s, plain_s = self._options[self._held].token_s, self._options[0].token_s
        self._in_favour += 1
        if self._in_favour == SECOND_LOOK and plain_s < HOPELESS * token_s:
            self._burst = BURST
            for mode in self._modes:
                mode.measured.doubt(0)
        loss_s = max(plain_s - token_s, LEAST_LOSS * token_s)
        if not self._burst and self._plains.left_s > BURST * loss_s:
            self._burst = BURST
        return 0 if self._burst else None

    def _probe(self, allowed: list[int]) -> int | None:
        """Another length that may be better, if the credit covers being wrong about it."""
        token_s = self._options[self._held].token_s
        chosen, most = None, 0.0
        for at in allowed:
            if at == 0 or not self._within_reach(at):
                continue
            option = self._options[at]
            gain = 1 - option.hoped_token_s(self._luck(option.mode)) / token_s
            loss_s = option.cycle_s - token_s * option.cycle.tokens
            left_s = self._probe_budget(option.mode).left_s
            if at == self._held or gain < WORTHWHILE or loss_s > left_s:
                continue
            worth = gain * gain / max(loss_s, LEAST_LOSS * token_s)
            if worth > most:
                chosen, most = at, worth
        return chosen

    def _within_reach(self, at: int) -> bool:
        """Whether an option is little longer than the longest measured one of its kind."""
        option = self._options[at]
        measured = option.mode.measured
        place = measured.lengths.index(option.cycle.draft_length)
        return place <= REACH + measured.farthest(MEASURED)

    def _nearest(self, able: list[int]) -> int:
        """Of these options the one that misses the objectives by least."""

        def excess(option: LengthEstimate) -> float:
            late = option.cycle_s / self.objectives.latency_s
            return max(late, option.token_s / self.objectives.tpot_s)

        return min(able, key=lambda at: excess(self._options[at]))

    def _decision(self, ground: DecisionReason) -> Decision:
        """The chosen option, with its limit and its neighbours' times as the reason."""
        at, options = self._chosen, self._options
        cycle, cycle_s = options[at].cycle, options[at].cycle_s
        beside = ", ".join(
            f"{other.name} {other.token_s * 1e3:.1f}"
            for other in options[max(at - 1, 0) : at + 2]
            if other is not options[at]
        )
        mode = options[at].mode
        nodes = mode.nodes
        shape = "" if nodes is None else f"a tree of {nodes} tokens at most: "
        if mode.drafter is not None:
            shape = f"by {mode.drafter}: "
        reason = (
            f"{shape}{options[at].token_s * 1e3:.1f} ms a token expected ({beside}), "
            f"most of it {cycle.limit}; {mode.acceptance.accepted:.0%} accepted"
        )
        if ground == "probe":
            held = options[self._held]
            reason += f"; {held.name} {held.token_s * 1e3:.1f} is held to be best"
        elif ground == "bound":
            reason += "; no length meets the objectives, this one misses them by least"
        forecast = Forecast(
            cycle.draft_length, cycle.serial_s, cycle.overlapped_s, cycle_s, cycle.tokens
        )
        drafter = mode.drafter if cycle.draft_length else None
        return Decision(cycle.draft_length, reason, ground, forecast, nodes, drafter)


def make_governor(
    draft_length: int | None,
    objectives: Objectives,
    prior: Prior | None = None,
    longest: int = LONGEST,
    nodes: int | None = None,
    secondary: str | None = None,
) -> Governor:
    """The governor of a run.

    draft_length  a fixed length, or None for the governor that measures
    prior         where that governor begins; longest: its longest draft
    nodes         tokens of a tree at most; None: drafts are chains
    side          a drafter besides, for the governor that measures; None: there is none
    """
    if draft_length is None:
        return AdaptiveDraftLength(longest, objectives, prior, nodes, secondary)
    return FixedDraftLength(draft_length, nodes=nodes)
