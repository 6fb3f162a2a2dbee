"""Expects, before loading, the time per token of each way to hold experts in a budget.

For each way it finds the best draft length, and where speculation breaks even. Times come from the
roofline model (`speq.governor.roofline`), with bandwidths or a measured profile. They are good for
telling ways apart. A run measures its own steps and goes by those.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from speq.errors import NoRoom, OptionError, present
from speq.governor.averages import LinearFit
from speq.governor.draft_length import LENGTHS
from speq.governor.prior import Prior
from speq.governor.profile import Profile
from speq.governor.roofline import Link, StepEstimate, accepted_tokens
from speq.planning.cost.locality import Locality
from speq.planning.cost.peers import ALONE, Peers
from speq.planning.cost.presets import Rates
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.cost.survey import Survey
from speq.planning.cost.waiting import DRAFT_LEAVES, ROUTER_LEAVES, exposed_share, waiting_s

# What was planned weighs as much as so many steps of the run, and an assumed acceptance as much as
# so many tokens.
PLANNED, PLANNED_TOKENS = 1.0, 4.0
# A break-even is looked for within so many powers of ten of the link at hand.
DECADES = 4
STEPS_A_DECADE = 10
BISECTIONS = 50
# Of a layer's rows to the host and results back to a card: two waits of some microseconds each, and
# two copies of some kilobytes. An estimate: no card has run it.
ROUND_TRIP_S = 40e-6
# Parts of what fits further GPUs that are weighed.
PEER_PARTS = 8
# What Python takes of a draft head's pass, in layers: an attention, two branches, their mixture
# over the vocabulary. On the bundled model a pass took 2.3 ms where a layer took 0.6.
HEAD_LAYERS = 4


@dataclass(frozen=True, slots=True)
class PassBytes:
    """The bytes that a pass reads besides exact experts.

    layers             number of layers of the whole model
    fixed_bytes        weights that every exact pass reads: all but experts and embeddings
    draft_fixed_bytes  what a draft's pass reads of these, or codes in their place
    draft_token_bytes  the INT4 experts of one token, in all layers
    token_experts      exact experts of one token, in all layers
    head_bytes         what a draft head's pass reads, with the matrix that says its tokens; 0:
                       there is no head
    """

    layers: int
    fixed_bytes: int
    draft_fixed_bytes: int
    draft_token_bytes: int
    token_experts: int
    head_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Speeds:
    """Times of computing in seconds, if all requested experts are in slots.

    pass_s    time of a verification without its exact experts
    draft_base_s, draft_token_s  T_draft(k) = base + k * token
    expert_s  time of each distinct exact expert, by codec
    row_s     of each further row of a verification, its experts apart
    miss_s    of the processor for each expert that is moved
    head_token_s  of a token that a draft head drafts
    draft_experts_s  of draft_token_s, the part of the INT4 experts; 0: not known
    link_slows, compute_slows, spread  as in `Survey`
    """

    pass_s: float
    draft_base_s: float
    draft_token_s: float
    expert_s: dict[str, float]
    row_s: float = 0.0
    miss_s: float = 0.0
    head_token_s: float = 0.0
    draft_experts_s: float = 0.0
    link_slows: float = 1.0
    compute_slows: float = 1.0
    spread: float = 0.0

    @classmethod
    def of_rates(cls, rates: Rates, sizes: PassBytes, plans: Iterable[ResidencyPlan]) -> "Speeds":
        """The lower bound: a pass reads every weight once, at the memory's speed.

        It does not count arithmetic, so it is too low for long drafts on few cores.
        """
        layers_s, memory = sizes.layers * rates.layer_s, rates.memory_bytes_per_s
        return cls(
            layers_s + sizes.fixed_bytes / memory,
            0.0,
            layers_s + (sizes.draft_fixed_bytes + sizes.draft_token_bytes) / memory,
            {h.codec: h.read_bytes / memory for h in plans},
            head_token_s=HEAD_LAYERS * rates.layer_s + sizes.head_bytes / memory,
            draft_experts_s=sizes.draft_token_bytes / memory,
        )

    @classmethod
    def of_survey(
        cls, survey: Survey, sizes: PassBytes, plans: Iterable[ResidencyPlan]
    ) -> "Speeds":
        """Weights outside the experts are read beside what a layer takes. An expert takes the
        longer of reading and arithmetic.
        """
        layers_s = survey.pass_s + sizes.layers * survey.layer_s
        drafted_s = survey.layer_s if survey.draft_layer_s is None else survey.draft_layer_s
        memory = survey.memory_bytes_per_s
        draft_experts_s = max(
            sizes.token_experts * survey.draft_expert_s, sizes.draft_token_bytes / memory
        )
        return cls(
            layers_s + sizes.fixed_bytes / memory,
            0.0,
            survey.pass_s
            + sizes.layers * drafted_s
            + sizes.draft_fixed_bytes / memory
            + draft_experts_s,
            # Of a form that this model is not published in, nothing was timed.
            {h.codec: max(survey.expert_s.get(h.codec, 0.0), h.read_bytes / memory) for h in plans},
            survey.row_s,
            survey.miss_s,
            HEAD_LAYERS * survey.layer_s + sizes.head_bytes / memory,
            link_slows=survey.link_slows,
            compute_slows=survey.compute_slows,
            spread=survey.spread,
        )

    @classmethod
    def of_profile(
        cls,
        profile: Profile,
        sizes: PassBytes,
        distinct: Callable[[float], float],
        plans: Iterable[ResidencyPlan],
    ) -> "Speeds":
        """Measured times. A pass's growth with its distinct experts tells their share of it. A head
        was not timed: it takes as much of a pass without experts as it reads of its bytes, and the
        part of some layers.

        distinct  gives the experts that a pass of so many rows asks for in all layers, if the
                  profile has not counted them
        """
        counted, line = dict(profile.distinct), LinearFit()
        for rows, verify_s in profile.verify:
            line.add(counted[rows] if rows in counted else distinct(rows), verify_s)
        slope = line.slope
        read_bytes = {plan.codec: plan.read_bytes for plan in plans}
        base = _cost(profile, profile.codec, read_bytes)
        pass_s = line.y - slope * line.x
        return cls(
            pass_s,
            profile.draft_base_s,
            profile.draft_token_s,
            {codec: slope * _cost(profile, codec, read_bytes) / base for codec in read_bytes},
            head_token_s=max(pass_s, 0.0)
            * (sizes.head_bytes / sizes.fixed_bytes + HEAD_LAYERS / sizes.layers),
        )


def _cost(profile: Profile, codec: str, read_bytes: dict[str, int]) -> float:
    """The cost of computing with an expert, to compare codecs: its time, or else its bytes."""
    speeds = profile.decode_bytes_per_s
    if set(read_bytes) | {profile.codec} <= set(speeds):
        return 1 / speeds[codec]
    return float(read_bytes.get(codec, profile.expert_bytes))


class Drafts(NamedTuple):
    """Cost and acceptance of one drafter's tokens.

    by_depth   by depth, probability that a token is accepted if those before it are; the last
               one is that of all deeper tokens
    base_s, token_s  T_draft(k) = base + k * token
    ahead      whether experts move while the draft that named them goes on
    """

    by_depth: tuple[float, ...]
    base_s: float
    token_s: float
    ahead: bool

    def accept_probs(self, draft_length: int) -> list[float]:
        """p_1 to p_k."""
        return [self.by_depth[min(depth, len(self.by_depth) - 1)] for depth in range(draft_length)]

    @property
    def acceptance(self) -> float:
        """Acceptance of all depths together: a depth counts as often as it is reached."""
        reached = accumulate(self.by_depth[:-1], mul, initial=1.0)
        weights = list(reached)
        return sum(map(mul, weights, self.by_depth)) / sum(weights)


def partial_acceptance(acceptance: float, covers: float) -> float:
    """Acceptance of a draft that holds a part of the experts, if only that of all was measured.

    acceptance  of one that holds all
    covers      share of what tokens choose that is of the part

    On texts of the bundled model that are like those counted, the shares 0.98, 0.87 and 0.60 (24,
    16 and 8 of 32 experts) made it 0.99, 0.95 and 0.80 times as often. On texts of other kinds 0.92
    made it 0.87 times.
    """
    return acceptance * covers


@dataclass(frozen=True, slots=True)
class Outlook:
    """A model on a machine.

    num_layers  number of layers with experts
    acceptance  probability that an INT4 draft's token is accepted if those before it are
    lengths     draft lengths to choose from
    ahead       whether experts move before they are asked for, as drafts and routers name them
    head_acceptance  the same probability of a head's tokens by depth; empty: it was not measured
    host_bytes_per_s  of the host's memory, whose processor computes missing experts for a card; 0:
                      it computes none
    draft_token_bytes  the INT4 experts of one token, in all layers
    peers       further GPUs of the same kind
    """

    num_layers: int
    locality: Locality
    speeds: Speeds
    link: Link
    acceptance: float
    lengths: tuple[int, ...] = tuple(k for k in LENGTHS if k)
    ahead: bool = True
    head_acceptance: tuple[float, ...] = ()
    host_bytes_per_s: float = 0.0
    draft_token_bytes: int = 0
    peers: Peers = ALONE

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise OptionError(f"acceptance is {self.acceptance}; it must be from 0 to 1")
        if not 0 < self.link.bandwidth_bytes_per_s < math.inf:
            raise OptionError(
                f"the link gives {self.link.bandwidth_bytes_per_s} bytes/s; it must be more than 0"
            )

    def drafts(self, plan: ResidencyPlan) -> Drafts | None:
        """None of a drafter of which nothing is known beforehand."""
        speeds, drafter = self.speeds, plan.drafter
        if drafter == "int4":
            by_depth = (partial_acceptance(self.acceptance, plan.draft_covers),)
            token_s = self.host_draft_token_s if plan.draft_on_host else speeds.draft_token_s
            return Drafts(by_depth, speeds.draft_base_s, token_s, self.ahead)
        if drafter == "head" and self.head_acceptance:
            return Drafts(self.head_acceptance, 0.0, speeds.head_token_s, False)
        return None

    @property
    def host_draft_token_s(self) -> float:
        """Time of a drafted token whose INT4 experts the host computes, at what copies leave of its
        memory's speed; infinite where it computes none.
        """
        left = self.host_bytes_per_s - self.link.bandwidth_bytes_per_s
        if left <= 0 or not self.speeds.draft_experts_s:
            return math.inf
        on_host_s = self.num_layers * ROUND_TRIP_S + self.draft_token_bytes / left
        return self.speeds.draft_token_s - self.speeds.draft_experts_s + on_host_s

    def _known_drafts(self, plan: ResidencyPlan) -> Drafts:
        return present(self.drafts(plan), "a drafter is weighed of which nothing is known")

    def asked(self, rows: float) -> float:
        """Distinct experts of all layers that a pass of so many rows asks for."""
        return self.num_layers * self.locality.distinct(rows)

    def own(self, plan: ResidencyPlan) -> Locality:
        """Routes to the experts that further GPUs do not have."""
        held = sum(plan.peers)
        return self.locality.without(held, self.peers.covers[held] if held else 0.0)

    def missed(self, plan: ResidencyPlan, rows: float) -> float:
        """Those of them that are in no slot of any GPU."""
        return self.num_layers * self.own(plan).misses(plan.slots / self.num_layers, rows)

    def peers_s(self, plan: ResidencyPlan, rows: float) -> float:
        """Time that further GPUs take for a layer, all at once."""
        held = sum(plan.peers)
        if not held:
            return 0.0
        asked = self.locality.distinct(rows) - self.own(plan).distinct(rows)
        return ROUND_TRIP_S + asked * max(plan.peers) / held * self.speeds.expert_s[plan.codec]

    def with_peers(self, plan: ResidencyPlan) -> ResidencyPlan:
        """The plan with as many experts on further GPUs, in parts of what fits, as make a token's
        layer shortest: these and the first one compute, and load, at the same time.
        """
        if plan.peers or not self.peers.slots_bytes:
            return plan
        room = self.peers.room(plan.slot_bytes, self.num_layers)

        def layer_s(way: ResidencyPlan) -> float:
            own_s = self.own(way).distinct(1) * self.speeds.expert_s[way.codec]
            loaded_s = self.link.transfer_s(self.missed(way, 1) * way.moved_bytes)
            return max(own_s + loaded_s / self.num_layers, self.peers_s(way, 1))

        parts = range(PEER_PARTS, 0, -1)
        held = [tuple(-(-most * part // PEER_PARTS) for most in room) for part in parts]
        return min((replace(plan, peers=each) for each in held), key=layer_s)

    def copied_share(self, plan: ResidencyPlan) -> float:
        """The share of missing experts that is copied. The host computes the others at what copies
        leave of its memory's speed, and both end together. Records over a draft are copied all.
        """
        link = self.link.bandwidth_bytes_per_s
        if plan.needs_draft or self.host_bytes_per_s <= link:
            return 1.0
        return link / self.host_bytes_per_s

    def host_expert_s(self, plan: ResidencyPlan) -> float:
        """Time of an expert that the host computes beside copies; 0: it computes none."""
        copied = self.copied_share(plan)
        return copied / (1 - copied) * self.link.transfer_s(plan.moved_bytes) if copied < 1 else 0.0

    def verify_s(self, plan: ResidencyPlan, rows: float) -> float:
        """Time of a pass of so many rows, all of its experts in slots."""
        speeds, own = self.speeds, self.own(plan).distinct(rows)
        experts_s = max(own * speeds.expert_s[plan.codec], self.peers_s(plan, rows))
        return speeds.pass_s + (rows - 1) * speeds.row_s + self.num_layers * experts_s

    def step_estimate(self, plan: ResidencyPlan, draft_length: int) -> StepEstimate:
        """The time and the yield of a step with so many drafted tokens.

        Experts of rejected tokens are moved and read like all others. What encoding adds to a miss
        takes the processor that the pass runs on, so that nothing hides it.
        """
        rows, speeds = draft_length + 1, self.speeds
        missed, copied = self.missed(plan, rows), self.copied_share(plan)
        moved = missed * copied
        moved_bytes = moved * plan.moved_bytes
        # The card reads no expert that the host computes.
        on_host_s = -(missed - moved) * speeds.expert_s[plan.codec]
        if copied < 1:
            on_host_s += min(missed, self.num_layers) * ROUND_TRIP_S
        tokens, draft_s, leaves = 1.0, 0.0, ROUTER_LEAVES if self.ahead else 1.0
        if draft_length:
            drafts = self._known_drafts(plan)
            tokens += accepted_tokens(drafts.accept_probs(draft_length))
            draft_s = drafts.base_s + draft_length * drafts.token_s
            leaves = DRAFT_LEAVES if drafts.ahead else leaves
        verify_s = self.verify_s(plan, rows) + moved * (speeds.miss_s + plan.encode_s) + on_host_s
        new_s = self.link.transfer_s(moved_bytes)
        asked = self.num_layers * self.own(plan).distinct(rows)
        wait_s = self.num_layers * waiting_s(
            asked / self.num_layers,
            moved / asked,
            speeds.expert_s[plan.codec],
            new_s / moved if moved else 0.0,
        )
        return StepEstimate(
            draft_length,
            tokens,
            draft_s,
            verify_s,
            new_s,
            moved_bytes,
            self.link.first_fetch_s if moved_bytes > 0 else 0.0,
            exposed_share(draft_s + verify_s, new_s, wait_s, leaves),
            (missed - moved) * self.host_expert_s(plan),
            speeds.link_slows,
            speeds.compute_slows,
            speeds.spread,
        )

    def prior(self, plan: ResidencyPlan) -> Prior:
        """Prior of a run, of a plan with an estimate. What a miss takes of the processor
        counts as a part of its transfer.
        """
        speeds, drafts = self.speeds, self._known_drafts(plan)
        rows = [length + 1 for length in LENGTHS]
        best, copied = plan.step.draft_length + 1, self.copied_share(plan)
        missing = tuple(self.missed(plan, t) / self.asked(t) for t in (1, best))
        return Prior(
            verify=tuple((float(t), self.verify_s(plan, t)) for t in rows),
            distinct=tuple((float(t), self.asked(t)) for t in rows),
            draft_base_s=drafts.base_s,
            draft_token_s=drafts.token_s,
            drafts=PLANNED,
            transfer_s=self.link.transfer_s(plan.moved_bytes) + plan.encode_s + speeds.miss_s,
            expert_bytes=plan.moved_bytes,
            missed=(copied * missing[0], copied * missing[1]),
            exposed=(self.step_estimate(plan, 0).exposed, plan.step.exposed),
            acceptance=drafts.acceptance,
            tokens=PLANNED_TOKENS,
            host_s=self.host_expert_s(plan),
            hosted=((1 - copied) * missing[0], (1 - copied) * missing[1]),
        )

    def with_estimate(self, plan: ResidencyPlan) -> ResidencyPlan:
        """The plan at its best draft length: 0 without a draft, at least 1 with one.

        A drafter of which nothing is known beforehand is weighed as plain decoding.
        """
        plan = self.with_peers(plan)
        lengths = self.lengths if self.drafts(plan) is not None else (0,)
        steps = [self.step_estimate(plan, draft_length) for draft_length in lengths]
        return replace(plan, expected=min(steps, key=lambda step: step.token_s))

    def gain(self, plans: Sequence[ResidencyPlan]) -> float | None:
        """Time per token of the best way without a draft over that of the best one with an INT4
        draft.

        None if there are not both.
        """
        drafting = [self.with_estimate(h).tpot_s for h in plans if h.drafter == "int4"]
        plain = [self.with_estimate(h).tpot_s for h in plans if not h.drafts]
        return min(plain) / min(drafting) if drafting and plain else None

    def break_even_acceptance(self, plans: Sequence[ResidencyPlan]) -> float | None:
        """The acceptance below which speculation loses.

        0 if it never loses. None if it always loses, or if there is nothing to compare.
        """

        def pays(acceptance: float) -> bool:
            gain = replace(self, acceptance=acceptance).gain(plans)
            return gain is not None and gain > 1

        if not pays(1.0):
            return None
        return 0.0 if pays(0.0) else _border(pays, 1.0, 0.0)

    def break_even_link(self, plans: Sequence[ResidencyPlan]) -> float | None:
        """The link's bytes per second above which speculation gains nothing.

        0 if it gains nothing at any speed. None if it gains at every speed, or if there is nothing
        to compare. The search covers four decades on either side of the link at hand.
        """
        at_hand = self.link.bandwidth_bytes_per_s

        def pays(decades: float) -> bool:
            link = replace(self.link, bandwidth_bytes_per_s=at_hand * 10**decades)
            gain = replace(self, link=link).gain(plans)
            return gain is not None and gain > 1

        if self.gain(plans) is None or pays(DECADES):
            return None
        steps = range(DECADES * STEPS_A_DECADE - 1, -DECADES * STEPS_A_DECADE - 1, -1)
        for step in steps:
            if pays(step / STEPS_A_DECADE):
                border = _border(pays, step / STEPS_A_DECADE, (step + 1) / STEPS_A_DECADE)
                return at_hand * 10**border
        return 0.0


def _border(pays: Callable[[float], bool], inside: float, outside: float) -> float:
    """The last value found true on the way from `inside`, where `pays` holds, to `outside`."""
    for _ in range(BISECTIONS):
        middle = (inside + outside) / 2
        if pays(middle):
            inside = middle
        else:
            outside = middle
    return inside


def choose(
    outlook: Outlook, plans: Sequence[ResidencyPlan], margin: float = 0.0
) -> tuple[ResidencyPlan, str]:
    """The plan of the least expected time per token, with its estimate, and why it is chosen.

    margin  share of the time that a draft must be expected to save if it takes slots which experts
            want

    Where all of them lie in slots beside a draft, holding it costs nothing. The run tries it, and
    leaves it aside when it does not pay, so that it is worth plain decoding at least. Of drafts
    that are all expected to lose, the one that is expected to lose least is held.

    Raises SpeqError where there is no plan at all.
    """

    def cost_s(plan: ResidencyPlan) -> float:
        if not plan.drafts:
            return plan.tpot_s
        if plan.step.moved_bytes > 0:
            return plan.tpot_s / (1 - margin)
        if len(outlook.lengths) == 1:  # what was asked for is drafted whether it pays or not
            return plan.tpot_s
        plain = replace(plan, expected=outlook.step_estimate(plan, 0))
        return min(plan.tpot_s, plain.tpot_s)

    weighed = map(outlook.with_estimate, plans)
    ranked = sorted(weighed, key=lambda way: (cost_s(way), not way.drafts, way.tpot_s))
    if not ranked:
        raise NoRoom("no way to hold experts was given to choose from; the budget is too small")
    best, others = ranked[0], ranked[1:]
    beside = ", ".join(f"{other.name} {other.tpot_s * 1e3:.1f}" for other in others)
    step = best.step
    reason = (
        f"{best.name}, k={step.draft_length}: {best.tpot_s * 1e3:.1f} ms a token expected, most "
        f"of it {step.limit}"
    )
    return best, reason + (f" ({beside})" if beside else "")
