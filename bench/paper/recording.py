"""Routes of the same texts at several draft lengths, to replay candidates on.

Each length is recorded by itself, so that acceptance and the routes of rejected tokens are those of
real drafts of that length. The first quarter of a replay warms the slots, and by its second half,
which no figure counts, a choice is made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from speq.bench.paper.candidates import (
    Candidate,
    CodecCost,
    ExpertMemory,
    Outcome,
    Standing,
    choose,
)
from speq.bench.replay.hit_rate import link_of, measured
from speq.bench.replay.replay import Replay, Scheduling, Times
from speq.errors import SpeqError
from speq.measure.route_trace import RouteTrace, record
from speq.stats import RunStats, StepStats
from speq.units import Progress

# Of the tokens: where a trial begins, and where it ends and what is counted begins.
TRIAL, COUNTED = Fraction(1, 8), Fraction(1, 4)


@dataclass(frozen=True, slots=True)
class Recording:
    """By draft length; 0 is without a draft.

    times        with all experts in slots, as plain words, and the link's for one of them
    draft_bytes  of the INT4 copy
    """

    traces: dict[int, RouteTrace]
    times: dict[int, Times]
    draft_bytes: int

    @classmethod
    def of(
        cls,
        model: str,
        memory_budget: str,
        draft_lengths: Sequence[int],
        prompts: list[str],
        max_new_tokens: int,
        link_bytes_per_s: int | None,
        progress: Progress | None = None,
    ) -> "Recording":
        """Generate with room for all experts. link_bytes_per_s: None measures it."""
        transfer_s, moved_bytes = link_of(model)
        if link_bytes_per_s is not None:
            transfer_s = moved_bytes / link_bytes_per_s
        traces, times, draft_bytes = {}, {}, 0
        for done, length in enumerate(draft_lengths, start=1):
            draft = "auto" if length else "none"
            trace, run = record(
                model,
                memory_budget,
                length,
                prompts,
                max_new_tokens,
                draft=draft,
                codec="raw",
            )
            if length and not run.memory["draft"]:
                raise SpeqError(
                    f"memory_budget is {memory_budget}, which has no room for the draft; routes "
                    "are recorded with room for it and for all experts"
                )
            traces[length] = trace
            times[length] = measured(run, trace, transfer_s, moved_bytes)
            draft_bytes = max(draft_bytes, run.memory["draft"])
            if progress is not None:
                progress("recording routes", done, len(draft_lengths))
        return cls(traces, times, draft_bytes)

    @property
    def memory(self) -> ExpertMemory:
        trace, raw = next(iter(self.traces.values())), next(iter(self.times.values()))
        return ExpertMemory(trace.num_layers * trace.num_experts, raw.moved_bytes, self.draft_bytes)

    def as_json(self) -> dict[str, Any]:
        """What rows rest on."""
        return {
            "times": {str(length): asdict(times) for length, times in self.times.items()},
            "tokens": {
                str(length): sum(step.emitted for step in trace.steps)
                for length, trace in self.traces.items()
            },
            "draft_bytes": self.draft_bytes,
        }

    def replay(self, candidate: Candidate, cost: CodecCost, slots: int) -> list[StepStats]:
        """Every step of one candidate with so many slots."""
        times = cost.times(self.times[candidate.draft_length])
        scheduling = Scheduling(slots, candidate.cache_policy, candidate.prefetch)
        return Replay(self.traces[candidate.draft_length], times, scheduling).run().stats.steps

    def compete(
        self,
        systems: Mapping[str, list[Candidate]],
        costs: Mapping[str, CodecCost],
        fraction: float,
        progress: Progress | None = None,
    ) -> dict[str, Standing]:
        """Each system as its best candidate, but `auto` as the one that a trial recommends."""
        trials, counted = {}, {}
        every = list(dict.fromkeys(c for candidates in systems.values() for c in candidates))
        for done, candidate in enumerate(every, start=1):
            cost = costs[candidate.codec]
            slots = self.memory.slots(fraction, cost.slot_bytes, candidate.has_draft)
            if slots:
                steps = self.replay(candidate, cost, slots)
                trials[candidate] = outcome_of(slots, steps, TRIAL, COUNTED).tpot_ms
                counted[candidate] = outcome_of(slots, steps, COUNTED)
            if progress is not None:
                progress(f"replay, f = {fraction}", done, len(every))
        standings = {}
        for name, candidates in systems.items():
            fitting = [candidate for candidate in candidates if candidate in counted]
            if not fitting:
                standings[name] = Standing()
                continue
            known = trials if name == "auto" else {c: counted[c].tpot_ms for c in fitting}
            chosen = choose({candidate: known[candidate] for candidate in fitting})
            standings[name] = Standing(chosen, [counted[chosen]])
        return standings


def outcome_of(
    slots: int, steps: list[StepStats], start: Fraction, end: Fraction = Fraction(1)
) -> Outcome:
    """Of the steps between these shares of all tokens. Raises SpeqError where there are none."""
    window = steps[first_step(steps, start) : first_step(steps, end)]
    if not window:
        raise SpeqError(
            f"the texts have {sum(step.emitted for step in steps)} tokens, too few to try "
            "candidates on the first of them; give more prompts, or more max_new_tokens"
        )
    return Outcome.of(slots, [RunStats(0.0, {}, steps=window)])


def first_step(steps: list[StepStats], share: Fraction) -> int:
    """The first step before which at least this share of all tokens was emitted."""
    wanted = share * sum(step.emitted for step in steps)
    emitted = 0
    for at, step in enumerate(steps):
        if emitted >= wanted:
            return at
        emitted += step.emitted
    return len(steps)
