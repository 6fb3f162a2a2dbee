"""The protocol of governors, and the governor of a fixed draft length."""

from dataclasses import dataclass
from typing import Literal, Protocol

from speq.governor.roofline import StepEstimate
from speq.stats import Forecast, StepStats

# Lengths that `auto` chooses from. Neighbours among longer drafts differ too little to measure.
LENGTHS = (0, 1, 2, 3, 4, 6, 8, 10, 12)
LONGEST = LENGTHS[-1]
# Of a drafter beside the run's own: it takes no memory, and each row of a verification does.
LONGEST_SIDE = 6
# fixed: no choice was made. best: the highest expected throughput. probe: another length, to learn
# its cost. bound: a latency objective or the end of the request left no better one.
DecisionReason = Literal["fixed", "best", "probe", "bound"]


@dataclass(frozen=True, slots=True)
class Decision:
    """A draft length (0: decode plainly) and the reason for it.

    nodes    tokens of a tree at most; None: the draft is a chain
    drafter  who drafts; None: the run's own drafter
    """

    draft_length: int
    reason: str
    ground: DecisionReason = "fixed"
    forecast: Forecast | None = None
    nodes: int | None = None
    drafter: str | None = None


class Governor(Protocol):
    def begin(self) -> None:
        """Hear that a prompt was run: slots hold what it left in them."""

    @property
    def secondary(self) -> str | None:
        """A drafter besides the run's own that it may choose; None: there is none."""

    def decide(self, offered: bool = False) -> Decision:
        """Choose the next cycle's draft length, and who drafts.

        offered  whether the drafter beside the run's own has a draft
        """

    def continue_draft(self, drafted: int, new_experts: int, accept_prob: float) -> bool:
        """Tell whether to draft one more token after `drafted` tokens.

        new_experts  number of (layer, expert) pairs that the draft named and that were neither in
                     slots nor under way at that time
        reach        probability that all these tokens stand
        """

    def observe(self, step: StepStats) -> None:
        """Learn from a finished cycle."""

    def outlook(self) -> list[StepEstimate]:
        """The cycle of each length as it was weighed last; none where none was."""


@dataclass(frozen=True, slots=True)
class FixedDraftLength:
    """Always the same length.

    nodes  tokens of a tree at most; None: drafts are chains
    """

    draft_length: int
    reason: str = "fixed"
    nodes: int | None = None

    @property
    def secondary(self) -> str | None:
        return None

    def begin(self) -> None:
        pass

    def decide(self, offered: bool = False) -> Decision:
        return Decision(self.draft_length, self.reason, nodes=self.nodes)

    def continue_draft(self, drafted: int, new_experts: int, accept_prob: float) -> bool:
        return True

    def observe(self, step: StepStats) -> None:
        pass

    def outlook(self) -> list[StepEstimate]:
        return []
