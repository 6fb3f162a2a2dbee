"""Learns the terms of a step's time from finished steps (MoE-SpeQ 3.2.2).

The roofline model has five terms:

1. drafting, linear in k;
2. verification, linear in the distinct experts it requests;
3. experts to move, in proportion to these;
4. experts that a GPU's host computes meanwhile, in proportion to the distinct ones as well;
5. the share of the longer of 3 and 4 that is not hidden.

Lengths that were never measured are extrapolated.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from speq.governor.averages import LinearFit, Mean, Ratio
from speq.governor.prior import Prior
from speq.governor.roofline import StepEstimate
from speq.stats import StepStats

# ln(distinct experts of t rows / those of one) is b ln t - BEND (ln t)^2. This bend meets both the
# unions measured on trained models (b = 0.8) and N(t) of MoESD (b = 1.0) within some percent, for
# as many rows as are ever verified.
BEND, SPREAD = 0.1, 0.85
# Assumed first: a drafted token's time over a plain token's, and tokens of a tree for each pass.
DRAFT_SHARE, FAN = 0.6, 3.0


@dataclass(slots=True)
class Traffic:
    """Shares that the link's time depends on.

    missed   experts moved over experts that a verification requests
    hosted   experts that the host computed over the same
    exposed  share of the hideable time of transfers, or of the host, that was not hidden
    """

    missed: Ratio = field(default_factory=Ratio)
    hosted: Ratio = field(default_factory=Ratio)
    exposed: Ratio = field(default_factory=Ratio)


@dataclass(slots=True)
class SecondaryModel:
    """Terms of a secondary drafter: its token's time, and its traffic."""

    draft_token: Mean = field(default_factory=lambda: Mean(0.0))
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(slots=True)
class StepModel:
    """Estimates the time of a step of each draft length.

    It is ready once it has observed a plain step, or if it was made from a prior.
    """

    single: float = 0.0  # distinct experts of one row of each request, in all layers
    drafts: int = 0  # observed steps with a draft
    draft_base_s: float = 0.0  # of each draft, whatever its length; from a prior
    draft_token: Mean = field(default_factory=lambda: Mean(0.0))
    compute: LinearFit = field(default_factory=LinearFit)
    spread: Mean = field(default_factory=lambda: Mean(SPREAD))
    fan: Mean = field(default_factory=lambda: Mean(FAN))  # tokens of a tree over passes
    link: Ratio = field(default_factory=Ratio)
    host: Ratio = field(default_factory=Ratio)  # seconds of an expert that the host computes
    expert_bytes: Ratio = field(default_factory=Ratio)
    plain: Traffic = field(default_factory=Traffic)
    drafting: Traffic = field(default_factory=Traffic)

    @classmethod
    def of(cls, prior: Prior) -> "StepModel":
        """Make a model from a prior; without `distinct` it is not ready."""
        model = cls()
        if prior.draft_token_s:
            model.draft_base_s = prior.draft_base_s
            model.draft_token = Mean(prior.draft_token_s, prior.drafts)
        model.link.add(prior.transfer_s, 1)
        model.expert_bytes.add(prior.expert_bytes, 1)
        if prior.host_s:
            model.host.add(prior.host_s, 1)
        for rows, experts in prior.distinct:
            model._learn_spread(rows, experts)
        if model.single:
            for rows, verify_s in prior.verify:
                model.compute.add(model.distinct(rows), verify_s)
        if prior.missed is not None:
            for traffic, missed, hosted, exposed in zip(
                *((model.plain, model.drafting), prior.missed, prior.hosted, prior.exposed),
                strict=True,
            ):
                traffic.missed.add(missed * model.single, model.single)
                traffic.hosted.add(hosted * model.single, model.single)
                traffic.exposed.add(exposed * prior.transfer_s, prior.transfer_s)
        return model

    def for_batch(self, times: float) -> "StepModel":
        """Make a model of batches with `times` as many requests from this one's terms.

        Each term has the weight of a step or two, since it rests on an assumption: requests of a
        batch share experts as rows of one request do.
        """
        made = StepModel(draft_base_s=self.draft_base_s)
        if not self.ready:
            return made
        made.single = self.distinct(times)
        # b ln(nt) - BEND (ln(nt))^2 less that of n requests of one row, over ln t.
        made.spread = Mean(max(self.spread.value - 2 * BEND * math.log(times), 0.0), 1)
        made.compute = self.compute.seen_at(made.single)
        if self.draft_token.weight:
            longer = self.verify_s(made.single) / self.verify_s(self.single)
            made.draft_token = Mean(self.draft_token.value * longer, 1)
        made.fan = Mean(self.fan.value, 1)
        if self.link.known:
            made.link.add(self.link.value, 1)
            made.expert_bytes.add(self.expert_bytes.value, 1)
        if self.host.known:
            made.host.add(self.host.value, 1)
        plain_s = self.verify_s(made.single)
        for known, new in ((self.plain, made.plain), (self.drafting, made.drafting)):
            if known.missed.known:
                new.missed.add(known.missed.value * made.single, made.single)
                new.hosted.add(known.hosted.value * made.single, made.single)
            if known.exposed.known:
                new.exposed.add(known.exposed.value * plain_s, plain_s)
        return made

    @property
    def ready(self) -> bool:
        return self.compute.weight > 0

    def observe(self, step: StepStats, secondary: SecondaryModel | None = None) -> None:
        """Learn from a finished step.

        secondary  terms of the drafter that drafted; None: it was the run's own
        """
        # A batch counts by the rows of each of its requests.
        rows = step.rows / step.sequences
        if not step.requests or not (self.single or rows == 1):
            return
        self._learn_spread(rows, step.requests)
        traffic = self.drafting if step.draft_length else self.plain
        if step.draft_length and secondary is not None:
            secondary.draft_token.add(step.draft_s / step.deepest)
            traffic = secondary.traffic
        elif step.draft_length:
            self.drafts += 1
            tokens_s = max(step.draft_s - self.draft_base_s, 0.0)
            self.draft_token.add(tokens_s / (step.passes or step.deepest))
        if step.branches and step.passes:
            self.fan.add((rows - 1) / step.passes)
        waited_s = max(step.stall_s, step.host_s)
        verify_s = max(step.end_s - step.start_s - step.draft_s - waited_s, 0.0)
        self.compute.add(step.requests, verify_s)
        traffic.missed.add(step.moved, step.requests)
        traffic.hosted.add(step.host_experts, step.requests)
        if step.host_experts:
            self.host.add(step.host_s, step.host_experts)
        if step.moved:
            self.link.add(step.link_s, step.moved)
            self.expert_bytes.add(step.moved_bytes, step.moved)
        compute_s = step.draft_s + verify_s
        missing_s = max(step.link_s, step.host_s)
        hideable_s = min(compute_s, missing_s)
        if hideable_s > 0:
            overlapped_s = max(compute_s, missing_s)
            traffic.exposed.add(compute_s + waited_s - overlapped_s, hideable_s)

    def _learn_spread(self, rows: float, experts: float) -> None:
        if rows == 1:
            self.single = experts
        elif self.single:
            log_rows = math.log(rows)
            self.spread.add((math.log(experts / self.single) + BEND * log_rows**2) / log_rows)

    def distinct(self, rows: float) -> float:
        """Distinct experts that `rows` rows request, in all layers together."""
        return self._distinct(math.log(rows))

    def _distinct(self, log_rows: float) -> float:
        return self.single * math.exp(log_rows * (self.spread.value - BEND * log_rows))

    def new_experts(self, rows: float) -> float:
        """|E_new|: experts to move among the distinct ones of `rows` rows."""
        return self.distinct(rows) * self._missed(self.drafting if rows > 1 else self.plain)

    def missing_s(self, rows: float) -> float:
        """Time of the link and of the host, whichever is longer, for the experts that `rows` rows
        miss.
        """
        experts, traffic = self.distinct(rows), self.drafting if rows > 1 else self.plain
        moved_s = experts * self._missed(traffic) * self.link.value
        return max(moved_s, experts * self._hosted(traffic) * self.host.value)

    def _hosted(self, traffic: Traffic) -> float:
        known = traffic.hosted if traffic.hosted.known else self.plain.hosted
        return min(known.value, 1.0)

    def _missed(self, traffic: Traffic) -> float:
        known = traffic.missed if traffic.missed.known else self.plain.missed
        return min(known.value, 1.0)

    def _exposed(self, traffic: Traffic) -> float:
        known = traffic.exposed if traffic.exposed.known else self.plain.exposed
        return min(max(known.value, 0.0), 1.0) if known.known else 1.0

    def nodes(self, passes: int, most: int | None) -> float:
        """Drafted tokens of `passes` passes, in a tree of at most `most` tokens or in a chain."""
        return passes if most is None else min(passes * self.fan.value, most)

    @property
    def draft_token_s(self) -> float:
        if self.draft_token.weight:
            return self.draft_token.value
        return DRAFT_SHARE * self.verify_s(self.single)

    def verify_s(self, experts: float) -> float:
        """Time of a verification that requests `experts` distinct experts, all resident."""
        return self.compute.at(experts)

    def estimates(
        self,
        lengths: Iterable[int],
        tokens: Iterable[float],
        most_nodes: int | None = None,
        secondary: SecondaryModel | None = None,
    ) -> list[StepEstimate]:
        """Estimate the steps of some draft lengths, given the tokens that each yields.

        most_nodes  most tokens of a tree; None: the drafts are chains
        secondary   terms of the drafter; None: the run's own drafts

        T_pcie,init is part of the exposed share.
        """
        draft_token_s, base_s, traffic = self.draft_token_s, self.draft_base_s, self.drafting
        if secondary is not None:
            draft_token_s, base_s, traffic = secondary.draft_token.value, 0.0, secondary.traffic
        transfer_s, expert_bytes = self.link.value, self.expert_bytes.value
        plain, drafting = (
            (self._missed(each), self._exposed(each), self._hosted(each) * self.host.value)
            for each in (self.plain, traffic)
        )
        found = []
        for draft_length, emitted in zip(lengths, tokens, strict=True):
            missed, exposed, host_s = drafting if draft_length else plain
            experts = self._distinct(_log_rows(self.nodes(draft_length, most_nodes)))
            moved = experts * missed
            found.append(
                StepEstimate(
                    draft_length,
                    emitted,
                    base_s + draft_length * draft_token_s if draft_length else 0.0,
                    self.verify_s(experts),
                    moved * transfer_s,
                    moved * expert_bytes,
                    0.0,
                    exposed,
                    experts * host_s,
                )
            )
        return found


@lru_cache(maxsize=1024)
def _log_rows(drafted: float) -> float:
    return math.log(drafted + 1)
