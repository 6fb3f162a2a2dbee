"""A request of a file as the engine takes it, and the line that its answer becomes."""

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from speq.config import SamplingParams
from speq.engine.request import Request
from speq.errors import OptionError, SpeqError
from speq.generator import Generator, Token
from speq.offline.answer_line import AnswerLine
from speq.offline.request_file import RequestLine
from speq.options.declared import declared_options, refuse_unknown

SAMPLING = tuple(each.name for each in declared_options(SamplingParams))
# What a request of our own form may have beside them.
FIELDS = ("custom_id", "prompt", "messages")


class LineRequest(Protocol):
    """One request that is being answered."""

    @property
    def request(self) -> Request: ...

    def add_tokens(self, tokens: list[Token]) -> None:
        """Take the tokens that have come."""

    def answer(self, figures: dict[str, Any]) -> AnswerLine:
        """What came of it, once all tokens have. figures: the text's own."""


class LineFormat(Protocol):
    """A way in which requests and answers are written."""

    def read_request(self, request: RequestLine, given: dict[str, Any]) -> LineRequest:
        """Raises SpeqError for what cannot be asked for."""

    def failure(self, request: RequestLine, given: dict[str, Any], error: SpeqError) -> AnswerLine:
        """What a request that failed becomes."""


def heading(request: RequestLine, given: dict[str, Any]) -> dict[str, Any]:
    """What tells whose answer a line is."""
    named = {"custom_id": given["custom_id"]} if "custom_id" in given else {}
    return {"line": request.line} | named


@dataclass(slots=True)
class PlainRequest:
    """A request of our own form."""

    number: int
    heading: dict[str, Any]
    request: Request
    _pieces: list[str] = field(default_factory=list)

    def add_tokens(self, tokens: list[Token]) -> None:
        self._pieces += [token.text for token in tokens]

    def answer(self, figures: dict[str, Any]) -> AnswerLine:
        prompt_tokens = len(self.request.prompt_token_ids)
        new_tokens = len(self.request.output_token_ids)
        content = self.heading | {
            "text": "".join(self._pieces),
            "finish_reason": self.request.finish_reason,
            "usage": {
                "prompt_tokens": prompt_tokens,
                "new_tokens": new_tokens,
                "total_tokens": prompt_tokens + new_tokens,
            },
            "stats": figures,
        }
        return AnswerLine(self.number, content, None, prompt_tokens, new_tokens)


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """{"prompt": text or token ids} or {"messages": [...]}, with options of sampling beside it.

    sampling  where a request says nothing
    """

    generator: Generator
    sampling: SamplingParams

    def read_request(self, request: RequestLine, given: dict[str, Any]) -> PlainRequest:
        refuse_unknown(given, (*FIELDS, *SAMPLING))
        if ("prompt" in given) == ("messages" in given):
            raise OptionError("prompt or messages must be given, and not both")
        prompt: Any = given.get("prompt", given.get("messages"))
        if "messages" in given and not (
            isinstance(prompt, list) and all(isinstance(each, dict) for each in prompt)
        ):
            raise OptionError("messages must be a list of objects with role and content")
        own = {name: given[name] for name in SAMPLING if name in given}
        options: Any = asdict(self.sampling) | own
        made = self.generator.prepare(prompt, None, options)
        return PlainRequest(request.number, heading(request, given), made)

    def failure(self, request: RequestLine, given: dict[str, Any], error: SpeqError) -> AnswerLine:
        sentence = str(error)
        return AnswerLine(request.number, heading(request, given) | {"error": sentence}, sentence)
