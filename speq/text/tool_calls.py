"""Calls of tools in a model's text, in the syntaxes of `speq.text.call_syntax`.

The marks of a call are text, or special tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from speq.text.answer_parts import AnswerPart, MakeId, join_parts, new_id, open_end
from speq.text.call_syntax import HERMES, CallSyntax, Tool, calls_in
from speq.text.open_calls import MOST_READ, OpenCalls


@dataclass(slots=True)
class CallParser:
    """Tells calls from text, piece by piece.

    Text is held back while it may be the beginning of a call. White space before and behind a call
    belongs to the form and is dropped. A call is told with its name, then argument by argument,
    where the syntax shows these before its end. What looks like a call and is none, before that,
    stays text; of its marks, those that are special tokens are not told. A call that the end of the
    text cuts off is one if all of it but the mark is there.

    tools  that may be called, as templates have them
    """

    syntax: CallSyntax = HERMES
    tools: Sequence[Tool] = ()
    make_id: MakeId = new_id
    _held: str = field(default="", init=False)
    # Inside a call: the mark that began it as it would be told, with white space before it.
    _begin: str | None = field(default=None, init=False)
    _spoke: bool = field(default=False, init=False)
    _behind_call: bool = field(default=False, init=False)
    _calls: OpenCalls = field(init=False)

    def __post_init__(self) -> None:
        self._calls = OpenCalls(self.make_id)

    def mark(self, name: str) -> AnswerPart:
        if name == self.syntax.begin and self._begin is None:
            before, self._held = self._held, ""
            return self._opened(before, "")
        if name == self.syntax.end and self._begin is not None:
            inside, self._held = self._held, ""
            return self._closed(inside, "")
        if name in self.syntax.inner and self._begin is not None:
            self._held += name
        return AnswerPart()

    def feed(self, text: str) -> AnswerPart:
        self._held += text
        parts = []
        while True:
            sought = self.syntax.begin if self._begin is None else self.syntax.end
            before, found, rest = self._held.partition(sought) if sought else ("", "", "")
            if not found:
                break
            self._held = rest
            close = self._opened if self._begin is None else self._closed
            parts.append(close(before, found))
        if self._begin is None:
            certain = len(self._held) - open_end(self._held, self.syntax.begin)
            parts.append(AnswerPart(self._text(self._held[:certain])))
            self._held = self._held[certain:]
        elif text and self.syntax.begun is not None and len(self._held) < MOST_READ:
            begun = calls_in(self.syntax.begun, self._held, self.tools)
            parts.append(AnswerPart("", self._calls.go_on(begun)))
        return join_parts(parts)

    def finish(self) -> AnswerPart:
        rest, self._held = self._held, ""
        return AnswerPart(self._text(rest)) if self._begin is None else self._closed(rest, "")

    def _opened(self, before: str, mark: str) -> AnswerPart:
        told = before.rstrip()
        self._begin = before[len(told) :] + mark
        return AnswerPart(self._text(told))

    def _closed(self, inside: str, mark: str) -> AnswerPart:
        begin, self._begin = self._begin or "", None
        pieces = self._calls.end(calls_in(self.syntax.parse, inside, self.tools))
        if not pieces:
            return AnswerPart(self._text(begin + inside + mark))
        self._behind_call = True
        return AnswerPart("", pieces)

    def _text(self, text: str) -> str:
        """Text to tell: what follows a call begins a line."""
        if self._behind_call:
            text = text.lstrip()
            if text and self._spoke:
                text = f"\n{text}"
        if text:
            self._spoke, self._behind_call = True, False
        return text
