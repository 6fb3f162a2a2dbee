"""Drafts of several texts side by side: position j of all of them is run in one pass."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from speq.decode.draft_pass import OnLayer
from speq.decode.drafters.next_token import Chosen
from speq.decode.sequence import Draft
from speq.models.tree import Tree


@dataclass(frozen=True, slots=True)
class Ask:
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
Drafting = Generator[Ask, Chosen | None, Draft]
# What follows the tokens that some texts, by number, ask for.
Answer = Callable[[list[int], list[Ask]], list[Chosen | None]]


def in_step(draftings: Sequence[Drafting], answer: Answer) -> list[Draft]:
    """Let drafts go on pass by pass, all that have not ended in each of them."""
    drafts = [Draft() for _ in draftings]
    asked: dict[int, Ask] = {}

    def go_on(text: int, chosen: Chosen | None) -> None:
        try:
            asked[text] = draftings[text].send(chosen)
        except StopIteration as ended:
            drafts[text] = ended.value

    try:
        for text in range(len(draftings)):
            go_on(text, None)
        while asked:
            texts, asks = [*asked], [*asked.values()]
            asked.clear()
            for text, chosen in zip(texts, answer(texts, asks), strict=True):
                go_on(text, chosen)
    finally:
        for drafting in draftings:
            drafting.close()
    return drafts
