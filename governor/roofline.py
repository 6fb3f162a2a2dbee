"""The Amortization-Roofline model of a step of draft and verification (MoE-SpeQ 3.2, Eqs. 1 to 5).

Tokens are those that a step emits, 1 + k_accept(k). The exact model's own token counts, so plain
decoding, k = 0, is an operating point like any other. (The paper counts only accepted tokens.)
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Term = Literal["draft", "verification", "link", "host"]
# Standard deviations to either side that hold 80 % of what comes.
RANGE = 1.28
Points = tuple[tuple[float, float], ...]


def accepted_tokens(probabilities: Iterable[float]) -> float:
    """k_accept: the expected accepted tokens of a draft with conditional acceptance p_1..p_k.

    sum over i of the product of p_1..p_i (MoE-SpeQ 3.2.2).
    """
    expected, all_accepted = 0.0, 1.0
    for probability in probabilities:
        all_accepted *= probability
        expected += all_accepted
    return expected


@dataclass(frozen=True, slots=True)
class Link:
    """The way on which experts come into slots: a disk, or PCIe.

    overhead_s     added to a batch of transfers
    first_fetch_s  T_pcie,init: time until the first expert has come
    """

    bandwidth_bytes_per_s: float
    overhead_s: float = 0.0
    first_fetch_s: float = 0.0

    def transfer_s(self, moved_bytes: float) -> float:
        """T_pcie,new: time of a batch of transfers; 0 for an empty one."""
        if moved_bytes <= 0:
            return 0.0
        return self.overhead_s + moved_bytes / self.bandwidth_bytes_per_s


class StepEstimate(NamedTuple):
    """One step as the model sees it: an operating point of the roofline, with its roofs.

    It is a tuple because a governor makes a dozen of them for each decision.

    tokens         1 + k_accept(k)
    draft_s, verify_s  T_draft(k) and T_verify(k + 1), all experts in slots
    new_s          T_pcie,new(k): the link's time for moved_bytes, the experts that are new
    first_fetch_s  T_pcie,init
    exposed        share of `missing_s` that computation does not hide: 1 is Eq. 3, 0 full overlap
    host_s         time of a GPU's host for the missing experts that it computes meanwhile
    link_slows, compute_slows  times as long as alone that each takes beside the other
    spread         standard deviation of the logarithm of how far off these speeds are
    """

    draft_length: int
    tokens: float
    draft_s: float
    verify_s: float
    new_s: float = 0.0
    moved_bytes: float = 0.0
    first_fetch_s: float = 0.0
    exposed: float = 1.0
    host_s: float = 0.0
    link_slows: float = 1.0
    compute_slows: float = 1.0
    spread: float = 0.0

    @property
    def missing_s(self) -> float:
        """Time for missing experts: link and host are at work at once."""
        return max(self.new_s, self.host_s)

    @property
    def compute_s(self) -> float:
        return self.draft_s + self.verify_s

    @property
    def serial_s(self) -> float:
        """T_cycle as in the paper (Eq. 3): the draft hides only the first fetch."""
        return max(self.draft_s, self.first_fetch_s) + self.missing_s + self.verify_s

    @property
    def overlapped_s(self) -> float:
        """T_cycle if transfers hide behind the draft and the layers before theirs. The shorter of
        the two takes longer beside the other, which has progressed by less when it ends. At worst
        they take turns.
        """
        compute_s, missing_s = self.compute_s, self.missing_s
        beside_s = max(
            missing_s + compute_s * self.compute_slows * (1 - 1 / self.link_slows),
            compute_s + missing_s * self.link_slows * (1 - 1 / self.compute_slows),
        )
        return min(beside_s, compute_s + missing_s)

    @property
    def step_s(self) -> float:
        """A mean of the two forms, weighted by the share of transfers that is exposed."""
        overlapped_s = self.overlapped_s
        return overlapped_s + self.exposed * (self.serial_s - overlapped_s)

    @property
    def tokens_per_s(self) -> float:
        """Effective throughput, Theta (Eq. 2)."""
        return self.tokens / self.step_s

    @property
    def token_s(self) -> float:
        """TPOT: the reciprocal of the throughput."""
        return self.step_s / self.tokens

    @property
    def range_s(self) -> tuple[float, float]:
        """Least and most time per token: all transfers hidden that can be, at speeds better than
        expected, and none, at worse ones.
        """
        wide = math.exp(RANGE * self.spread)
        least_s, most_s = self.overlapped_s / wide, self.serial_s * wide
        return min(least_s, self.step_s) / self.tokens, max(most_s, self.step_s) / self.tokens

    @property
    def intensity(self) -> float:
        """Amortization intensity (Eq. 1) in tokens per byte; infinite if nothing is moved."""
        return self.tokens / self.moved_bytes if self.moved_bytes > 0 else math.inf

    @property
    def limit(self) -> Term:
        """The longest term."""
        missing_s, compute_s = self.missing_s, self.compute_s
        terms: dict[Term, float] = {
            "draft": self.draft_s,
            "verification": self.verify_s,
            "link" if self.new_s >= self.host_s else "host": self.step_s - compute_s
            if missing_s <= compute_s
            else missing_s,
        }
        return max(terms, key=lambda term: terms[term])
