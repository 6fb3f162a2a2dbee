"""Drafts of a batch: position j of all drafts is run in one pass."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from speq.engine.draft import Draft
from speq.engine.draft_pass import OnLayer
from speq.engine.drafters.next_token import Chosen
from speq.models.tree import Tree


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """A token to run for a draft, after which the next one is chosen.

    drafted   tokens between those of the sequence and the chosen one
    on_layer  called with the token's route in every layer
    tree      whose last node the token is; None: it follows the cached tokens
    """

    token_id: int
    drafted: list[int]
    on_layer: OnLayer
    tree: Tree | None = None


# Yields passes to run, is sent the chosen tokens (None: not finite), and returns the draft.
Drafting = Generator[ForwardRequest, Chosen | None, Draft]
# Chooses the tokens after those that drafts, given by index, have yielded.
Answer = Callable[[list[int], list[ForwardRequest]], list[Chosen | None]]


def draft_together(draftings: Sequence[Drafting], answer: Answer) -> list[Draft]:
    """Run drafts pass by pass; each pass runs all drafts that have not ended."""
    drafts = [Draft() for _ in draftings]
    waiting: dict[int, ForwardRequest] = {}

    def advance(index: int, chosen: Chosen | None) -> None:
        try:
            waiting[index] = draftings[index].send(chosen)
        except StopIteration as ended:
            drafts[index] = ended.value

    try:
        for index in range(len(draftings)):
            advance(index, None)
        while waiting:
            indexes, forwards = [*waiting], [*waiting.values()]
            waiting.clear()
            for index, chosen in zip(indexes, answer(indexes, forwards), strict=True):
                advance(index, chosen)
    finally:
        for drafting in draftings:
            drafting.close()
    return drafts
