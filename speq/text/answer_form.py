"""The form of a model's answers, found in its chat template."""

from collections.abc import Sequence
from dataclasses import dataclass

from speq.errors import UnsupportedError
from speq.text import harmony
from speq.text.answer_parts import AnswerParser
from speq.text.call_syntax import SYNTAXES, CallSyntax, Tool
from speq.text.harmony import HarmonyParser
from speq.text.thoughts import THOUGHTS, ThoughtMarks, ThoughtParser
from speq.text.tool_calls import CallParser
from speq.text.wrapped_answer import WrappedParser

# Tags around answers, of Hunyuan and of ERNIE.
WRAPPERS = ("answer", "response")


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What answers may hold beside text.

    is_harmony  messages have channels
    thoughts    marks of a thought that comes first; None: there is none
    syntax      of calls of tools; None: no known one
    wrapper     tag around the answer behind a thought; empty: there is none
    """

    is_harmony: bool = False
    thoughts: ThoughtMarks | None = None
    syntax: CallSyntax | None = None
    wrapper: str = ""

    @classmethod
    def of(cls, template: str) -> "AnswerForm":
        def has(*marks: str) -> bool:
            return all(mark in template for mark in marks)

        if has(*harmony.IN_TEMPLATE):
            return cls(is_harmony=True)
        return cls(
            thoughts=next((each for each in THOUGHTS if has(each.end)), None),
            syntax=next((each for each in SYNTAXES if has(*each.in_template)), None),
            wrapper=next((each for each in WRAPPERS if has(*tags_of(each))), ""),
        )

    @property
    def wrapper_marks(self) -> tuple[str, str]:
        return tags_of(self.wrapper)

    def is_thinking(self, prompt_end: str) -> bool:
        """True if a prompt with these last characters ends within a thought."""
        if self.thoughts is None:
            return False
        end = prompt_end.rstrip().removesuffix(self.thoughts.heading).rstrip()
        return end.endswith(self.thoughts.begin)

    def check_tools(self, takes_tools: bool) -> None:
        """Raise SpeqError where calls of tools would not be found in an answer.

        takes_tools  whether the template has a place for tools
        """
        if not takes_tools:
            raise UnsupportedError(
                "tools are given and the model's chat template has no place for them"
            )
        if not self.is_harmony and self.syntax is None:
            marks = dict.fromkeys([*(each.begin for each in SYNTAXES), "channels of harmony"])
            raise UnsupportedError(
                "tools are given and the model calls them in a form that speq does not parse; "
                f"it parses {', '.join(marks)}"
            )

    def parser(self, prompt_end: str, tools: Sequence[Tool]) -> AnswerParser | None:
        """The parser of an answer; None: all of it is text.

        prompt_end  the last characters of the prompt
        tools       that may be called
        """
        if self.is_harmony:
            return HarmonyParser()
        parser: AnswerParser | None = None
        if tools and self.syntax is not None:
            parser = CallParser(self.syntax, tools)
        if self.wrapper:
            parser = WrappedParser(*self.wrapper_marks, parser)
        if self.thoughts is not None:
            parser = ThoughtParser(parser, self.is_thinking(prompt_end), self.thoughts)
        return parser


def tags_of(name: str) -> tuple[str, str]:
    return f"<{name}>", f"</{name}>"
