"""What the governor chose in a run and why, and how well it knew what would come of it."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from speq.stats import Forecast, StepStats, ratio


@dataclass(slots=True)
class Choice:
    """The cycles of one draft length. reason: the last one given."""

    draft_length: int
    cycles: int = 0
    tokens: int = 0
    time_s: float = 0.0
    grounds: dict[str, int] = field(default_factory=dict)
    reason: str = ""

    @property
    def token_s(self) -> float | None:
        return ratio(self.time_s, self.tokens)


@dataclass(frozen=True, slots=True)
class Explanation:
    """choices: by the length decided on, the shortest first. The errors are relative to the time
    cycles took, as means of their size: of Eq. 3, of the overlapped form, and of what decisions
    were based on; drafts that were stopped are left out, and None is where nothing was forecast.
    """

    choices: list[Choice]
    serial_error: float | None
    overlapped_error: float | None
    error: float | None


def explain(steps: Iterable[StepStats]) -> Explanation:
    """Sum up the decisions of a run's steps."""
    choices: dict[int, Choice] = {}
    forecasts: list[tuple[Forecast, float]] = []
    for step in steps:
        if step.phase != "decode":
            continue
        time_s = step.end_s - step.start_s
        choice = choices.setdefault(step.draft_length, Choice(step.draft_length))
        choice.cycles += 1
        choice.tokens += step.emitted
        choice.time_s += time_s
        choice.grounds[step.ground] = choice.grounds.get(step.ground, 0) + 1
        choice.reason = step.reason
        forecast = step.forecast
        if forecast and forecast.draft_length == step.draft_length and time_s > 0:
            forecasts.append((forecast, time_s))

    def error(expected: Callable[[Forecast], float]) -> float | None:
        sizes = (abs(expected(forecast) / time_s - 1) for forecast, time_s in forecasts)
        return ratio(math.fsum(sizes), len(forecasts))

    return Explanation(
        [choices[length] for length in sorted(choices)],
        error(lambda forecast: forecast.serial_s),
        error(lambda forecast: forecast.overlapped_s),
        error(lambda forecast: forecast.cycle_s),
    )
