"""Averages that forget: a mean, a ratio of sums and a line, which the governor learns by."""

from dataclasses import dataclass

# Cycles that averages remember.
HORIZON = 60.0
# Before a line's slope is known: the share of y that grows with x, and what it weighs.
PRIOR_SHARE, PRIOR_FIRMNESS = 0.5, 0.1


@dataclass(slots=True)
class Mean:
    """The mean of the first values; from `HORIZON` on an exponential moving average."""

    value: float
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.weight = min(self.weight + 1, HORIZON)
        self.value += (value - self.value) / self.weight


@dataclass(slots=True)
class Ratio:
    """A decayed sum over another one."""

    part: float = 0.0
    whole: float = 0.0

    def add(self, part: float, whole: float) -> None:
        self.part += part - self.part / HORIZON
        self.whole += whole - self.whole / HORIZON

    @property
    def known(self) -> bool:
        return self.whole > 0

    @property
    def value(self) -> float:
        return self.part / self.whole if self.whole > 0 else 0.0


@dataclass(slots=True)
class LinearFit:
    """y over x by decayed least squares; as long as all x are alike, with the slope of a prior."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        keep = 1 - 1 / HORIZON
        self.weight = self.weight * keep + 1
        step_x, step_y = x - self.x, y - self.y
        self.x += step_x / self.weight
        self.y += step_y / self.weight
        self.xx = self.xx * keep + step_x * (x - self.x)
        self.xy = self.xy * keep + step_x * (y - self.y)

    @property
    def slope(self) -> float:
        """Both it and the intercept are times, and not negative."""
        steepest = self.y / self.x
        firmness = PRIOR_FIRMNESS * self.x * self.x
        slope = (self.xy + firmness * PRIOR_SHARE * steepest) / (self.xx + firmness)
        return min(max(slope, 0.0), steepest)

    def at(self, x: float) -> float:
        return self.y + self.slope * (x - self.x)

    def seen_at(self, x: float) -> "LinearFit":
        """The same line known by two points alone, half of x to either side of it."""
        y, slope = self.at(x), self.slope
        spread = 2 * (x / 2) ** 2
        firmness = PRIOR_FIRMNESS * x * x
        pull = firmness * (PRIOR_SHARE * y / x - slope)
        return LinearFit(2.0, x, y, spread, slope * spread - pull)
