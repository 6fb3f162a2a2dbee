"""Estimates of what drifts: each measurement corrects what was known, and its interval."""

from dataclasses import dataclass
from math import exp, hypot, log, sqrt

# Standard deviations of logarithms: of what a run says; of a machine from one run to the next.
RUN_SPREAD, DRIFT = 0.1, 0.1
# So many standard deviations apart, two figures are not of the same.
APART = 2.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A speed by all that was measured of it: a Kalman filter of a random walk of its logarithm.

    spread  standard deviation of that logarithm
    """

    value: float
    spread: float

    def contradicts(self, value: float) -> bool:
        """True if what a run measured is outside the interval."""
        return abs(log(value / self.value)) > APART * hypot(self.spread, RUN_SPREAD)

    def with_run(self, value: float) -> "Estimate":
        """The estimate after a run measured that. Of what it contradicts nothing is left; the
        interval is the wider, the further apart they were.
        """
        apart, variance = log(value / self.value), self.spread**2 + DRIFT**2
        if self.contradicts(value):
            return Estimate(value, max(abs(apart) / 2, RUN_SPREAD))
        gain = variance / (variance + RUN_SPREAD**2)
        variance = (1 - gain) * (variance + gain * apart**2)
        return Estimate(self.value * exp(gain * apart), sqrt(variance))
