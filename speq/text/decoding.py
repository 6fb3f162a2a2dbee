"""Incremental decoding of token ids to text."""

import codecs

from speq.text.vocabulary import REPLACEMENT, Vocabulary

# Most tokens to wait for if a text may end within a character, or if they add no text.
MOST_PENDING = 16


class TokenDecoder:
    """Incremental decoder of tokens, without special ones.

    The pieces add up to the text that all tokens add to the context. The cost of a token does not
    depend on its position. Each single byte that is not UTF-8 becomes one U+FFFD, and its
    neighbours are kept: decoding all at once would replace all adjacent bytes, including those
    already returned.

    context_ids  tokens that the text continues: some tokenizers put the space before a word into
                 its token, and drop it if the word begins a text
    """

    def __init__(self, vocabulary: Vocabulary, context_ids: list[int]) -> None:
        self._vocabulary = vocabulary
        self._errors = vocabulary.errors
        self._utf8 = codecs.getincrementaldecoder("utf-8")(self._errors)
        self._context = vocabulary.context(context_ids)  # tokens whose text was returned
        self._fresh: list[int] = []  # later tokens whose text was not

    @property
    def pending(self) -> str:
        """Text of the last tokens that is not certain yet, as if no more came."""
        data = self._utf8.getstate()[0]
        return (self._fresh_text() if self._fresh else "") + data.decode("utf-8", self._errors)

    def feed(self, token_id: int) -> str:
        """Add a token; return the text that is certain now."""
        data = self._vocabulary.bytes_of(token_id)
        if data is None:
            return self._utf8.decode(b"", final=True) + self._decode_after_others(token_id)
        if not data:
            return ""
        piece = self._take_fresh() + self._utf8.decode(data)
        if piece == " " and not self._context:
            piece = self._vocabulary.decode([token_id])  # some drop it at the beginning of a text
        self._context = [token_id]
        return piece

    def finish(self) -> str:
        """Return the text that was held back, after the last token."""
        return self._take_fresh() + self._utf8.decode(b"", final=True)

    def _decode_after_others(self, token_id: int) -> str:
        self._fresh.append(token_id)
        added = self._fresh_text()
        ends = bool(added) and (self._vocabulary.knows_bytes or not added.endswith(REPLACEMENT))
        return self._take_fresh() if ends or len(self._fresh) == MOST_PENDING else ""

    def _take_fresh(self) -> str:
        """Return the text of fresh tokens, and move them to the context."""
        if not self._fresh:
            return ""
        added = self._fresh_text()
        if added:
            self._context = self._fresh
        self._fresh = []
        return added

    def _fresh_text(self) -> str:
        known = self._vocabulary.decode(self._context)
        return self._vocabulary.decode(self._context + self._fresh)[len(known) :]
