"""The protocol of governors, and the governor of a fixed draft length."""

from dataclasses import dataclass
from typing import Literal, Protocol

from speq.governor.roofline import StepEstimate
from speq.stats import Forecast, StepStats

# Lengths that `auto` chooses from. Neighbours among longer drafts differ too little to measure.
LENGTHS = (0, 1, 2, 3, 4, 6, 8, 10, 12)
LONGEST = LENGTHS[-1]
# Longest draft of a secondary drafter: it takes no memory, but each row of a verification does.
LONGEST_SECONDARY = 6
# fixed: no choice was made. best: the highest expected throughput. probe: another length, to learn
# its cost. bound: no better one meets a latency objective or fits the request's end. forced: the
# form of the answer forces so many tokens.
DecisionReason = Literal["fixed", "best", "probe", "bound", "forced"]


@dataclass(frozen=True, slots=True)
class Decision:
    """A draft length (0: decode plainly) and the reason for it.

    nodes    most tokens of a tree; None: the draft is a chain
    drafter  name of the drafter; None: the run's own
    """

    draft_length: int
    reason: str
    ground: DecisionReason = "fixed"
    forecast: Forecast | None = None
    nodes: int | None = None
    drafter: str | None = None


class Governor(Protocol):
    def begin(self) -> None:
        """Note that a prefill ran, so that slots hold its experts."""

    @property
    def secondary(self) -> str | None:
        """Name of a secondary drafter that it may choose; None: there is none."""

    def decide(self, offered: bool = False) -> Decision:
        """Choose the next step's draft length and drafter.

        offered  True if the secondary drafter has a draft
        """

    def continue_draft(self, drafted: int, new_experts: int, accept_prob: float) -> bool:
        """Tell whether to draft one more token after `drafted` tokens.

        new_experts  number of (layer, expert) pairs that the draft named and that were neither
                     resident nor under way at that time
        accept_prob  probability that all these tokens are accepted
        """

    def observe(self, step: StepStats) -> None:
        """Learn from a finished step."""

    def outlook(self) -> list[StepEstimate]:
        """Return the last estimate for each length, or none."""


@dataclass(frozen=True, slots=True)
class FixedDraftLength:
    """Chooses always the same length.

    nodes  most tokens of a tree; None: drafts are chains
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
