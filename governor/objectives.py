"""Latency objectives, and the draft lengths that meet them (MoE-SpeQ 3.2.3)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from speq.errors import OptionError
from speq.governor.roofline import StepEstimate


@dataclass(frozen=True, slots=True)
class Objectives:
    """Upper limits in seconds.

    tpot_s     for the mean time per token
    latency_s  for one step, which is the wait between bursts of tokens
    """

    tpot_s: float = math.inf
    latency_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("tpot_s", "latency_s"):
            if not getattr(self, name) > 0:
                raise OptionError(
                    f"{name} is {getattr(self, name)}; it must be more than 0 seconds"
                )

    def met(self, step_s: float, tokens: float) -> bool:
        return step_s <= self.latency_s and step_s <= self.tpot_s * tokens


def longest_within(objectives: Objectives, estimates: Iterable[StepEstimate]) -> int | None:
    """k_SLO: the longest draft whose expected step meets the objectives, or None.

    Transfers count in full (Eq. 3), so that the bound holds in the worst case.
    """
    lengths = (e.draft_length for e in estimates if objectives.met(e.serial_s, e.tokens))
    return max(lengths, default=None)
