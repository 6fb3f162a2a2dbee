"""Token ids in, text out, token by token."""

import codecs

from speq.text.vocabulary import REPLACEMENT, Vocabulary

# Tokens that are waited for where a text may end within a character, or where they add no text.
MOST_PENDING = 16


class TokenDecoder:
    """Decodes tokens as they come; special ones have no text and are not given to it.

    The pieces add up to what all tokens add to the text of the context. A token costs the same
    wherever it stands. Of single bytes that are no UTF-8, each is one U+FFFD, and characters beside
    them are kept: decoding at once would give up all bytes that stand together, told ones too.

    context_ids  the tokens of the text that is gone on from: some tokenizers put the space before
                 a word into its token, and drop it where the word begins a text
    """

    def __init__(self, vocabulary: Vocabulary, context_ids: list[int]) -> None:
        self._vocabulary = vocabulary
        self._errors = vocabulary.errors
        self._utf8 = codecs.getincrementaldecoder("utf-8")(self._errors)
        self._context = vocabulary.context(context_ids)  # tokens that have been told
        self._fresh: list[int] = []  # tokens behind them that have not

    @property
    def pending(self) -> str:
        """The text of the last tokens that is not certain, as it would be if no more came."""
        data = self._utf8.getstate()[0]
        return (self._added() if self._fresh else "") + data.decode("utf-8", self._errors)

    def feed(self, token_id: int) -> str:
        """Text that is certain now that `token_id` has come."""
        data = self._vocabulary.bytes_of(token_id)
        if data is None:
            return self._utf8.decode(b"", final=True) + self._behind_others(token_id)
        if not data:
            return ""
        piece = self._told() + self._utf8.decode(data)
        if piece == " " and not self._context:
            piece = self._vocabulary.decode([token_id])  # some drop it where a text begins
        self._context = [token_id]
        return piece

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        return self._told() + self._utf8.decode(b"", final=True)

    def _behind_others(self, token_id: int) -> str:
        self._fresh.append(token_id)
        added = self._added()
        ends = bool(added) and (self._vocabulary.knows_bytes or not added.endswith(REPLACEMENT))
        return self._told() if ends or len(self._fresh) == MOST_PENDING else ""

    def _told(self) -> str:
        """The text of fresh tokens, which are fresh no more."""
        if not self._fresh:
            return ""
        added = self._added()
        if added:
            self._context = self._fresh
        self._fresh = []
        return added

    def _added(self) -> str:
        known = self._vocabulary.decode(self._context)
        return self._vocabulary.decode(self._context + self._fresh)[len(known) :]
