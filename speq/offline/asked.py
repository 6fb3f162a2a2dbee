"""A request of a file as the engine takes it, and the line that its answer becomes."""

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from speq.config import SamplingParams
from speq.decode.sequence import Sequence
from speq.errors import SpeqError
from speq.generator import Generator, Token
from speq.offline.answer import Answer
from speq.offline.request_file import RequestLine
from speq.options.declared import declared, refuse_unknown

SAMPLING = tuple(each.name for each in declared(SamplingParams))
# What a request of our own form may have beside them.
FIELDS = ("custom_id", "prompt", "messages")


class Asked(Protocol):
    """One request that is being answered."""

    @property
    def sequence(self) -> Sequence: ...

    def hear(self, tokens: list[Token]) -> None:
        """Take the tokens that have come."""

    def answer(self, figures: dict[str, Any]) -> Answer:
        """What came of it, once all tokens have. figures: the text's own."""


class Form(Protocol):
    """A way in which requests and answers are written."""

    def asked(self, request: RequestLine, given: dict[str, Any]) -> Asked:
        """Raises SpeqError for what cannot be asked for."""

    def failure(self, request: RequestLine, given: dict[str, Any], error: SpeqError) -> Answer:
        """What a request that failed becomes."""


def heading(request: RequestLine, given: dict[str, Any]) -> dict[str, Any]:
    """What tells whose answer a line is."""
    named = {"custom_id": given["custom_id"]} if "custom_id" in given else {}
    return {"line": request.line} | named


@dataclass(slots=True)
class PlainAsked:
    """A request of our own form."""

    number: int
    heading: dict[str, Any]
    sequence: Sequence
    _pieces: list[str] = field(default_factory=list)

    def hear(self, tokens: list[Token]) -> None:
        self._pieces += [token.text for token in tokens]

    def answer(self, figures: dict[str, Any]) -> Answer:
        prompt_tokens = len(self.sequence.prompt_ids)
        new_tokens = len(self.sequence.generated_ids)
        content = self.heading | {
            "text": "".join(self._pieces),
            "finish_reason": self.sequence.finish_reason,
            "usage": {
                "prompt_tokens": prompt_tokens,
                "new_tokens": new_tokens,
                "total_tokens": prompt_tokens + new_tokens,
            },
            "stats": figures,
        }
        return Answer(self.number, content, None, prompt_tokens, new_tokens)


@dataclass(frozen=True, slots=True)
class PlainForm:
    """{"prompt": text or token ids} or {"messages": [...]}, with options of sampling beside it.

    sampling  where a request says nothing
    """

    generator: Generator
    sampling: SamplingParams

    def asked(self, request: RequestLine, given: dict[str, Any]) -> PlainAsked:
        refuse_unknown(given, (*FIELDS, *SAMPLING))
        if ("prompt" in given) == ("messages" in given):
            raise SpeqError("prompt or messages must be given, and not both")
        prompt: Any = given.get("prompt", given.get("messages"))
        if "messages" in given and not (
            isinstance(prompt, list) and all(isinstance(each, dict) for each in prompt)
        ):
            raise SpeqError("messages must be a list of objects with role and content")
        own = {name: given[name] for name in SAMPLING if name in given}
        options: Any = asdict(self.sampling) | own
        sequence = self.generator.prepare(prompt, None, options)
        return PlainAsked(request.number, heading(request, given), sequence)

    def failure(self, request: RequestLine, given: dict[str, Any], error: SpeqError) -> Answer:
        sentence = str(error)
        return Answer(request.number, heading(request, given) | {"error": sentence}, sentence)
