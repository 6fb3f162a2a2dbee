"""Measures the time that a missing expert and a token cost in recent steps."""

from dataclasses import dataclass, field

from speq.governor.averages import Ratio
from speq.stats import StepStats


@dataclass(slots=True)
class Prices:
    """Costs learnt from finished steps of any draft length.

    An expert costs the part of its transfer time in which the computation waited. Where the host
    computes others meanwhile, the longer of both is the cost of all.
    """

    _delay: Ratio = field(default_factory=Ratio)
    _token: Ratio = field(default_factory=Ratio)

    def observe(self, step: StepStats) -> None:
        self._token.add(step.end_s - step.start_s, step.emitted)
        missing = step.moved + step.host_experts
        if missing:
            self._delay.add(max(step.exposed_s, step.host_s), missing)

    @property
    def expert_s(self) -> float:
        """Seconds that a missing expert delays a verification; 0 while none was missing."""
        return self._delay.value

    @property
    def token_s(self) -> float:
        """Seconds that a token takes."""
        return self._token.value
