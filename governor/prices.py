"""Measures the time that a missing expert and a token cost in recent steps."""

from dataclasses import dataclass, field

from speq.governor.averages import Ratio
from speq.stats import StepStats


@dataclass(slots=True)
class Prices:
    """Costs learnt from finished steps of any draft length.

    An expert costs the part of its transfer time in which the computation waited.
    """

    _link: Ratio = field(default_factory=Ratio)
    _exposed: Ratio = field(default_factory=Ratio)
    _token: Ratio = field(default_factory=Ratio)

    def observe(self, step: StepStats) -> None:
        self._token.add(step.end_s - step.start_s, step.emitted)
        if step.moved:
            self._link.add(step.link_s, step.moved)
            self._exposed.add(step.exposed_s, step.link_s)

    @property
    def expert_s(self) -> float:
        """Seconds that a missing expert delays a verification; 0 while nothing was moved."""
        return self._link.value * min(self._exposed.value, 1.0)

    @property
    def token_s(self) -> float:
        """Seconds that a token takes."""
        return self._token.value
