"""Latency objectives, and the draft lengths they leave (MoE-SpeQ 3.2.3)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from speq.errors import SpeqError
from speq.governor.profile import Profile
from speq.governor.roofline import cycle


@dataclass(frozen=True, slots=True)
class Objectives:
    """tpot_s     mean time per token, at most
    latency_s  from the prompt's end, or one burst of tokens, to the next one, at most: the time of
               a cycle
    """

    tpot_s: float = math.inf
    latency_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("tpot_s", "latency_s"):
            if not getattr(self, name) > 0:
                raise SpeqError(f"{name} is {getattr(self, name)}; it must be more than 0 seconds")

    def met(self, cycle_s: float, tokens: float) -> bool:
        return cycle_s <= self.latency_s and cycle_s <= self.tpot_s * tokens


def longest_within(
    objectives: Objectives,
    profile: Profile,
    probabilities: Sequence[float],
    moved_bytes: Sequence[float],
) -> int | None:
    """k_SLO: the longest draft whose cycle meets the objectives by a profile alone, or None.

    Transfers count in full (Eq. 3): a bound must hold on a bad day.

    probabilities  p_1, p_2, ... to the longest length considered
    moved_bytes    of a cycle of each draft length from 0 on
    """
    lengths = [
        length
        for length in range(len(probabilities) + 1)
        if objectives.met(
            (
                point := cycle(
                    profile.costs, profile.slow_tier, probabilities, length, moved_bytes[length]
                )
            ).cycle_s,
            point.tokens,
        )
    ]
    return max(lengths, default=None)
