"""From the fields of a body to a request, and to the form of its answer."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from speq.config import SamplingParams
from speq.engine.request import Constraint, Request
from speq.errors import OptionError, present
from speq.generator import Generator
from speq.options.declared import build
from speq.server.answer_formats import ChatFormat, CompletionFormat, Heading
from speq.server.answer_rule import is_chosen, wanted_form
from speq.server.api_error import ApiError
from speq.server.chat_prompt import (
    template_messages,
    template_tools,
    template_variables,
    with_one_system,
)
from speq.server.fields import ChatBody, CompletionBody, SampledBody, TokenizeBody
from speq.server.message_fields import CountBody, MessagesBody
from speq.server.messages import MessagesFormat, chat_of
from speq.server.response_fields import ResponseBody
from speq.server.responses import ResponsesFormat, chat_of_response
from speq.text.answer_form import AnswerForm
from speq.text.answer_parts import AnswerReader
from speq.text.chat_template import TemplateRefused
from speq.text.grammar import AnswerGrammar
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
        asked = await self._chat(body)
        heading, vocabulary = self._heading(body, "chatcmpl"), self.model.vocabulary
        return asked.request, ChatFormat(heading, vocabulary, asked.reader)

    async def message(self, body: MessagesBody) -> tuple[Request, MessagesFormat]:
        """The same as Anthropic's API has it."""
        chat = chat_of(body)
        asked = await self._chat(chat)
        heading, count = self._heading(chat, "msg"), len(asked.request.prompt_token_ids)
        return asked.request, MessagesFormat(heading, count, asked.reader)

    async def response(self, body: ResponseBody) -> tuple[Request, ResponsesFormat]:
        """The same as OpenAI's Responses API has it."""
        chat = chat_of_response(body)
        asked = await self._chat(chat)
        heading, count = self._heading(chat, "resp"), len(asked.request.prompt_token_ids)
        return asked.request, ResponsesFormat(heading, count, asked.reader)

    async def count(self, body: CountBody) -> int:
        """Tokens of the prompt of a message."""
        chat = chat_of(body)
        messages = template_messages(chat.messages)
        tools, variables = template_tools(chat.tools), template_variables(chat)
        return len(await self._encode_chat(messages, tools, variables))

    async def _chat(self, body: ChatBody) -> "AskedChat":
        if body.top_logprobs is not None and not body.logprobs:
            raise OptionError("top_logprobs is given and logprobs is not true; give both")
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise OptionError("max_tokens and max_completion_tokens are both given; give one")
        tools = template_tools(body.tools if body.tool_choice != "none" else None)
        messages, variables = template_messages(body.messages), template_variables(body)
        ids = await self._encode_chat(messages, tools, variables)
        wanted = body.max_completion_tokens or body.max_tokens
        sampling = self._sampling(body, len(ids), wanted, self.default_max_tokens)
        parser = self.model.answer_parser(ids, tools)
        most_calls = 1 if body.parallel_tool_calls is False else None
        named = [each for each in tools if is_chosen(body.tool_choice, each)]
        if named:
            most_calls = 1
        request = self.model.request(
            ids,
            sampling,
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            constraint=await self._constraint(
                body, lambda: self.model.answer_grammar(ids, named or tools, most_calls)
            ),
        )
        return AskedChat(request, AnswerReader(parser, most_calls))

    async def completion(self, body: CompletionBody) -> tuple[Request, CompletionFormat]:
        """Raises ApiError and SpeqError for what cannot be asked for."""
        prompt = one_prompt(body.prompt)
        if isinstance(prompt, list):
            # Ids are counted before they are looked at: there may be millions of them.
            self._sampling(body, len(prompt), body.max_tokens, COMPLETION_TOKENS)
        ids = await self._encode(prompt)
        sampling = self._sampling(body, len(ids), body.max_tokens, COMPLETION_TOKENS)
        continues_text = isinstance(prompt, str)
        constraint = await self._constraint(body, lambda: AnswerGrammar(AnswerForm(), False, {}))
        request = self.model.request(
            ids, sampling, continues_text, body.logprobs, constraint=constraint
        )
        return request, CompletionFormat(self._heading(body, "cmpl"), self.model.vocabulary)

    async def _constraint(
        self, body: SampledBody, grammar: Callable[[], AnswerGrammar]
    ) -> Constraint | None:
        """What an answer must follow. Raises SpeqError where that is no grammar."""
        wanted = wanted_form(body)
        if wanted is None:
            return None
        name, write = wanted
        try:
            async with self._encoding:
                return await asyncio.to_thread(self.model.constraint, write(grammar()))
        except OptionError as error:
            raise OptionError(f"{name} is refused: {error}") from error

    def _heading(self, body: SampledBody, prefix: str) -> Heading:
        """The only model answers to any name, and is called so."""
        return Heading(body.model or self.name, prefix)

    async def tokenize(self, body: TokenizeBody) -> list[int]:
        """Token ids of a text, or of messages as a chat would have them."""
        if (body.prompt is None) == (body.messages is None):
            raise OptionError("prompt or messages must be given, and not both")
        if body.messages is not None:
            tools = template_tools(body.tools)
            return await self._encode_chat(template_messages(body.messages), tools, {})
        if body.tools:
            raise OptionError("tools are given without messages; give messages")
        return await self._encode(body.prompt or "")

    def check_model(self, name: str) -> None:
        """Raises ApiError for another one's name."""
        if name != self.name:
            raise ApiError(
                404,
                f"model is {name!r:.200}; this server has {self.name}",
                "model",
                "model_not_found",
            )

    async def _encode_chat(
        self, messages: list[dict[str, Any]], tools: Tools, variables: dict[str, Any]
    ) -> list[int]:
        """Raises SpeqError, the template's first, where it refuses the messages in all forms."""
        refused: TemplateRefused | None = None
        for each in with_one_system(messages):
            try:
                return await self._encode(each, tools, variables)
            except TemplateRefused as error:
                refused = refused or error
        raise present(refused, "no messages were tried")

    async def _encode(
        self, prompt: Prompt, tools: Tools = (), variables: dict[str, Any] | None = None
    ) -> list[int]:
        # One at a time, beside the loop: a long text takes seconds of a processor.
        async with self._encoding:
            return await asyncio.to_thread(self.model.encode, prompt, tools, variables)

    def _sampling(
        self, body: SampledBody, prompt_tokens: int, wanted: int | None, default: int
    ) -> SamplingParams:
        """Raises SpeqError for a prompt that leaves no room in the context. More tokens than it
        leaves are cut to those: many clients always ask for as many.
        """
        room = self.max_context - prompt_tokens
        if room < 1:
            raise ApiError(
                400,
                f"the prompt has {prompt_tokens} tokens, and the context holds {self.max_context}; "
                "shorten it",
                code="context_length_exceeded",
            )
        given = {name: getattr(body, name) for name in SAMPLED}
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        return build(
            SamplingParams,
            {"temperature": TEMPERATURE}
            | self.defaults
            | {name: value for name, value in given.items() if value is not None}
            | {"max_new_tokens": min(wanted or default, room), "stop": stop},
        )


@dataclass(frozen=True, slots=True)
class AskedChat:
    """A chat's request, and what reads its answer."""

    request: Request
    reader: AnswerReader


def one_prompt(prompt: str | list[Any]) -> str | list[int]:
    """The text or the token ids, also where they are the only ones of a list."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return prompt[0]
    return prompt
