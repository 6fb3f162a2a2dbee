"""Proposes tokens that the form of an answer forces: without a pass, and nearly always right."""

from dataclasses import dataclass
from typing import ClassVar

from speq.engine.draft import Draft
from speq.engine.drafter import DraftRequest


@dataclass(frozen=True, slots=True)
class ForcedTokens:
    """Drafts a chain of given tokens, for one step.

    token_ids  as `Request.forced` has them
    """

    needs_int4: ClassVar[bool] = False
    token_ids: list[int]

    def propose(self, asked: DraftRequest) -> Draft:
        # Without margins: nobody learns from these how often a drafter's tokens are accepted.
        kept = self.token_ids[: asked.limits.length]
        return Draft(kept, list(range(len(kept))))
