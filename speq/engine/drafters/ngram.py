"""Prompt lookup: the last few tokens stood somewhere before, and what followed them is proposed.

Costs no memory and no pass; pays where a text repeats itself or its prompt. After Saxena's prompt
lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from array import array
from typing import ClassVar

from speq.engine.draft import Draft
from speq.engine.drafter import ContinueDraft, DraftContext, DraftLimits
from speq.engine.request import Request
from speq.layers.draft_experts import OnRoute

# Tokens that have to match, and the most that are compared. One alone says too little.
SHORTEST_MATCH, LONGEST_MATCH = 2, 4
# Places of the last two tokens that are looked at, the latest ones: some pairs stand everywhere.
PLACES = 256


class NgramDrafter:
    """Drafts a chain from the sequence's own tokens, without a model and without routes."""

    needs_int4: ClassVar[bool] = False

    def __init__(self, context: DraftContext) -> None:
        self._sequence: Request | None = None
        self._begin()

    def _begin(self) -> None:
        self._tokens: list[int] = []
        # Where the token behind a pair lies, the latest place of each pair; and by such a place the
        # one before it of the same pair, or -1. It takes about 70 bytes a token.
        self._latest: dict[int, int] = {}
        self._before = array("i")

    def propose(
        self,
        request: Request,
        limits: DraftLimits,
        on_route: OnRoute,
        continue_draft: ContinueDraft,
    ) -> Draft:
        at = self._match(request)
        if at is None:
            return Draft()
        # A text that repeats itself up to its end is taken to go on so.
        period = len(self._tokens) - at
        tokens = [self._tokens[at + i % period] for i in range(limits.length)]
        return self._chain(request, tokens)

    def has_proposal(self, request: Request) -> bool:
        return self._match(request) is not None

    def _match(self, request: Request) -> int | None:
        """Where the tokens behind the text's last ones begin; None where these are new. Of several
        places the one that most tokens match at, and of these the latest.
        """
        self._read(request)
        tokens, found, longest = self._tokens, None, 0
        if len(tokens) < SHORTEST_MATCH:
            return None
        at = self._latest.get(pair(tokens, len(tokens)), -1)
        for _ in range(PLACES):
            if at < 0 or longest == LONGEST_MATCH:
                break
            length = SHORTEST_MATCH
            while length < LONGEST_MATCH and length < at:
                if tokens[at - length - 1] != tokens[-length - 1]:
                    break
                length += 1
            if length > longest:
                found, longest = at, length
            at = self._before[at]
        return found

    @staticmethod
    def _chain(request: Request, tokens: list[int]) -> Draft:
        """The tokens up to the first that ends the text."""
        ends = [at for at, token_id in enumerate(tokens, start=1) if request.ends(token_id)]
        kept = tokens[: ends[0]] if ends else tokens
        return Draft.chain(kept)

    def _read(self, request: Request) -> None:
        """Note what has been added since the last draft; another sequence begins anew."""
        if request is not self._sequence:
            self._sequence = request
            self._begin()
        known, prompt = len(self._tokens), request.prompt_token_ids
        self._tokens += prompt[known:] + request.output_token_ids[max(known - len(prompt), 0) :]
        # A pair is worth noting once something has followed it.
        for end in range(len(self._before), len(self._tokens)):
            if end < SHORTEST_MATCH:
                self._before.append(-1)
                continue
            key = pair(self._tokens, end)
            self._before.append(self._latest.get(key, -1))
            self._latest[key] = end


def pair(tokens: list[int], end: int) -> int:
    """The two tokens in front of a place, as one number."""
    return tokens[end - 2] << 32 | tokens[end - 1]
