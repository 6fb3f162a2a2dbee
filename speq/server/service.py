"""From the fields of a body to a request, and to the form of its answer."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from speq.config import SamplingParams
from speq.engine.logit_bias import LogitBias
from speq.engine.logprobs import PromptLogprobs
from speq.engine.request import Constraint, Request
from speq.errors import OptionError, SpeqError, present
from speq.generator import Generator
from speq.options.declared import build
from speq.server.answer_formats import (
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    EchoedPrompt,
    Heading,
)
from speq.server.answer_rule import is_chosen, wanted_form
from speq.server.api_error import ApiError
from speq.server.chat_prompt import (
    template_messages,
    template_tools,
    template_variables,
    with_one_system,
)
from speq.server.fields import (
    MOST_CHOICES,
    ChatBody,
    CompletionBody,
    ResizeBody,
    SampledBody,
    TokenizeBody,
)
from speq.server.message_fields import CountBody, MessagesBody
from speq.server.messages import MessagesFormat, chat_of
from speq.server.ollama import OllamaFormat, OllamaModel, chat_of_ollama, completion_of
from speq.server.ollama_fields import OllamaChatBody, OllamaGenerateBody
from speq.server.response_fields import ResponseBody
from speq.server.responses import ResponsesFormat, chat_of_response
from speq.text.answer_form import AnswerForm
from speq.text.answer_parts import AnswerReader
from speq.text.chat_template import TOOL, TemplateRefused
from speq.text.grammar import AnswerGrammar
from speq.text.prompts import Prompt, Tools
from speq.version import __version__

# The texts that a body asks for, each with what writes it.
Asked = list[tuple[Request, AnswerFormat]]
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

    async def chat(self, body: ChatBody) -> Asked:
        """Raises ApiError and SpeqError for what cannot be asked for."""
        heading, vocabulary = self._heading(body, "chatcmpl"), self.model.vocabulary
        return [
            (each.request, ChatFormat(heading, vocabulary, each.reader, index))
            for index, each in enumerate(await self._chat(body))
        ]

    async def message(self, body: MessagesBody) -> Asked:
        """The same as Anthropic's API has it."""
        chat = chat_of(body)
        if chat.thinking_token_budget is not None and not self._bounds_thoughts:
            chat.thinking_token_budget = None  # agents always say one
        (asked,) = await self._chat(chat)
        heading, count = self._heading(chat, "msg"), len(asked.request.prompt_token_ids)
        return [(asked.request, MessagesFormat(heading, count, asked.reader))]

    async def response(self, body: ResponseBody) -> Asked:
        """The same as OpenAI's Responses API has it."""
        chat = chat_of_response(body)
        (asked,) = await self._chat(chat)
        heading, count = self._heading(chat, "resp"), len(asked.request.prompt_token_ids)
        return [(asked.request, ResponsesFormat(heading, count, asked.reader))]

    async def ollama(self, body: OllamaChatBody | OllamaGenerateBody) -> Asked:
        """The same as Ollama's API has it."""
        name = body.model or self.name
        generates = isinstance(body, OllamaGenerateBody)
        if isinstance(body, OllamaGenerateBody) and body.raw:
            ((request, _),) = await self.completion(completion_of(body))
            reader = AnswerReader()
        else:
            (asked,) = await self._chat(chat_of_ollama(body))
            request, reader = asked.request, asked.reader
        count = len(request.prompt_token_ids)
        return [(request, OllamaFormat(name, count, reader, generates))]

    @property
    def ollama_model(self) -> OllamaModel:
        try:
            self.model.answer_parser([0], (TOOL,))
        except SpeqError:
            return OllamaModel(self.name, self.max_context, takes_tools=False)
        return OllamaModel(self.name, self.max_context, takes_tools=True)

    @property
    def facts(self) -> dict[str, Any]:
        """What is served, and how."""
        return {
            "version": __version__,
            "model": self.name,
            "max_model_len": self.max_context,
            "default_max_tokens": self.default_max_tokens,
            "sampling": {"temperature": TEMPERATURE} | self.defaults,
            **self.model.facts,
        }

    async def count(self, body: CountBody) -> int:
        """Tokens of the prompt of a message."""
        chat = chat_of(body)
        messages = template_messages(chat.messages)
        tools, variables = template_tools(chat.tools), template_variables(chat)
        return len(await self._encode_chat(messages, tools, variables))

    async def _chat(self, body: ChatBody) -> list["AskedChat"]:
        if body.top_logprobs is not None and not body.logprobs:
            raise OptionError("top_logprobs is given and logprobs is not true; give both")
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise OptionError("max_tokens and max_completion_tokens are both given; give one")
        tools = template_tools(body.tools if body.tool_choice != "none" else None)
        messages, variables = template_messages(body.messages), template_variables(body)
        ids = await self._encode_chat(messages, tools, variables)
        wanted = body.max_completion_tokens or body.max_tokens
        sampling = self._sampling(body, len(ids), wanted, self.default_max_tokens)
        most_calls = 1 if body.parallel_tool_calls is False else None
        named = [each for each in tools if is_chosen(body.tool_choice, each)]
        if named:
            most_calls = 1

        async def constraint() -> Constraint | None:
            made = await self._constraint(
                body, lambda: self.model.answer_grammar(ids, named or tools, most_calls)
            )
            most = body.thinking_token_budget
            return made if most is None else self._bounded(ids, tools, most, made)

        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        requests = await self._requests(body, ids, sampling, constraint, False, top_logprobs)
        return [
            AskedChat(each, AnswerReader(self.model.answer_parser(ids, tools), most_calls))
            for each in requests
        ]

    async def _requests(
        self,
        body: SampledBody,
        ids: list[int],
        sampling: SamplingParams,
        constraint: Callable[[], Awaitable[Constraint | None]],
        continues_text: bool,
        top_logprobs: int | None,
    ) -> list[Request]:
        """The requests of the `n` texts of one prompt, each with a constraint of its own. Raises
        SpeqError for tokens that the model has not.
        """
        requests = []
        for each in choices_of(sampling, body.n):
            made = self.model.request(
                ids, each, continues_text, top_logprobs, constraint=await constraint()
            )
            self._shape(made, body)
            requests.append(made)
        return requests

    def _bounded(
        self, ids: list[int], tools: Tools, most: int, answer: Constraint | None
    ) -> Constraint:
        """Bound the thought of an answer. Raises SpeqError where there is none."""
        bounded = self.model.bound_thought(ids, most, tools, answer)
        if bounded is None:
            raise OptionError(
                "thinking_token_budget is given and the model's answers have no thought whose "
                "length can be bounded; leave it out"
            )
        return bounded

    @property
    def _bounds_thoughts(self) -> bool:
        try:
            return self.model.bound_thought([0], 0) is not None
        except SpeqError:
            return False

    async def completion(self, body: CompletionBody) -> Asked:
        """Raises ApiError and SpeqError for what cannot be asked for."""
        prompts = prompts_of(body.prompt)
        if len(prompts) * (body.n or 1) > MOST_CHOICES:
            raise OptionError(
                f"{len(prompts)} prompts with n {body.n or 1} ask for more than {MOST_CHOICES} "
                "texts; give fewer at a time"
            )
        heading = self._heading(body, "cmpl")
        asked: Asked = []
        for prompt in prompts:
            for request, echo in await self._completions(body, prompt):
                form = CompletionFormat(heading, self.model.vocabulary, len(asked), echo)
                asked.append((request, form))
        return asked

    async def _completions(
        self, body: CompletionBody, prompt: str | list[int]
    ) -> list[tuple[Request, EchoedPrompt | None]]:
        """What is asked for of one prompt."""
        if isinstance(prompt, list):
            # Ids are counted before they are looked at: there may be millions of them.
            self._sampling(body, len(prompt), body.max_tokens, COMPLETION_TOKENS)
        ids = await self._encode(prompt)
        sampling = self._sampling(body, len(ids), body.max_tokens, COMPLETION_TOKENS)
        vocabulary = self.model.vocabulary

        async def constraint() -> Constraint | None:
            return await self._constraint(body, lambda: AnswerGrammar(AnswerForm(), False, {}))

        is_text = isinstance(prompt, str)
        requests = await self._requests(body, ids, sampling, constraint, is_text, body.logprobs)
        asked: list[tuple[Request, EchoedPrompt | None]] = []
        for request in requests:
            echo = None
            if body.echo:
                text = prompt if isinstance(prompt, str) else vocabulary.decode(ids)
                known = None if body.logprobs is None else PromptLogprobs(body.logprobs)
                request.prompt_logprobs = known
                echo = EchoedPrompt(vocabulary, text, ids, known)
            asked.append((request, echo))
        return asked

    def _shape(self, request: Request, body: SampledBody) -> None:
        """Set what a request adds to logits, and what ends it. Raises SpeqError for tokens that
        the model has not.
        """
        request.stop_token_ids = frozenset(body.stop_token_ids or ())
        biases = {int(name): value for name, value in (body.logit_bias or {}).items()}
        most = max((*request.stop_token_ids, *biases), default=0)
        if most >= self.model.vocab_size:
            raise OptionError(
                f"logit_bias or stop_token_ids names token {most}, and the model has "
                f"{self.model.vocab_size} tokens; give ids below that"
            )
        if biases or body.min_tokens:
            ends = request.eos_token_ids | request.stop_token_ids
            request.bias = LogitBias(biases, ends, body.min_tokens or 0)

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

    async def resize(self, body: ResizeBody) -> dict[str, int]:
        """Give experts more memory, or less. A request that runs follows with its next step."""
        await asyncio.to_thread(self.model.resize, body.memory_budget)
        return {"memory_budget": self.model.wanted_budget}

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
        for name in ("return_progress", "timings_per_token"):
            if getattr(body, name) and not body.stream:
                raise OptionError(f"{name} is given and stream is not true; give both")
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


def prompts_of(prompt: str | list[Any]) -> list[str | list[int]]:
    """The texts or the token ids, one or several."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return prompt
    return [prompt]


def choices_of(sampling: SamplingParams, count: int | None) -> list[SamplingParams]:
    """The options of each of several texts of a prompt, which differ in their seeds."""
    seed = sampling.seed
    return [
        sampling if seed is None else replace(sampling, seed=(seed + at) % (1 << 63))
        for at in range(count or 1)
    ]
