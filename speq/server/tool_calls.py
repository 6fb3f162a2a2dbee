"""Calls of tools in a model's text, in the form of Hermes and Qwen.

<tool_call>
{"name": "weather", "arguments": {"place": "Oslo"}}
</tool_call>
"""

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Call:
    """arguments: an object, written as JSON."""

    id: str
    name: str
    arguments: str

    @property
    def content(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Piece:
    """Text and calls that are certain; of both, text comes first."""

    text: str = ""
    calls: tuple[Call, ...] = ()


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class CallParser:
    """Tells calls from text, piece by piece.

    Text is held back while it may be the beginning of a call. White space before and behind a call
    belongs to the form and is dropped. What looks like a call and is none stays text.
    """

    make_id: Callable[[], str] = new_id
    _held: str = field(default="", init=False)
    _spoke: bool = field(default=False, init=False)
    _behind_call: bool = field(default=False, init=False)

    def feed(self, text: str) -> Piece:
        """What is certain with these characters."""
        self._held += text
        told = ""
        calls: list[Call] = []
        while True:
            before, begin, behind = self._held.partition(BEGIN)
            inside, end, rest = behind.partition(END)
            if not end:
                certain = len(before.rstrip()) if begin else len(self._held) - open_end(self._held)
                told += self._text(self._held[:certain])
                self._held = self._held[certain:]
                return Piece(told, tuple(calls))
            call = call_of(inside, self.make_id)
            if call is None:
                told += self._text(before + begin + inside + end)
            else:
                told += self._text(before.rstrip())
                calls.append(call)
                self._behind_call = True
            self._held = rest

    def finish(self) -> Piece:
        """What was held back, once no more text comes."""
        rest, self._held = self._held, ""
        return Piece(self._text(rest))

    def _text(self, text: str) -> str:
        """Text to tell: what follows a call begins a line."""
        if self._behind_call:
            text = text.lstrip()
            if text and self._spoke:
                text = f"\n{text}"
        if text:
            self._spoke, self._behind_call = True, False
        return text


def open_end(text: str) -> int:
    """Characters at the end of a text that may belong to a call: white space, and what may be the
    beginning of its mark.
    """
    for length in range(min(len(BEGIN) - 1, len(text)), -1, -1):
        if text.endswith(BEGIN[:length]):
            body = text[: len(text) - length]
            return length + len(body) - len(body.rstrip())
    return 0


def call_of(text: str, make_id: Callable[[], str]) -> Call | None:
    """The call between two marks; None where there is none."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return None
    arguments = given.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return Call(make_id(), given["name"], json.dumps(arguments, ensure_ascii=False))
