"""Latency objectives, and the draft lengths they leave (MoE-SpeQ 3.2.3)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from speq.errors import SpeqError
from speq.governor.roofline import StepEstimate


@dataclass(frozen=True, slots=True)
class Objectives:
    """Upper limits in seconds.

    tpot_s     for the mean time per token
    latency_s  for one cycle, which is the wait between bursts of tokens
    """

    tpot_s: float = math.inf
    latency_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("tpot_s", "latency_s"):
            if not getattr(self, name) > 0:
                raise SpeqError(f"{name} is {getattr(self, name)}; it must be more than 0 seconds")

    def met(self, cycle_s: float, tokens: float) -> bool:
        return cycle_s <= self.latency_s and cycle_s <= self.tpot_s * tokens


def longest_within(objectives: Objectives, cycles: Iterable[StepEstimate]) -> int | None:
    """k_SLO: the longest draft whose expected cycle meets the objectives, or None.

    Transfers count in full (Eq. 3): a bound must hold on a bad day.
    """
    lengths = (c.draft_length for c in cycles if objectives.met(c.serial_s, c.tokens))
    return max(lengths, default=None)
