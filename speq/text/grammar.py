"""Grammars of answers, in the Lark syntax of llguidance.

An answer may have a thought before it, which no grammar bounds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from speq.errors import UnsupportedError
from speq.text import harmony
from speq.text.answer_form import AnswerForm
from speq.text.call_grammar import (
    ANY_TEXT,
    SPACE,
    UP_TO,
    Function,
    json_rule,
    parameters_of,
    text_rule,
    up_to_rule,
)
from speq.text.call_syntax import Tool


def regex_rule(pattern: str) -> str:
    return "/" + pattern.replace("/", r"\/").replace("\n", r"\n") + "/"


def choice_rule(texts: Sequence[str]) -> str:
    return " | ".join(map(text_rule, texts))


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """Writes grammars of one model's answers to one prompt.

    form         of its answers
    is_thinking  the prompt ends within a thought
    special      texts of special tokens, by id
    tools        that an answer may call
    most_calls   of an answer; None: any number
    """

    form: AnswerForm
    is_thinking: bool
    special: Mapping[int, str]
    tools: Sequence[Tool] = ()
    most_calls: int | None = None
    _ids: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._ids.update({text: token_id for token_id, text in self.special.items()})

    def text(self, rule: str) -> str:
        """An answer of one rule; or, where there are tools, calls of them in its place."""
        answer = f"({rule})"
        if self.form.is_harmony:
            answer = f"{self._channel('final')} {answer}"
        calls = f" | {self._calls()}" if self.tools else ""
        return self._grammar(f"{answer}{calls}")

    def calls(self) -> str:
        """At least one call of a tool."""
        return self._grammar(self._calls())

    def _grammar(self, answer: str) -> str:
        marks, rules = self.form.thoughts, [*UP_TO]
        if marks is not None:
            rules.append(up_to_rule("thought", marks.end))
        if self.form.wrapper:
            begin, end = (text_rule(mark) for mark in self.form.wrapper_marks)
            answer = f"{answer} | {begin} {SPACE} ({answer}) {SPACE} {end}"
        return "\n".join([f"start: {self._thoughts()}({answer})", *rules])

    def _thoughts(self) -> str:
        """What may come before an answer."""
        if self.form.is_harmony:
            end, start = self._mark("<|end|>"), self._mark(harmony.START)
            thought = f'{self._channel("analysis")} {ANY_TEXT} {end} {start} "assistant"'
            return f"({thought})* "
        marks = self.form.thoughts
        if marks is None:
            return ""
        end = self._mark(marks.end)
        thought = "thought" if end.startswith('"') else f"{ANY_TEXT} {end}"
        if self.is_thinking:
            return f"{thought} {SPACE} "
        return f"({SPACE} {self._mark(marks.begin)} {thought} {SPACE})? "

    def _calls(self) -> str:
        functions = [tool["function"] for tool in self.tools]
        if self.form.is_harmony:
            return " | ".join(f"({self._harmony_call(each)})" for each in functions)
        syntax = self.form.syntax
        if syntax is None:
            raise UnsupportedError(
                "tool_choice or response_format needs a grammar of the model's calls, whose form "
                "is not known; give tool_choice auto, and no response_format"
            )
        return syntax.write(functions, self._mark, self.most_calls == 1)

    def _harmony_call(self, function: Function) -> str:
        begin = self._channel(f"commentary to=functions.{function['name']}")
        return f"{begin} {json_rule(parameters_of(function))}"

    def _channel(self, name: str) -> str:
        """The beginning of a message in a channel of harmony."""
        begin, message = self._mark(harmony.CHANNEL), self._mark(harmony.MESSAGE)
        json_mark = f'(" " {self._mark(harmony.CONSTRAIN)} "json")?'
        return f"{begin} {text_rule(name)} {json_mark} {message}"

    def _mark(self, name: str) -> str:
        """A mark as a text, or as the special token that it is."""
        return f"<[{self._ids[name]}]>" if name in self._ids else text_rule(name)
