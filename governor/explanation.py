"""Sums up a run's draft lengths, the reasons for them, and the errors of the expected times."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from speq.stats import Forecast, StepStats, ratio


@dataclass(slots=True)
class ExplanationRow:
    """The steps of one draft length.

    branching  True for trees
    drafter    that drafted instead of the run's own; empty: none did
    reason     the last one given for it
    """

    draft_length: int
    branching: bool = False
    drafter: str = ""
    steps: int = 0
    tokens: int = 0
    time_s: float = 0.0
    grounds: dict[str, int] = field(default_factory=dict)
    reason: str = ""

    @property
    def token_s(self) -> float | None:
        return ratio(self.time_s, self.tokens)


@dataclass(frozen=True, slots=True)
class Explanation:
    """A run's decisions. Stopped drafts do not count for the errors.

    choices           by draft length, the shortest first; chains before trees, and the run's own
                      drafter before another
    serial_error      mean absolute error of Eq. 3, relative to the step's time
    overlapped_error  the same for the overlapped form
    error             the same for the times that decisions were based on

    Errors are None for a run without forecasts.
    """

    choices: list[ExplanationRow]
    serial_error: float | None
    overlapped_error: float | None
    error: float | None


def explain(steps: Iterable[StepStats]) -> Explanation:
    """Sum up the decisions of a run's steps."""
    choices: dict[tuple[int, bool, str], ExplanationRow] = {}
    forecasts: list[tuple[Forecast, float]] = []
    for step in steps:
        if step.phase != "decode":
            continue
        time_s = step.end_s - step.start_s
        kind = step.deepest, step.branches > 0, step.drafter or ""
        choice = choices.setdefault(kind, ExplanationRow(*kind))
        choice.steps += 1
        choice.tokens += step.emitted
        choice.time_s += time_s
        choice.grounds[step.ground] = choice.grounds.get(step.ground, 0) + 1
        choice.reason = step.reason
        forecast = step.forecast
        if forecast and forecast.draft_length == step.deepest and time_s > 0:
            forecasts.append((forecast, time_s))

    def error(expected: Callable[[Forecast], float]) -> float | None:
        sizes = (abs(expected(forecast) / time_s - 1) for forecast, time_s in forecasts)
        return ratio(math.fsum(sizes), len(forecasts))

    return Explanation(
        [choices[kind] for kind in sorted(choices)],
        error(lambda forecast: forecast.serial_s),
        error(lambda forecast: forecast.overlapped_s),
        error(lambda forecast: forecast.step_s),
    )
