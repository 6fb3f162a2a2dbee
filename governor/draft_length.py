"""Draft lengths that do not depend on what is measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from speq.stats import StepStats


@dataclass(frozen=True, slots=True)
class Decision:
    """How many tokens to draft next (0: decode plainly), and why."""

    draft_length: int
    reason: str


class Governor(Protocol):
    def decide(self, steps: Sequence[StepStats]) -> Decision:
        """Choose from the steps measured so far, the last one last."""


@dataclass(frozen=True, slots=True)
class FixedDraftLength:
    """Always the same length."""

    draft_length: int
    reason: str = "fixed"

    def decide(self, steps: Sequence[StepStats]) -> Decision:
        return Decision(self.draft_length, self.reason)
