"""What chooses draft lengths, and the choice that depends on nothing measured."""

from dataclasses import dataclass
from typing import Literal, Protocol

from speq.stats import Forecast, StepStats

# Lengths that `auto` chooses from. Neighbours among longer drafts differ by less than can be told.
LENGTHS = (0, 1, 2, 3, 4, 6, 8, 10, 12)
LONGEST = LENGTHS[-1]
# fixed: no choice was made. best: the highest expected throughput. probe: another one, to learn
# what it costs. bound: what a latency objective or the end of the request leaves.
Ground = Literal["fixed", "best", "probe", "bound"]


@dataclass(frozen=True, slots=True)
class Decision:
    """How many tokens to draft next (0: decode plainly), and why."""

    draft_length: int
    reason: str
    ground: Ground = "fixed"
    forecast: Forecast | None = None


class Governor(Protocol):
    def begin(self) -> None:
        """A prompt has been read, and slots hold what that left in them."""

    def decide(self) -> Decision:
        """Choose the next cycle's draft length."""

    def go_on(self, drafted: int, new_experts: int) -> bool:
        """Whether to draft one more token, now that `drafted` of them are there.

        new_experts  (layer, expert) pairs that the draft named so far and that were neither in
                     slots nor on their way when it did
        """

    def observe(self, step: StepStats) -> None:
        """Learn from a finished cycle."""


@dataclass(frozen=True, slots=True)
class FixedDraftLength:
    """Always the same length."""

    draft_length: int
    reason: str = "fixed"

    def begin(self) -> None:
        pass

    def decide(self) -> Decision:
        return Decision(self.draft_length, self.reason)

    def go_on(self, drafted: int, new_experts: int) -> bool:
        return True

    def observe(self, step: StepStats) -> None:
        pass
