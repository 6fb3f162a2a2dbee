"""Decayed averages of the governor: a mean, a ratio of sums and a line."""

from dataclasses import dataclass

# Steps that averages remember.
HORIZON = 60.0
# Before a line's slope is known: the share of y that grows with x, and its weight.
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
    """A quotient of two decayed sums."""

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
    """A line by decayed least squares; while all x are alike, its slope is a prior's."""

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
        """The slope. Neither it nor the intercept is negative: both are times."""
        steepest = self.y / self.x
        firmness = PRIOR_FIRMNESS * self.x * self.x
        slope = (self.xy + firmness * PRIOR_SHARE * steepest) / (self.xx + firmness)
        return min(max(slope, 0.0), steepest)

    def at(self, x: float) -> float:
        return self.y + self.slope * (x - self.x)

    def seen_at(self, x: float) -> "LinearFit":
        """Return the same line, known only by two points at half of x to either side."""
        y, slope = self.at(x), self.slope
        spread = 2 * (x / 2) ** 2
        firmness = PRIOR_FIRMNESS * x * x
        pull = firmness * (PRIOR_SHARE * y / x - slope)
        return LinearFit(2.0, x, y, spread, slope * spread - pull)
