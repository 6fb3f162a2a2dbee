"""Token ids in, text out, piece by piece, up to a stop string."""

from typing import Any

# What decoding makes of bytes that do not yet form a character.
REPLACEMENT = "\ufffd"
# Tokens of the context that are looked at.
CONTEXT_TOKENS = 6


class TextStream:
    """Decodes a growing list of tokens. The pieces add up to the text of all of them.

    A piece is held back while its last character is incomplete or while it may be the beginning of
    a stop string; what follows a stop string, and the string itself, is never given out. Special
    tokens have no text, so they cannot stop it either.

    context_ids  the tokens of the text that is gone on from: some tokenizers put the space before
                 a word into its token, and drop it where the word begins a text
    """

    def __init__(
        self, tokenizer: Any, stop: tuple[str, ...] = (), context_ids: list[int] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids = [] if context_ids is None else context_ids[-CONTEXT_TOKENS:]
        self._prefix = 0  # tokens before this one are needed no more
        self._read = len(self._ids)  # tokens before this one have been decoded
        self._held = ""
        self._pieces: list[str] = []
        self.stopped = False

    def write(self, token_id: int, last: bool) -> bool:
        """Feed a token, the last one or not, and keep its piece; return whether it `stopped`."""
        piece = self.feed(token_id)
        if last and not self.stopped:
            piece += self.finish()
        self._pieces.append(piece)
        return self.stopped

    def take(self) -> list[str]:
        """The pieces of the tokens that were written since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def feed(self, token_id: int) -> str:
        """Text that is certain now that `token_id` has come."""
        self._ids.append(token_id)
        known = self._decode(self._ids[self._prefix : self._read])
        text = self._decode(self._ids[self._prefix :])
        if len(text) <= len(known) or text.endswith(REPLACEMENT):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return self._release(text[len(known) :])

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        if self.stopped:
            return ""
        known = self._decode(self._ids[self._prefix : self._read])
        rest = self._decode(self._ids[self._prefix :])[len(known) :]
        self._prefix = self._read = len(self._ids)
        return self._release(rest, final=True)

    def _decode(self, ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _release(self, piece: str, final: bool = False) -> str:
        text = self._held + piece
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if final else self._stop_prefix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _stop_prefix(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        lengths = [
            n
            for stop in self._stop
            for n in range(1, min(len(stop) - 1, len(text)) + 1)
            if text.endswith(stop[:n])
        ]
        return max(lengths, default=0)
