"""The form of a model's answers, found in its chat template."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from speq.errors import UnsupportedError
from speq.text import harmony, thoughts
from speq.text.answer_parts import AnswerParser
from speq.text.call_syntax import SYNTAXES, CallSyntax, Tool
from speq.text.harmony import HarmonyParser
from speq.text.thoughts import ThoughtParser
from speq.text.tool_calls import CallParser


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What answers may hold beside text.

    is_harmony  messages have channels
    thinks      thoughts come first
    syntax      of calls of tools; None: no known one
    call_style  of calls between <tool_call> and </tool_call>
    """

    is_harmony: bool = False
    thinks: bool = False
    syntax: CallSyntax | None = None
    call_style: Literal["json", "tags", "glm"] = "json"

    @classmethod
    def of(cls, template: str) -> "AnswerForm":
        if all(mark in template for mark in harmony.IN_TEMPLATE):
            return cls(is_harmony=True)
        syntax = next((each for each in SYNTAXES if each.in_template in template), None)
        style: Literal["json", "tags", "glm"] = "json"
        if "<function=" in template:
            style = "tags"
        elif "<arg_key>" in template:
            style = "glm"
        return cls(thinks=thoughts.END in template, syntax=syntax, call_style=style)

    @staticmethod
    def is_thinking(prompt_end: str) -> bool:
        """True if a prompt with these last characters ends within a thought."""
        return prompt_end.rstrip().endswith(thoughts.BEGIN)

    def check_tools(self, takes_tools: bool) -> None:
        """Raise SpeqError where calls of tools would not be found in an answer.

        takes_tools  whether the template has a place for tools
        """
        if not takes_tools:
            raise UnsupportedError(
                "tools are given and the model's chat template has no place for them"
            )
        if not self.is_harmony and self.syntax is None:
            marks = ", ".join([*(each.begin for each in SYNTAXES), "channels of harmony"])
            raise UnsupportedError(
                "tools are given and the model calls them in a form that speq does not parse; "
                f"it parses {marks}"
            )

    def parser(self, prompt_end: str, tools: Sequence[Tool]) -> AnswerParser | None:
        """The parser of an answer; None: all of it is text.

        prompt_end  the last characters of the prompt
        tools       that may be called
        """
        if self.is_harmony:
            return HarmonyParser()
        calls = CallParser(self.syntax, tools) if tools and self.syntax is not None else None
        if not self.thinks:
            return calls
        return ThoughtParser(calls, self.is_thinking(prompt_end))
