"""A simulated machine that drafts, for a governor to learn."""

import random

from speq.governor.adaptive import AdaptiveDraftLength
from speq.governor.draft_length import Decision
from speq.stats import StepStats


class Machine:
    """A machine of known costs: a draft token, a verified row beyond the first and a plain pass
    take fixed times, and of each draft a fixed share of tokens stands.
    """

    def __init__(
        self, draft_s: float, row_s: float, share: float, plain_s: float = 1.0, seed: int = 5
    ) -> None:
        self.draft_s, self.row_s, self.share, self.plain_s = draft_s, row_s, share, plain_s
        self._rng = random.Random(seed)
        self._now_s = 0.0

    def step_s(self, draft_length: int) -> float:
        return self.plain_s + draft_length * (self.draft_s + self.row_s)

    def token_s(self, draft_length: int) -> float:
        tokens = sum(self.share**i for i in range(draft_length + 1))
        return self.step_s(draft_length) / tokens

    def step(self, decision: Decision) -> StepStats:
        k = decision.draft_length
        accepted = 0
        while accepted < k and self._rng.random() < self.share:
            accepted += 1
        start_s, self._now_s = self._now_s, self._now_s + self.step_s(k)
        return StepStats(
            "decode",
            draft_length=k,
            accepted=accepted,
            emitted=accepted + 1,
            requests=8 * (k + 1),
            hits=8 * (k + 1),
            draft_s=k * self.draft_s,
            verify_s=self.plain_s + k * self.row_s,
            start_s=start_s,
            end_s=self._now_s,
            ground=decision.ground,
            reason=decision.reason,
            forecast=decision.forecast,
        )


def run(governor: AdaptiveDraftLength, machine: Machine, count: int) -> list[StepStats]:
    steps = []
    for _ in range(count):
        steps.append(machine.step(governor.decide()))
        governor.observe(steps[-1])
    return steps
