"""Drafts by turns: of a drafter beside the run's own where that has one, and else of the own."""

from dataclasses import dataclass
from typing import ClassVar

from speq.engine.draft import Draft
from speq.engine.drafter import DraftRequest
from speq.engine.request import Request
from speq.governor.draft_length import Decision, FixedDraftLength


@dataclass(frozen=True, slots=True)
class ByTurns(FixedDraftLength):
    """Chooses the drafter beside the run's own whenever that has a draft."""

    @property
    def secondary(self) -> str | None:
        return "ngram"

    def decide(self, offered: bool = False) -> Decision:
        if offered:
            return Decision(4, "it has one", drafter="ngram")
        return Decision(self.draft_length, "nothing else has one", nodes=self.nodes)


@dataclass(frozen=True, slots=True)
class Told:
    """A drafter that has a draft at every third token: what it was told, the last token wrong.

    token_ids  of the whole text behind the prompt
    """

    token_ids: list[int]
    needs_int4: ClassVar[bool] = False

    def has_proposal(self, request: Request) -> bool:
        return len(request.output_token_ids) % 3 == 1

    def propose(self, asked: DraftRequest) -> Draft:
        at = len(asked.request.output_token_ids)
        following = self.token_ids[at : at + asked.limits.length]
        return Draft.chain([*following[:-1], *(token_id ^ 1 for token_id in following[-1:])])
