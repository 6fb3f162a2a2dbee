"""Prompt lookup: the last few tokens stood somewhere before, and what followed them is proposed.

Costs no memory and no pass; pays where a text repeats itself or its prompt. After Saxena's prompt
lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from typing import ClassVar

from speq.decode.drafter import DraftBase, DraftBounds, GoOn
from speq.decode.sequence import Draft, Sequence
from speq.layers.draft_experts import OnRoute

# Tokens that have to match, the most that are looked for first. One alone says too little.
LONGEST_MATCH, SHORTEST_MATCH = 4, 2


class NgramDrafter:
    """Drafts a chain from the sequence's own tokens, without a model and without routes."""

    needs_int4: ClassVar[bool] = False

    def __init__(self, base: DraftBase) -> None:
        self._sequence: Sequence | None = None
        self._tokens: list[int] = []
        # Where the tokens behind an n-gram begin, the latest place of each.
        self._followed: dict[tuple[int, ...], int] = {}

    def propose(
        self, sequence: Sequence, bounds: DraftBounds, on_route: OnRoute, go_on: GoOn
    ) -> Draft:
        at = self._match(sequence)
        if at is None:
            return Draft()
        # A text that repeats itself up to its end is taken to go on so.
        period = len(self._tokens) - at
        tokens = [self._tokens[at + i % period] for i in range(bounds.length)]
        return self._chain(sequence, tokens)

    def offers(self, sequence: Sequence) -> bool:
        return self._match(sequence) is not None

    def _match(self, sequence: Sequence) -> int | None:
        """Where the tokens behind the text's last ones begin; None where these are new."""
        self._read(sequence)
        for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
            at = self._followed.get(tuple(self._tokens[-length:]))
            if at is not None:
                return at
        return None

    @staticmethod
    def _chain(sequence: Sequence, tokens: list[int]) -> Draft:
        """The tokens up to the first that ends the text."""
        ends = [at for at, token_id in enumerate(tokens, start=1) if sequence.ends(token_id)]
        kept = tokens[: ends[0]] if ends else tokens
        return Draft.chain(kept)

    def _read(self, sequence: Sequence) -> None:
        """Note what has been added since the last draft; another sequence begins anew."""
        if sequence is not self._sequence:
            self._sequence, self._tokens, self._followed = sequence, [], {}
        known, prompt = len(self._tokens), sequence.prompt_ids
        self._tokens += prompt[known:] + sequence.generated_ids[max(known - len(prompt), 0) :]
        # An n-gram is worth noting once something has followed it.
        for end in range(max(known, SHORTEST_MATCH), len(self._tokens)):
            for length in range(SHORTEST_MATCH, min(LONGEST_MATCH, end) + 1):
                self._followed[tuple(self._tokens[end - length : end])] = end
