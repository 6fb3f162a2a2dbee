"""Requests as OpenAI's Batch API has them: {"custom_id", "method", "url", "body"}.

A body is what `speq serve` takes at that URL, and is answered as it would be there.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from speq.config import SamplingParams
from speq.engine.generation_config import sampling_defaults
from speq.engine.request import Request
from speq.engine.token_stream import End
from speq.errors import Broken, OptionError, SpeqError, checked_choice, checked_text
from speq.generator import Generator, Token
from speq.offline.answer_line import AnswerLine
from speq.offline.request_file import RequestLine
from speq.options.declared import refuse_unknown
from speq.server.answer_formats import AnswerFormat
from speq.server.api_error import ApiError, error_of, validated
from speq.server.fields import ChatBody, CompletionBody, SampledBody
from speq.server.service import Service

FIELDS = ("custom_id", "method", "url", "body")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


class Refused(SpeqError):
    """What a client would have been told."""

    def __init__(self, told: ApiError) -> None:
        super().__init__(told.message)
        self.told = told


@dataclass(slots=True)
class OpenAIRequest:
    """A request of that form. form: writes the answer's body."""

    number: int
    heading: dict[str, Any]
    request: Request
    form: AnswerFormat

    def add_tokens(self, tokens: list[Token]) -> None:
        for token in tokens:
            for _ in self.form.chunks(token):
                continue

    def answer(self, figures: dict[str, Any]) -> AnswerLine:
        prompt_tokens = len(self.request.prompt_token_ids)
        new_tokens = len(self.request.output_token_ids)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
            "speq": figures,
        }
        end = End(self.request.finish_reason or "", figures)
        for _ in self.form.closing(end):
            continue
        content = wrap_response(self.heading, 200, self.form.whole(end, usage))
        return AnswerLine(self.number, content, None, prompt_tokens, new_tokens)


@dataclass(slots=True)
class OpenAIFormat:
    """name: what bodies call the model; sampling: gives the tokens of a chat that does not say."""

    generator: Generator
    sampling: SamplingParams
    name: str
    _service: Service = field(init=False)

    def __post_init__(self) -> None:
        folder = self.generator.runtime.opened.checkpoint.path
        self._service = Service(
            self.generator, self.name, self.sampling.max_new_tokens, sampling_defaults(folder)
        )

    def read_request(self, line: RequestLine, given: dict[str, Any]) -> OpenAIRequest:
        refuse_unknown(given, FIELDS)
        missing = [name for name in FIELDS if name not in given]
        if missing:
            raise OptionError(f"{', '.join(missing)} must be given")
        checked_text("custom_id", given["custom_id"])
        checked_choice("method", given["method"], ("POST",))
        checked_choice("url", given["url"], (CHAT, COMPLETION))
        try:
            request, form = self._read_body(given["url"], given["body"])
        except ApiError as error:
            raise Refused(error) from error
        return OpenAIRequest(line.number, heading(line, given), request, form)

    def _read_body(self, url: str, fields: Any) -> tuple[Request, AnswerFormat]:
        """Raises ApiError and SpeqError as the server does."""
        wanted: type[SampledBody] = ChatBody if url == CHAT else CompletionBody
        body = validated(wanted, fields)
        if body.stream:
            raise OptionError("stream is true, and a file of answers has no streams; leave it out")
        if isinstance(body, ChatBody):
            asked = asyncio.run(self._service.chat(body))
        elif isinstance(body, CompletionBody):
            asked = asyncio.run(self._service.completion(body))
        else:
            raise Broken(f"a {type(body).__name__} is neither a chat nor a completion")
        if len(asked) > 1:
            name = "prompt" if body.n in (None, 1) else "n"
            raise OptionError(
                f"{name} asks for {len(asked)} texts, and a line has one answer; give more lines"
            )
        return asked[0]

    def failure(self, request: RequestLine, given: dict[str, Any], error: SpeqError) -> AnswerLine:
        told = error.told if isinstance(error, Refused) else error_of(error)
        content = wrap_response(heading(request, given), told.status, told.content)
        return AnswerLine(request.number, content, told.message)


def heading(request: RequestLine, given: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"batch_req_{request.line}", "custom_id": given.get("custom_id")}


def wrap_response(heading: dict[str, Any], status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": heading["id"], "body": body}
    return heading | {"response": response, "error": None}
