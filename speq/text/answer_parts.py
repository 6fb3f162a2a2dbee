"""Parts of a model's answer: text, what it thought before, and calls of tools."""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, or a piece of one.

    arguments  an object, written as JSON; of a piece, what follows the piece before
    ends       whether nothing follows; pieces of one call have its id and name
    """

    id: str
    name: str
    arguments: str
    ends: bool = True

    @property
    def content(self) -> dict[str, Any]:
        """The call as OpenAI's API has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What is certain of an answer; thoughts come before text, and text before calls."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""


def join_parts(parts: Iterable[AnswerPart]) -> AnswerPart:
    listed = [*parts]
    return AnswerPart(
        "".join(part.text for part in listed),
        tuple(joined_calls(call for part in listed for call in part.calls)),
        "".join(part.reasoning for part in listed),
    )


def joined_calls(pieces: Iterable[Call]) -> list[Call]:
    """Calls of their pieces, of which those of one call follow one another."""
    calls: list[Call] = []
    for piece in pieces:
        if calls and calls[-1].id == piece.id:
            piece = replace(piece, arguments=calls.pop().arguments + piece.arguments)
        calls.append(piece)
    return calls


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


MakeId = Callable[[], str]


class Piece(Protocol):
    """A piece of text, as `speq.text.stream.TextPiece` has it."""

    @property
    def text(self) -> str: ...

    @property
    def special(self) -> tuple[tuple[int, str], ...]: ...


class AnswerParser(Protocol):
    """Tells the parts of an answer from one another, piece by piece."""

    def feed(self, text: str) -> AnswerPart:
        """Return what is certain with these characters."""

    def mark(self, name: str) -> AnswerPart:
        """Return what is certain with a special token of this text."""

    def finish(self) -> AnswerPart:
        """Return what was held back, once no more comes."""


def parse_piece(parser: AnswerParser | None, piece: Piece) -> AnswerPart:
    """What is certain with a piece, special tokens before it included. Without a parser all is
    text.
    """
    if parser is None:
        return AnswerPart(piece.text)
    parts, at = [], 0
    for place, name in piece.special:
        parts += [parser.feed(piece.text[at:place]), parser.mark(name)]
        at = place
    return join_parts([*parts, parser.feed(piece.text[at:])])


@dataclass(slots=True)
class AnswerReader:
    """Reads an answer's parts, token by token.

    parser      tells thoughts and calls of tools from text; None: all is text
    most_calls  later calls are left out; None: there is no limit
    """

    parser: AnswerParser | None = None
    most_calls: int | None = None
    # Ids of the calls that were told.
    _called: list[str] = field(default_factory=list, init=False)

    def read(self, piece: Piece) -> AnswerPart:
        """What is certain with a piece."""
        return self._limited(parse_piece(self.parser, piece))

    def finish(self) -> AnswerPart:
        """What was held back, once no more comes."""
        return AnswerPart() if self.parser is None else self._limited(self.parser.finish())

    def _limited(self, part: AnswerPart) -> AnswerPart:
        if self.most_calls is None:
            return part
        for call in part.calls:
            if call.id not in self._called and len(self._called) < self.most_calls:
                self._called.append(call.id)
        return replace(part, calls=tuple(each for each in part.calls if each.id in self._called))


@dataclass(slots=True)
class SpaceBehindMark:
    """Drops white space that comes next, however it is cut into pieces. due: whether it does"""

    due: bool = False

    def dropped(self, text: str) -> str:
        """Return the text without it."""
        if self.due:
            text = text.lstrip()
            self.due = not text
        return text


def open_end(text: str, mark: str) -> int:
    """Characters at the end of a text that may belong to a mark: white space, and what may be its
    beginning.
    """
    for length in range(min(len(mark) - 1, len(text)), -1, -1):
        if text.endswith(mark[:length]):
            body = text[: len(text) - length]
            return length + len(body) - len(body.rstrip())
    return 0
