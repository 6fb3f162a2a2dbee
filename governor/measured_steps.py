"""Corrects modelled step times by measured ones, also at lengths that were not measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

# Steps that a mean remembers. Each token removes a share of the weight of all means: times drift
# with the sequence, so an old measurement says little.
HORIZON = 40.0
FADING = 1 / 200
# Variance of the model's logarithmic error: at k = 0, and added for each further unit of ln(k + 1).
LEVEL, WANDER = 0.05, 0.04
# A step's squared relative deviation from its mean, assumed first; and the assumption's weight.
NOISE, NOISE_STEPS = 0.06, 4.0
# Weight of a doubted measurement, in steps.
DOUBTED = 0.5
# Misses come in stretches, so neighbouring steps deviate alike. This many of them say as much as
# one independent step.
STRETCH = 2.0


class Correction(NamedTuple):
    """Mean and variance of ln(true / modelled) of a draft length's step."""

    mean: float
    variance: float


@dataclass(slots=True)
class MeasuredSteps:
    """Corrects a model of step times by measured ones.

    The model's error is assumed to be a random walk along ln(k + 1). So a measurement counts in
    full at its own length, and less at lengths farther away. With noise of known variance the best
    estimate is Kalman's, smoothed from both ends (Rauch, Tung and Striebel, 1965).

    lengths  the draft lengths that are measured, rising
    """

    lengths: tuple[int, ...]
    _time_s: list[float] = field(init=False)
    _weight: list[float] = field(init=False)
    _steps: list[float] = field(init=False)
    _noise: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._time_s = [0.0] * len(self.lengths)
        self._weight = [0.0] * len(self.lengths)
        self._noise = [NOISE] * len(self.lengths)
        logs = [math.log(length + 1) for length in self.lengths]
        self._steps = [WANDER * (right - left) for left, right in pairwise(logs)]

    def observe(self, draft_length: int, step_s: float, tokens: float) -> None:
        """Learn from a step. A step of another length only decays the weights."""
        kept = (1 - FADING) ** tokens
        self._weight = [weight * kept for weight in self._weight]
        if draft_length not in self.lengths or step_s <= 0:
            return
        at = self.lengths.index(draft_length)
        weight, mean_s = self._weight[at], self._time_s[at]
        if weight >= 1:
            error = min(max(step_s / mean_s - 1, -1.0), 1.0)
            share = 1 / min(weight + NOISE_STEPS, HORIZON)
            self._noise[at] += (error * error - self._noise[at]) * share
        weight = min(weight + 1, HORIZON)
        self._time_s[at] = mean_s + (step_s - mean_s) / weight
        self._weight[at] = weight

    def doubt(self, draft_length: int) -> None:
        """Reduce the weight of a length's measurements, so that its next step counts more."""
        at = self.lengths.index(draft_length)
        self._weight[at] = min(self._weight[at], DOUBTED)

    def believe(self, draft_length: int, step_s: float, weight: float) -> None:
        """Begin with a time that has the weight of so many steps. Other lengths are left out."""
        if draft_length in self.lengths:
            at = self.lengths.index(draft_length)
            self._time_s[at], self._weight[at] = step_s, weight

    def times(self) -> list[tuple[float, float]]:
        """(draft length, seconds) of lengths of which at least one step is remembered."""
        found = zip(self.lengths, self._time_s, self._weight, strict=True)
        return [(float(length), time_s) for length, time_s, weight in found if weight >= 1]

    def weight(self, draft_length: int) -> float:
        """Number of steps of that length that are remembered."""
        return self._weight[self.lengths.index(draft_length)]

    def farthest(self, least: float) -> int:
        """Index of the longest length with more than `least` remembered steps, or else 0."""
        return max((at for at, weight in enumerate(self._weight) if weight > least), default=0)

    def corrections(self, modelled_s: Sequence[float]) -> list[Correction]:
        """Compute a correction for each of `lengths`, given the model's times."""
        mean, variance = 0.0, LEVEL
        ahead: list[tuple[float, float]] = []
        for at, weight in enumerate(self._weight):
            if at:
                variance += self._steps[at - 1]
            if weight > 0:
                gain = variance / (variance + STRETCH * self._noise[at] / weight)
                mean += gain * (math.log(self._time_s[at] / modelled_s[at]) - mean)
                variance *= 1 - gain
            ahead.append((mean, variance))
        smoothed = [Correction(mean, variance)]
        for (mean, variance), step in zip(ahead[-2::-1], reversed(self._steps), strict=True):
            behind = smoothed[-1]
            gain = variance / (variance + step)
            smoothed.append(
                Correction(
                    mean + gain * (behind.mean - mean),
                    variance + gain * gain * (behind.variance - variance - step),
                )
            )
        return smoothed[::-1]
