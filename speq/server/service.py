"""From the fields of a body to a request, and to the form of its answer."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from speq.config import SamplingParams
from speq.engine.request import Request
from speq.errors import OptionError
from speq.generator import Generator
from speq.options.declared import build
from speq.server.answer_formats import ChatFormat, CompletionFormat, Heading
from speq.server.api_error import ApiError
from speq.server.chat_prompt import template_messages, template_tools
from speq.server.fields import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    SampledBody,
    TokenizeBody,
    Tool,
)
from speq.server.tool_calls import CallParser
from speq.text.prompts import Prompt, Tools

# Of a completion that does not say, as in OpenAI's API.
COMPLETION_TOKENS = 16
# Of requests that do not say, as in OpenAI's API, where the model says nothing either.
TEMPERATURE = 1.0
# Fields that are options of sampling, under the same names.
SAMPLED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


@dataclass(slots=True)
class Service:
    """What is known of the model that is served.

    name      clients call it so
    defaults  of sampling, where a request says nothing: the model's own
    """

    model: Generator
    name: str
    default_max_tokens: int
    defaults: dict[str, Any] = field(default_factory=dict)
    _encoding: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @property
    def max_context(self) -> int:
        return self.model.max_context

    async def chat(self, body: ChatBody) -> tuple[Request, ChatFormat]:
        """Raises ApiError and SpeqError for what cannot be asked for."""
        self.check_model(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise OptionError("top_logprobs is given and logprobs is not true; give both")
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise OptionError("max_tokens and max_completion_tokens are both given; give one")
        called = body.tools if body.tool_choice != "none" else None
        ids = await self.chat_ids(body.messages, called)
        wanted = body.max_completion_tokens or body.max_tokens
        request = self.model.request(
            ids,
            self._sampling(body, len(ids), wanted, self.default_max_tokens),
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        parser = CallParser() if called else None
        return request, ChatFormat(Heading(self.name, "chatcmpl"), self.model.vocabulary, parser)

    async def completion(self, body: CompletionBody) -> tuple[Request, CompletionFormat]:
        """Raises ApiError and SpeqError for what cannot be asked for."""
        self.check_model(body.model)
        prompt = one_prompt(body.prompt)
        if isinstance(prompt, list):
            # Ids are counted before they are looked at: there may be millions of them.
            self._sampling(body, len(prompt), body.max_tokens, COMPLETION_TOKENS)
        ids = await self._encode(prompt)
        sampling = self._sampling(body, len(ids), body.max_tokens, COMPLETION_TOKENS)
        continues_text = isinstance(prompt, str)
        request = self.model.request(ids, sampling, continues_text, top_logprobs=body.logprobs)
        return request, CompletionFormat(Heading(self.name, "cmpl"), self.model.vocabulary)

    async def tokenize(self, body: TokenizeBody) -> list[int]:
        """Token ids of a text, or of messages as a chat would have them."""
        if body.model is not None:
            self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise OptionError("prompt or messages must be given, and not both")
        if body.messages is not None:
            return await self.chat_ids(body.messages, body.tools)
        if body.tools:
            raise OptionError("tools are given without messages; give messages")
        return await self._encode(body.prompt or "")

    async def chat_ids(self, messages: list[ChatMessage], tools: list[Tool] | None) -> list[int]:
        described = template_tools(self.model.tokenizer, tools)
        return await self._encode(template_messages(messages), described)

    def check_model(self, name: str) -> None:
        """Raises ApiError for another one's name."""
        if name != self.name:
            raise ApiError(
                404,
                f"model is {name!r:.200}; this server has {self.name}",
                "model",
                "model_not_found",
            )

    async def _encode(self, prompt: Prompt, tools: Tools = ()) -> list[int]:
        # One at a time, beside the loop: a long text takes seconds of a processor.
        async with self._encoding:
            return await asyncio.to_thread(self.model.encode, prompt, tools)

    def _sampling(
        self, body: SampledBody, prompt_tokens: int, wanted: int | None, default: int
    ) -> SamplingParams:
        """Raises SpeqError for more tokens than the context has room for."""
        room = self.max_context - prompt_tokens
        if room < (wanted or 1):
            raise ApiError(
                400,
                f"the prompt has {prompt_tokens} tokens, {wanted or 1} more are asked for, and the "
                f"context holds {self.max_context}; shorten one of them",
                "max_tokens" if wanted and room > 0 else None,
                "context_length_exceeded",
            )
        given = {name: getattr(body, name) for name in SAMPLED}
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        return build(
            SamplingParams,
            {"temperature": TEMPERATURE}
            | self.defaults
            | {name: value for name, value in given.items() if value is not None}
            | {"max_new_tokens": wanted or min(default, room), "stop": stop},
        )


def one_prompt(prompt: str | list[Any]) -> str | list[int]:
    """The text or the token ids, also where they are the only ones of a list."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return prompt[0]
    return prompt
