"""Streaming of token ids as pieces of text, up to a stop string."""

from typing import NamedTuple

from speq.text.decoding import TokenDecoder
from speq.text.vocabulary import Vocabulary


class TextPiece(NamedTuple):
    """A piece of text. text: without special tokens; special: position in `text` and text of each
    of these.
    """

    text: str = ""
    special: tuple[tuple[int, str], ...] = ()

    def then(self, more: "TextPiece") -> "TextPiece":
        behind = ((len(self.text) + at, name) for at, name in more.special)
        return TextPiece(self.text + more.text, (*self.special, *behind))


class TextUnit(NamedTuple):
    """A character, or a special token."""

    text: str
    special: bool


class TextStream:
    """Decoder of a growing list of tokens. The pieces add up to the text of all of them.

    A piece is held back while its last character is incomplete or while it may begin a stop string.
    A stop string and whatever follows it are never returned. A stop string that contains the text
    of a special token is searched in text with special tokens, any other in text without.

    context_ids  see `TokenDecoder`
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: tuple[str, ...] = (),
        context_ids: list[int] | None = None,
    ) -> None:
        self._special = vocabulary.special
        self._decoder = TokenDecoder(vocabulary, context_ids or [])
        self._stops = [(text, vocabulary.holds_special(text)) for text in stop]
        self._held: list[TextUnit] = []
        self._late: list[TextUnit] = []  # special tokens within a character
        self._pieces: list[TextPiece] = []
        self.stopped = False

    def write(self, token_id: int, last: bool) -> bool:
        """Add a token, the last one or not, and keep its piece. Return True if it `stopped`."""
        piece = self.feed(token_id)
        if last:
            piece = piece.then(self.finish())
        self._pieces.append(piece)
        return self.stopped

    def take(self) -> list[TextPiece]:
        """Return the pieces of the tokens written since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def feed(self, token_id: int) -> TextPiece:
        """Add a token; return the text that is certain now."""
        name = self._special.get(token_id)
        if name is None:
            self._hold(self._decoder.feed(token_id))
        else:
            self._hold_special(TextUnit(name, special=True))
        return self._release(final=False)

    def finish(self) -> TextPiece:
        """Return the text that was held back, after the last token."""
        if self.stopped:
            return TextPiece()
        self._hold(self._decoder.finish())
        self._held += self._late
        self._late = []
        return self._release(final=True)

    def _hold(self, text: str) -> None:
        if text:
            first, *others = characters(text)
            self._held += [first, *self._late, *others]
            self._late = []

    def _hold_special(self, token: TextUnit) -> None:
        """Place a special token after the character that it interrupts, unless it ends the text
        there.
        """
        if not (pending := self._decoder.pending):
            self._held.append(token)
            return
        self._late.append(token)
        ending = [*self._held, *characters(pending), *self._late]
        if self._ends(ending):
            self._held, self._late = ending, []

    def _release(self, final: bool) -> TextPiece:
        ends = self._ends(self._held)
        end = len(self._held)
        if ends:
            self.stopped, end = True, min(ends)
        elif not final:
            end = min(self._pending_positions(), default=end)
        told, self._held = self._held[:end], [] if self.stopped else self._held[end:]
        return piece_of(told)

    def _ends(self, parts: list[TextUnit]) -> list[int]:
        """Positions of complete stop strings."""
        texts = [(stop, *text_of(parts, marked)) for stop, marked in self._stops]
        return [places[at] for stop, text, places in texts if (at := text.find(stop)) >= 0]

    def _pending_positions(self) -> list[int]:
        """Positions where a stop string may have begun."""
        texts = [(stop, *text_of(self._held, marked)) for stop, marked in self._stops]
        begun = [(places, prefix_length(stop, text)) for stop, text, places in texts]
        return [places[-length] for places, length in begun if length]


def characters(text: str) -> list[TextUnit]:
    return [TextUnit(character, special=False) for character in text]


def text_of(parts: list[TextUnit], marked: bool) -> tuple[str, list[int]]:
    """Join parts, with special tokens if `marked`. Return the text, and the part of each
    character.
    """
    shown = [(at, part.text) for at, part in enumerate(parts) if marked or not part.special]
    return "".join(text for _, text in shown), [at for at, text in shown for _ in text]


def prefix_length(stop: str, text: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of a stop string."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)


def piece_of(parts: list[TextUnit]) -> TextPiece:
    text, special = "", []
    for part in parts:
        if part.special:
            special.append((len(text), part.text))
        else:
            text += part.text
    return TextPiece(text, tuple(special))
