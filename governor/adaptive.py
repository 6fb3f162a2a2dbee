"""Chooses each step's draft length from the times of earlier steps (MoE-SpeQ 3.2.3).

A roofline model, learnt online, estimates the time of a step of every length. Measured steps
correct it. Acceptance gives the tokens that a step yields. The governor takes the length of the
highest throughput, 0 included. It probes other lengths within a small share of the time. So
speculation that does not pay is off, except for a few steps that would notice if it did.

If drafts may be trees, a tree of each length is another option. Trees and chains are measured
separately; they share the terms of the model.

A secondary drafter has a draft for some steps only, and is an option in these. Its drafts are
measured separately.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from speq.governor.acceptance import Acceptance
from speq.governor.draft_length import (
    LENGTHS,
    LONGEST,
    LONGEST_SECONDARY,
    Decision,
    DecisionReason,
    FixedDraftLength,
    Governor,
)
from speq.governor.measured_steps import MeasuredSteps
from speq.governor.objectives import Objectives
from speq.governor.prior import Prior
from speq.governor.roofline import StepEstimate
from speq.governor.step_model import SecondaryModel, StepModel
from speq.stats import Forecast, StepStats

# Shares of the time that probes of drafts may lose, and plain steps between better drafts.
DRAFT_SHARE, PLAIN_SHARE = 0.008, 0.015
# The same for drafts of a secondary drafter.
SECONDARY_SHARE = 0.004
# Plain steps between drafts come in bursts. The first ones of a burst do not count, because slots
# must fill again with the experts that a single token needs.
BURST, SETTLE = 8, 3
# The very first plain steps ran before slots were full. After SECOND_LOOK decisions for drafts they
# are measured again, unless they took HOPELESS times as long.
SECOND_LOOK, HOPELESS = 12, 2.5
# Plain steps that probes may lose at once in a run with a prior, divided by the prior's weight in
# steps: a plan knows less than a measurement.
BELIEVED = 1.0
# Least charge of a probe, in tokens' time: a cheap outcome may be luck.
LEAST_LOSS = 0.1
# A probe may go REACH lengths beyond the longest measured one. A length is measured if more than
# this share of a step is remembered.
REACH, MEASURED = 2, 0.3
# Plain steps that come first without a prior: all other lengths are compared with them.
FIRST_PLAIN = 4
# A length is worth a probe if it might be better by this share. With a full budget, LUCK standard
# deviations are hoped for, and fewer otherwise.
LUCK, WORTHWHILE = 3.0, 0.02
# Standard deviations that plain decoding is granted.
DOUBT = 0.5
# The governor leaves a length only for one that is expected to be better by this share.
HYSTERESIS = 0.01
# A draft stops if one more token is expected to cost STOP times its yield, but only after USUAL
# drafts have shown how many new experts are usual.
STOP, USUAL = 1.25, 8


class LengthEstimate(NamedTuple):
    """The current estimate of a draft length.

    model              the step by the model alone
    step_s             its time, corrected by measurements
    token_s            the same per expected token
    deviation          standard deviation of the logarithm of both times
    optimistic_tokens  tokens of the step if acceptance were better than estimated
    """

    model: StepEstimate
    step_s: float
    token_s: float
    deviation: float
    optimistic_tokens: float
    mode: "DraftMode"

    @property
    def name(self) -> str:
        drafted = f"k={self.model.draft_length}"
        if self.mode.drafter is not None:
            drafted = f"{self.mode.drafter} {drafted}"
        return drafted if self.mode.nodes is None else f"{drafted} as a tree"

    def optimistic_token_s(self, luck: float) -> float:
        return self.step_s * math.exp(-luck * self.deviation) / self.optimistic_tokens


@dataclass(slots=True)
class ProbeBudget:
    """The seconds that probes may still lose.

    share  of all time that is added
    first  in plain steps, at the start
    most   in plain steps
    """

    share: float
    first: float
    most: float
    left_s: float = 0.0

    def open(self, plain_s: float) -> None:
        self.left_s = self.first * plain_s

    def earn(self, step_s: float, plain_s: float) -> None:
        self.left_s = min(self.left_s + self.share * step_s, self.most * plain_s)

    def left_share(self, plain_s: float) -> float:
        """Share of the budget that is left, from 0 to 1."""
        return max(self.left_s, 0.0) / (self.most * plain_s) if plain_s else 0.0


@dataclass(slots=True)
class DraftMode:
    """Acceptance and measurements of one mode: chains, trees, or a secondary drafter's chains.

    nodes     most tokens of a tree; None: chains
    measured  steps of each length, and of plain decoding
    drafter   name of the drafter; None: the run's own
    model     terms of a secondary drafter; None: the run's own drafts
    """

    nodes: int | None
    acceptance: Acceptance
    measured: MeasuredSteps
    drafter: str | None = None
    model: SecondaryModel | None = None

    @classmethod
    def of(cls, longest: int, nodes: int | None = None, drafter: str | None = None) -> "DraftMode":
        lengths = tuple(k for k in LENGTHS if k <= longest)
        model = None if drafter is None else SecondaryModel()
        return cls(nodes, Acceptance(longest), MeasuredSteps(lengths), drafter, model)


@dataclass(slots=True)
class AdaptiveDraftLength:
    """The governor of `--draft-length auto`.

    longest     longest draft of the run's own drafter; 0: it has none
    objectives  bounds on time per token and per step, kept if any length can
    prior       estimates before the first step. Without it, or if it knows nothing about experts,
                the first steps calibrate
    nodes       most tokens of a tree; None: drafts are chains
    secondary   name of a secondary drafter, whose drafts are chains; None: there is none
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
    # Budgets for probes that draft, for those of the secondary drafter, and for plain steps while
    # drafting is better.
    _drafts: ProbeBudget = field(default_factory=lambda: ProbeBudget(DRAFT_SHARE, 4.0, 8.0))
    _secondary_drafts: ProbeBudget = field(
        default_factory=lambda: ProbeBudget(SECONDARY_SHARE, 2.0, 4.0)
    )
    _plains: ProbeBudget = field(default_factory=lambda: ProbeBudget(PLAIN_SHARE, 0.0, 4.0))
    _plain_s: float = 0.0
    _burst: int = 0
    _first_plain: int = FIRST_PLAIN
    # Plain steps since the last draft, and decisions in which a draft was estimated to be better.
    _plain_run: int = SETTLE
    _draft_decisions: int = 0
    # Plain decoding and chains, by index in the measured lengths; then trees, then drafts of the
    # secondary drafter.
    _options: list[LengthEstimate] = field(default_factory=list)
    # Indices of options: the best one, kept with inertia, and the one of the current step.
    _best: int = 0
    _chosen: int = 0
    _stopped: bool = False
    _cold: bool = False

    def __post_init__(self) -> None:
        prior = self.prior
        self.model = StepModel() if prior is None else StepModel.of(prior)
        self.chains = DraftMode.of(self.longest)
        self.trees = None if self.nodes is None else DraftMode.of(self.longest, self.nodes)
        self.secondaries = (
            None
            if self.secondary is None
            else DraftMode.of(LONGEST_SECONDARY, drafter=self.secondary)
        )
        if prior is not None and prior.acceptance is not None:
            for mode in self._modes:
                if mode is not self.secondaries:
                    mode.acceptance.believe(prior.acceptance, prior.tokens)
        if prior is not None:
            self._begin_with(self.model, BELIEVED / prior.drafts)

    def _begin_with(self, model: StepModel, believed: float = BELIEVED) -> None:
        """Skip the calibration if a model was made from a prior.

        believed  plain steps that probes may lose at once
        """
        self.model = model
        if model.ready:
            self._first_plain = 0
            self._plain_s = model.verify_s(model.single)
            self._drafts.left_s = believed * self._plain_s
            self._secondary_drafts.open(self._plain_s)

    def for_batch(self, longest: int, times: float) -> "AdaptiveDraftLength":
        """Make a governor of batches with `times` as many requests, without a secondary drafter.

        It begins with estimates from this one's steps, and shares its acceptance.
        """
        nodes = None if self.nodes is None or not longest else min(self.nodes, longest)
        made = AdaptiveDraftLength(min(longest, self.longest), self.objectives, nodes=nodes)
        made._begin_with(self.model.for_batch(times))
        made.chains.acceptance = self.chains.acceptance
        if made.trees is not None and self.trees is not None:
            made.trees.acceptance = self.trees.acceptance
        return made

    @property
    def _modes(self) -> list[DraftMode]:
        return [mode for mode in (self.chains, self.trees, self.secondaries) if mode is not None]

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance of chains."""
        return self.chains.acceptance

    @property
    def measured(self) -> MeasuredSteps:
        """Measured steps of chains."""
        return self.chains.measured

    def begin(self) -> None:
        self._cold = True

    def decide(self, offered: bool = False) -> Decision:
        if self._first_plain:
            return Decision(0, "plain decoding is measured first", "probe")
        if not self.model.draft_token.weight and self.longest:
            return Decision(1, "drafting is measured first", "probe")
        self._options = self._estimate()
        self._stopped = False
        options = self._options
        available = [
            at
            for at, option in enumerate(options)
            if offered or option.mode is not self.secondaries
        ]
        allowed = [
            at
            for at in available
            if self.objectives.met(options[at].step_s, options[at].model.tokens)
        ]
        if not allowed:
            self._best = self._chosen = self._nearest(available)
            return self._decision("bound")
        self._best = self._find_best(allowed)
        probe = None if self._cold else self._probe_plain(allowed)
        if probe is None and not self._cold:
            probe = self._probe(allowed)
        self._chosen = self._best if probe is None else probe
        return self._decision("best" if probe is None else "probe")

    def continue_draft(self, drafted: int, new_experts: int, accept_prob: float) -> bool:
        """Compare the cost of one more token with its yield.

        The cost is its draft, its row, and the exposed transfers of as many new experts as this
        draft's tokens needed so far. The yield is the probability that the token is accepted:
        `accept_prob` times that of a drafted token in general.
        """
        if self.model.drafts < USUAL:
            return True
        model, option = self.model, self._options[self._chosen]
        surprise = (new_experts + 1) / (model.new_experts(drafted) + 1)
        rows, next_rows = (
            1 + model.nodes(passes, option.mode.nodes) for passes in (drafted, drafted + 1)
        )
        more = model.distinct(next_rows) - model.distinct(rows)
        missing_s = (model.missing_s(next_rows) - model.missing_s(rows)) * surprise
        estimate = option.model
        exposed = estimate.exposed if estimate.missing_s < estimate.compute_s else 1.0
        cost_s = model.draft_token_s + more * model.compute.slope + missing_s * exposed
        accepted = accept_prob * option.mode.acceptance.accepted
        self._stopped = cost_s > STOP * accepted * self._options[self._best].token_s
        return not self._stopped

    def observe(self, step: StepStats) -> None:
        step_s = step.duration_s
        # A stopped draft counts for the chosen length, in its time and in its tokens. Otherwise
        # only lucky drafts would count, and the length would look cheap.
        mode, length = self.chains, step.deepest
        if self._options and length:
            mode = self._options[self._chosen].mode
            # A tree less deep than its passes spent them on other branches.
            length = length if mode.nodes is None else step.passes
        drafts = [(length, step.accepted, self._stopped)]
        if step.sequences > 1:
            drafts = [(each.draft_length, each.accepted, each.stopped) for each in step.drafts]
        if self._stopped:
            length = self._options[self._chosen].model.draft_length
        for each in self._modes:
            for drafted in drafts:
                each.acceptance.observe(*(drafted if each is mode else (0, 0)))
        # Per request, as all that follows.
        emitted = step.emitted / step.sequences
        if self._cold:
            # Slots hold the experts of prefill in the first step only.
            self._cold = False
            # At least one plain step is learnt, however short requests are: all else is relative.
            if self._first_plain > 1:
                self._first_plain -= 1
            return
        self.model.observe(step, mode.model)
        self._plain_run = 0 if step.draft_length else self._plain_run + 1
        settled = step.draft_length > 0 or self._plain_run > SETTLE
        for each in self._modes:
            counts = settled and (each is mode or not step.draft_length)
            each.measured.observe(length if counts else -1, step_s, emitted)
        if not step.draft_length:
            if settled:
                weight = max(self.measured.weight(0), 1.0)
                self._plain_s += (step_s - self._plain_s) / min(weight, 20.0)
            self._burst = max(self._burst - 1, 0)
            self._first_plain = max(self._first_plain - 1, 0)
        if self._options:
            for budget in (self._drafts, self._secondary_drafts, self._plains):
                budget.earn(step_s, self._plain_s)
        else:
            self._drafts.open(self._plain_s)
            self._secondary_drafts.open(self._plain_s)
        if self._chosen != self._best:
            budget = self._probe_budget(mode) if self._chosen else self._plains
            token_s = self._options[self._best].token_s
            budget.left_s -= max(step_s - token_s * emitted, LEAST_LOSS * token_s)

    def outlook(self) -> list[StepEstimate]:
        return [option.model for option in self._options if option.mode is self.chains]

    def _estimate(self) -> list[LengthEstimate]:
        options = self._estimate_mode(self.chains)
        for mode in self._modes[1:]:
            options += self._estimate_mode(mode)[1:]  # plain decoding is among the chains
        return options

    def _estimate_mode(self, mode: DraftMode) -> list[LengthEstimate]:
        # Trees that were never drafted are assumed to yield as much as chains.
        tried = mode is not self.trees or mode.measured.farthest(0.0)
        acceptance = mode.acceptance if tried else self.chains.acceptance
        luck = 1 + self._luck(mode) * mode.acceptance.deviation / acceptance.overall
        # By k: the expected tokens of a step, and those of a lucky one.
        expected, optimistic = [1.0], [1.0]
        accept_prob = lucky_prob = 1.0
        for probability in acceptance.probabilities():
            accept_prob *= probability
            lucky_prob *= min(probability * luck, 1.0)
            expected.append(expected[-1] + accept_prob)
            optimistic.append(optimistic[-1] + lucky_prob)
        lengths = mode.measured.lengths
        emitted = [expected[length] for length in lengths]
        models = self.model.estimates(lengths, emitted, mode.nodes, mode.model)
        modelled_s = [model.step_s for model in models]
        options = []
        for model, time_s, (mean, variance) in zip(
            models, modelled_s, mode.measured.corrections(modelled_s), strict=True
        ):
            step_s = time_s * math.exp(mean)
            token_s = step_s / model.tokens
            deviation, tokens = math.sqrt(variance), optimistic[model.draft_length]
            options.append(LengthEstimate(model, step_s, token_s, deviation, tokens, mode))
        return options

    def _find_best(self, allowed: list[int]) -> int:
        """Find the length of the highest throughput (Eqs. 4 and 5), with inertia against noise."""

        def score_s(at: int) -> float:
            option = self._options[at]
            return option.token_s * (1 if at else math.exp(-DOUBT * option.deviation))

        best = min(allowed, key=score_s)
        stay = self._best in allowed and score_s(self._best) <= score_s(best) * (1 + HYSTERESIS)
        return self._best if stay else best

    def _probe_budget(self, mode: DraftMode) -> ProbeBudget:
        return self._secondary_drafts if mode is self.secondaries else self._drafts

    def _luck(self, mode: DraftMode) -> float:
        """Standard deviations of luck that a probe of this mode may hope for."""
        return LUCK * self._probe_budget(mode).left_share(self._plain_s)

    def _probe_plain(self, allowed: list[int]) -> int | None:
        """Return 0 if plain decoding should be measured now, to compare drafts with it."""
        if self._best == 0 or 0 not in allowed:
            self._burst = 0
            return None
        token_s, plain_s = self._options[self._best].token_s, self._options[0].token_s
        self._draft_decisions += 1
        if self._draft_decisions == SECOND_LOOK and plain_s < HOPELESS * token_s:
            self._burst = BURST
            for mode in self._modes:
                mode.measured.doubt(0)
        loss_s = max(plain_s - token_s, LEAST_LOSS * token_s)
        if not self._burst and self._plains.left_s > BURST * loss_s:
            self._burst = BURST
        return 0 if self._burst else None

    def _probe(self, allowed: list[int]) -> int | None:
        """Find another length that may be better, if the budget covers being wrong about it."""
        token_s = self._options[self._best].token_s
        chosen, most = None, 0.0
        for at in allowed:
            if at == 0 or not self._within_reach(at):
                continue
            option = self._options[at]
            gain = 1 - option.optimistic_token_s(self._luck(option.mode)) / token_s
            loss_s = option.step_s - token_s * option.model.tokens
            left_s = self._probe_budget(option.mode).left_s
            if at == self._best or gain < WORTHWHILE or loss_s > left_s:
                continue
            worth = gain * gain / max(loss_s, LEAST_LOSS * token_s)
            if worth > most:
                chosen, most = at, worth
        return chosen

    def _within_reach(self, at: int) -> bool:
        """Tell whether an option is little longer than the longest measured one of its mode."""
        option = self._options[at]
        measured = option.mode.measured
        place = measured.lengths.index(option.model.draft_length)
        return place <= REACH + measured.farthest(MEASURED)

    def _nearest(self, available: list[int]) -> int:
        """Find the option that misses the objectives by least."""

        def excess(option: LengthEstimate) -> float:
            late = option.step_s / self.objectives.latency_s
            return max(late, option.token_s / self.objectives.tpot_s)

        return min(available, key=lambda at: excess(self._options[at]))

    def _decision(self, ground: DecisionReason) -> Decision:
        """Return the chosen option, with its limit and its neighbours' times as the reason."""
        at, options = self._chosen, self._options
        model = options[at].model
        neighbours = ", ".join(
            f"{other.name} {other.token_s * 1e3:.1f}"
            for other in options[max(at - 1, 0) : at + 2]
            if other is not options[at]
        )
        mode = options[at].mode
        nodes = mode.nodes
        shape = "" if nodes is None else f"a tree of at most {nodes} tokens: "
        if mode.drafter is not None:
            shape = f"by {mode.drafter}: "
        reason = (
            f"{shape}{options[at].token_s * 1e3:.1f} ms/token expected ({neighbours}), "
            f"most of it {model.limit}; {mode.acceptance.accepted:.0%} accepted"
        )
        if ground == "probe":
            best = options[self._best]
            reason += f"; {best.name} {best.token_s * 1e3:.1f} is estimated to be best"
        elif ground == "bound":
            reason += "; no length meets the objectives, this one misses them by least"
        forecast = Forecast(
            model.draft_length,
            model.serial_s,
            model.overlapped_s,
            options[at].step_s,
            model.tokens,
        )
        drafter = mode.drafter if model.draft_length else None
        return Decision(model.draft_length, reason, ground, forecast, nodes, drafter)


def make_governor(
    draft_length: int | None,
    objectives: Objectives,
    prior: Prior | None = None,
    longest: int = LONGEST,
    nodes: int | None = None,
    secondary: str | None = None,
) -> Governor:
    """Make the governor of a run.

    draft_length  a fixed length; None: the adaptive governor
    prior         initial estimates of the adaptive governor; longest: its longest draft
    nodes         most tokens of a tree; None: drafts are chains
    secondary     secondary drafter of the adaptive governor; None: there is none
    """
    if draft_length is None:
        return AdaptiveDraftLength(longest, objectives, prior, nodes, secondary)
    return FixedDraftLength(draft_length, nodes=nodes)
