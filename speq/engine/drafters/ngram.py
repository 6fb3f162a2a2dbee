"""Prompt lookup: finds the last few tokens earlier in the sequence and proposes their continuation.

It takes no memory and no pass, and pays if a sequence repeats itself or its prompt. After Saxena's
prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from array import array
from typing import ClassVar

from speq.engine.draft import Draft
from speq.engine.drafter import DraftContext, DraftRequest
from speq.engine.request import Request

# Fewest tokens that must match, and most that are compared. One alone says too little.
SHORTEST_MATCH, LONGEST_MATCH = 2, 4
# Latest places of the last two tokens that are compared: some pairs are very frequent.
PLACES = 256


class NgramDrafter:
    """Drafts a chain from the sequence's own tokens, without a model and without routes."""

    needs_int4: ClassVar[bool] = False

    def __init__(self, context: DraftContext) -> None:
        self._sequence: Request | None = None
        self._begin()

    def _begin(self) -> None:
        self._tokens: list[int] = []
        # By pair: the latest place of the token after it. By place: the previous place of the same
        # pair, or -1. Together about 70 bytes per token.
        self._latest: dict[int, int] = {}
        self._before = array("i")

    def propose(self, asked: DraftRequest) -> Draft:
        at = self._match(asked.request)
        if at is None:
            return Draft()
        # A sequence that repeats itself up to its end is assumed to continue so.
        period = len(self._tokens) - at
        tokens = [self._tokens[at + i % period] for i in range(asked.limits.length)]
        return self._chain(asked.request, tokens)

    def has_proposal(self, request: Request) -> bool:
        return self._match(request) is not None

    def _match(self, request: Request) -> int | None:
        """Find the place after an earlier match of the last tokens; None if there is none.

        The longest match wins, and among equals the latest.
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
        """Make a draft of the tokens up to the first that ends the sequence."""
        ends = [at for at, token_id in enumerate(tokens, start=1) if request.ends(token_id)]
        kept = tokens[: ends[0]] if ends else tokens
        return Draft.chain(kept)

    def _read(self, request: Request) -> None:
        """Note tokens added since the last draft; begin again for another sequence."""
        if request is not self._sequence:
            self._sequence = request
            self._begin()
        known, prompt = len(self._tokens), request.prompt_token_ids
        self._tokens += prompt[known:] + request.output_token_ids[max(known - len(prompt), 0) :]
        # A pair is noted once a token has followed it.
        for end in range(len(self._before), len(self._tokens)):
            if end < SHORTEST_MATCH:
                self._before.append(-1)
                continue
            key = pair(self._tokens, end)
            self._before.append(self._latest.get(key, -1))
            self._latest[key] = end


def pair(tokens: list[int], end: int) -> int:
    """Encode the two tokens before a place as one number."""
    return tokens[end - 2] << 32 | tokens[end - 1]
