"""Drafts by turns: of a drafter beside the run's own where that has one, and else of the own."""

from dataclasses import dataclass
from typing import ClassVar

from speq.decode.drafter import DraftBounds, GoOn
from speq.decode.sequence import Draft, Sequence
from speq.governor.draft_length import Decision, FixedDraftLength
from speq.layers.draft_experts import OnRoute


@dataclass(frozen=True, slots=True)
class ByTurns(FixedDraftLength):
    """Chooses the drafter beside the run's own whenever that has a draft."""

    @property
    def side(self) -> str | None:
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

    def offers(self, sequence: Sequence) -> bool:
        return len(sequence.generated_ids) % 3 == 1

    def propose(
        self, sequence: Sequence, bounds: DraftBounds, on_route: OnRoute, go_on: GoOn
    ) -> Draft:
        at = len(sequence.generated_ids)
        following = self.token_ids[at : at + bounds.length]
        return Draft.chain([*following[:-1], *(token_id ^ 1 for token_id in following[-1:])])
