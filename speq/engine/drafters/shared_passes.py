"""Drafts of several texts side by side: position j of all of them is run in one pass."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from speq.engine.draft import Draft
from speq.engine.draft_pass import OnLayer
from speq.engine.drafters.next_token import Chosen
from speq.models.tree import Tree


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """A token that a draft wants run, and a choice of what follows it.

    drafted   tokens between those of the text and the one that is chosen
    on_layer  told the token's route of every layer
    tree      whose last node the token is; None: it follows the entries of the cache
    """

    token_id: int
    drafted: list[int]
    on_layer: OnLayer
    tree: Tree | None = None


# Asks for passes, is sent what follows (None: nothing that can be used), and returns the draft.
Drafting = Generator[ForwardRequest, Chosen | None, Draft]
# What follows the tokens that some texts, by number, ask for.
Answer = Callable[[list[int], list[ForwardRequest]], list[Chosen | None]]


def draft_together(draftings: Sequence[Drafting], answer: Answer) -> list[Draft]:
    """Let drafts go on pass by pass, all that have not ended in each of them."""
    drafts = [Draft() for _ in draftings]
    asked: dict[int, ForwardRequest] = {}

    def go_on(index: int, chosen: Chosen | None) -> None:
        try:
            asked[index] = draftings[index].send(chosen)
        except StopIteration as ended:
            drafts[index] = ended.value

    try:
        for index in range(len(draftings)):
            go_on(index, None)
        while asked:
            sequences, asks = [*asked], [*asked.values()]
            asked.clear()
            for index, chosen in zip(sequences, answer(sequences, asks), strict=True):
                go_on(index, chosen)
    finally:
        for drafting in draftings:
            drafting.close()
    return drafts
