"""What the last steps of a run came to: the figures of a view that follows the run."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from speq.stats import StepStats, ratio

# Enough to be steady, few enough to follow.
WINDOW = 16


@dataclass(frozen=True, slots=True)
class LastFigures:
    """Averages over the last decode steps; None where there was nothing to divide by.

    tokens  of the whole run
    steps   that the averages are over
    draft, verify, stall, rest  shares of the time in steps: drafting; verifying, without stalls;
            waiting for experts; what is left. They add up to 1
    link_busy      share of that time in which at least one expert was moved
    hidden_share   share of this in which the computation did not wait
    """

    tokens: int
    steps: int
    tpot_ms: float | None = None
    draft_length: float | None = None
    acceptance_rate: float | None = None
    hit_rate: float | None = None
    moved_bytes_per_token: float | None = None
    draft: float | None = None
    verify: float | None = None
    stall: float | None = None
    rest: float | None = None
    link_busy: float | None = None
    hidden_share: float | None = None


def figures_of(tokens: int, steps: Sequence[StepStats]) -> LastFigures:
    """Of decode steps, and of a run that has emitted so many tokens."""

    def total(name: str) -> float:
        return float(sum(getattr(step, name) for step in steps))

    time_s, emitted, link_s = total("duration_s"), total("emitted"), total("link_s")
    draft_s, stall_s = total("draft_s"), total("stall_s")
    # All waiting is for the exact model's experts. A device tells of it when it ended, perhaps in a
    # later step: a few steps may hold more of it than of verifying.
    verify_s = max(total("verify_s") - stall_s, 0.0)
    # Likewise a transfer counts in the step in which it ended.
    whole_s = max(time_s, draft_s + verify_s + stall_s)
    return LastFigures(
        tokens,
        len(steps),
        tpot_ms=ratio(time_s * 1e3, emitted),
        draft_length=ratio(total("draft_length"), len(steps)),
        acceptance_rate=ratio(total("accepted"), total("draft_length")),
        hit_rate=ratio(total("hits"), total("requests")),
        moved_bytes_per_token=ratio(total("moved_bytes"), emitted),
        draft=ratio(draft_s, whole_s),
        verify=ratio(verify_s, whole_s),
        stall=ratio(stall_s, whole_s),
        rest=ratio(whole_s - draft_s - verify_s - stall_s, whole_s),
        link_busy=ratio(min(link_s, time_s), time_s),
        hidden_share=ratio(link_s - total("exposed_s"), link_s),
    )


@dataclass(slots=True)
class LastSteps:
    """Hears of steps, and keeps the last ones of the run under way. tokens: of the run."""

    tokens: int = 0
    steps: deque[StepStats] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def hear(self, step: StepStats) -> None:
        if step.phase == "prefill":
            self.tokens = 0
            self.steps.clear()
        else:
            self.steps.append(step)
        self.tokens += step.emitted

    @property
    def figures(self) -> LastFigures:
        return figures_of(self.tokens, self.steps)
