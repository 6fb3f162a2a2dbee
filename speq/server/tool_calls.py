"""Calls of tools in a model's text, in the form of Hermes and Qwen.

<tool_call>
{"name": "weather", "arguments": {"place": "Oslo"}}
</tool_call>

The marks are text, or special tokens.
"""

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from speq.generator import Token

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Call:
    """arguments: an object, written as JSON."""

    id: str
    name: str
    arguments: str

    @property
    def content(self) -> dict[str, Any]:
        """The call as OpenAI's API has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ParsedText:
    """Text and calls that are certain; of both, text comes first."""

    text: str = ""
    calls: tuple[Call, ...] = ()


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class CallParser:
    """Tells calls from text, piece by piece.

    Text is held back while it may be the beginning of a call. White space before and behind a call
    belongs to the form and is dropped. What looks like a call and is none stays text; of its marks,
    those that are special tokens are not told. A call that the end of the text cuts off is one if
    all of its JSON is there.
    """

    make_id: Callable[[], str] = new_id
    _held: str = field(default="", init=False)
    # Inside a call: the mark that began it as it would be told, with white space before it.
    _begin: str | None = field(default=None, init=False)
    _spoke: bool = field(default=False, init=False)
    _behind_call: bool = field(default=False, init=False)

    def hear(self, token: Token) -> ParsedText:
        """What is certain with a token, special ones before it included."""
        parts, at = [], 0
        for place, name in token.special:
            parts += [self.feed(token.text[at:place]), self.mark(name)]
            at = place
        return join_texts([*parts, self.feed(token.text[at:])])

    def mark(self, name: str) -> ParsedText:
        """What is certain with a special token of this text."""
        if name == BEGIN and self._begin is None:
            before, self._held = self._held, ""
            return self._opened(before, "")
        if name == END and self._begin is not None:
            inside, self._held = self._held, ""
            return self._closed(inside, "")
        return ParsedText()

    def feed(self, text: str) -> ParsedText:
        """What is certain with these characters."""
        self._held += text
        parts = []
        while True:
            sought = BEGIN if self._begin is None else END
            before, found, rest = self._held.partition(sought)
            if not found:
                break
            self._held = rest
            close = self._opened if self._begin is None else self._closed
            parts.append(close(before, found))
        if self._begin is None:
            certain = len(self._held) - open_end(self._held)
            parts.append(ParsedText(self._text(self._held[:certain])))
            self._held = self._held[certain:]
        return join_texts(parts)

    def finish(self) -> ParsedText:
        """What was held back, once no more text comes."""
        rest, self._held = self._held, ""
        return ParsedText(self._text(rest)) if self._begin is None else self._closed(rest, "")

    def _opened(self, before: str, mark: str) -> ParsedText:
        told = before.rstrip()
        self._begin = before[len(told) :] + mark
        return ParsedText(self._text(told))

    def _closed(self, inside: str, mark: str) -> ParsedText:
        begin, self._begin = self._begin or "", None
        calls = calls_of(inside, self.make_id)
        if not calls:
            return ParsedText(self._text(begin + inside + mark))
        self._behind_call = True
        return ParsedText("", calls)

    def _text(self, text: str) -> str:
        """Text to tell: what follows a call begins a line."""
        if self._behind_call:
            text = text.lstrip()
            if text and self._spoke:
                text = f"\n{text}"
        if text:
            self._spoke, self._behind_call = True, False
        return text


def join_texts(pieces: list[ParsedText]) -> ParsedText:
    return ParsedText(
        "".join(piece.text for piece in pieces),
        tuple(call for piece in pieces for call in piece.calls),
    )


def open_end(text: str) -> int:
    """Characters at the end of a text that may belong to a call: white space, and what may be the
    beginning of its mark.
    """
    for length in range(min(len(BEGIN) - 1, len(text)), -1, -1):
        if text.endswith(BEGIN[:length]):
            body = text[: len(text) - length]
            return length + len(body) - len(body.rstrip())
    return 0


def calls_of(text: str, make_id: Callable[[], str]) -> tuple[Call, ...]:
    """The calls between two marks, one or a list of them; none where one of them is no call."""
    try:
        given = strict_json(text)
        listed = given if isinstance(given, list) else [given]
        called = [(name_of(each), json.dumps(arguments_of(each), **AS_IT_IS)) for each in listed]
        for name, arguments in called:
            (name + arguments).encode()  # half a character is none
    except (ValueError, RecursionError):
        return ()
    return tuple(Call(make_id(), name, arguments) for name, arguments in called)


# Letters of any script stay, and what JSON has not is refused.
AS_IT_IS: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False}


def strict_json(text: str) -> Any:
    """Raises ValueError for what is no JSON, NaN and Infinity among it."""
    return json.loads(text, parse_constant=refuse)


def refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def name_of(given: Any) -> str:
    """The name of what is called. Raises ValueError where there is none."""
    name = given.get("name") if isinstance(given, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("a call has a name")
    return name


def arguments_of(given: dict[str, Any]) -> dict[str, Any]:
    """Under either of two names, as an object or as a text that holds one. A call without them has
    none. Raises ValueError where they may be under a name that is not known.
    """
    known = [given[name] for name in ("arguments", "parameters") if name in given]
    if not known and given.keys() - {"name", "id", "type"}:
        raise ValueError("arguments are missing")
    arguments = known[0] if known else None
    if isinstance(arguments, str):
        arguments = strict_json(arguments) if arguments.strip() else None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("arguments are no object")
    return arguments
