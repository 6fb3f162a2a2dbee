"""Answers of gpt-oss, whose messages have channels (the harmony format).

<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>text

A call is a message to a tool:

<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"place": "Oslo"}<|call|>

The marks are special tokens. https://github.com/openai/harmony
"""

import re
from dataclasses import dataclass, field

from speq.text.answer_parts import AnswerPart, MakeId, new_id
from speq.text.call_syntax import NamedCall, arguments_of, calls_in
from speq.text.open_calls import MOST_READ, OpenCalls, open_object

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = frozenset({"<|end|>", "<|return|>", "<|call|>"})
# What a template of this format has in it.
IN_TEMPLATE = (CHANNEL, MESSAGE)
RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


@dataclass(slots=True)
class HarmonyParser:
    """Tells channels from one another. What is said outside a message is its header."""

    make_id: MakeId = new_id
    # Of the message that is written: its header, while that is, and then where its text goes.
    _header: str | None = field(default="", init=False)
    _thinks: bool = field(default=False, init=False)
    _tool: str | None = field(default=None, init=False)
    _arguments: str = field(default="", init=False)
    # Whether there is a thought, or a text, which the next one is put apart from.
    _thought: bool = field(default=False, init=False)
    _spoke: bool = field(default=False, init=False)
    _apart: bool = field(default=False, init=False)
    _calls: OpenCalls = field(init=False)

    def __post_init__(self) -> None:
        self._calls = OpenCalls(self.make_id)

    def mark(self, name: str) -> AnswerPart:
        if name in (START, *ENDS):
            part = self._end()
            self._header = ""
            return part
        if name == MESSAGE and self._header is not None:
            self._begin(self._header)
        elif name in (CHANNEL, CONSTRAIN):
            self._header = f"{self._header or ''} {name} "
        return AnswerPart()

    def feed(self, text: str) -> AnswerPart:
        if not text:
            return AnswerPart()
        if self._header is not None:
            self._header += text
            return AnswerPart()
        if self._tool is not None:
            self._arguments += text
            if len(self._arguments) > MOST_READ:
                return AnswerPart()
            name = self._tool
            begun = calls_in(lambda text, _: [(name, open_object(text)[0])], self._arguments, ())
            return AnswerPart("", self._calls.go_on(begun))
        apart = "\n\n" if self._apart else ""
        self._apart = False
        if self._thinks:
            self._thought = True
            return AnswerPart(reasoning=apart + text)
        self._spoke = True
        return AnswerPart(apart + text)

    def finish(self) -> AnswerPart:
        part, header = self._end(), self._header
        if not header or CHANNEL in header or RECIPIENT.search(header):
            return part
        return AnswerPart(header)  # a text without any mark

    def _begin(self, header: str) -> None:
        recipient = RECIPIENT.search(header)
        channel = header.partition(CHANNEL)[2].split()
        self._thinks = channel[:1] == ["analysis"]
        self._tool, self._arguments = None if recipient is None else recipient[1], ""
        self._header = None
        self._apart = self._thought if self._thinks else self._spoke

    def _end(self) -> AnswerPart:
        """Close the message that is written."""
        name, self._tool = self._tool, None
        if name is None:
            return AnswerPart()
        called = calls_in(lambda text, _: [one_call(name, text)], self._arguments, ())
        pieces = self._calls.end(called)
        return AnswerPart("", pieces) if pieces else AnswerPart(self._arguments)


def one_call(name: str, arguments: str) -> NamedCall:
    return name, arguments_of({"arguments": arguments})
