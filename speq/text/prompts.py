"""Prompts and their token ids, which are known before a model is loaded."""

import logging
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from speq.errors import OptionError, SpeqError, UnsupportedError
from speq.text.answer_parts import AnswerParser
from speq.text.chat_template import TOOL, ChatTemplate
from speq.text.grammar import AnswerGrammar
from speq.text.tokenizer import tokens_of
from speq.text.vocabulary import Vocabulary

logger = logging.getLogger("speq")

Message = Mapping[str, Any]
# A string, token ids, or chat messages [{"role": ..., "content": ...}, ...].
Prompt = str | Sequence[int] | Sequence[Message]
# Tools that messages may call, each described by JSON, for the model's template.
Tools = Sequence[Mapping[str, Any]]


# What rendering is given besides variables of templates.
RESERVED = frozenset(
    {
        *("conversations", "messages", "tools", "documents", "chat_template"),
        *("return_assistant_tokens_mask", "continue_final_message", "add_generation_prompt"),
    }
)
# The end of a prompt that is looked at: a mark and white space behind it.
END_TOKENS = 16


class PromptEncoder:
    """Encoder of prompts into token ids of one model. The last text is not tokenised again.

    tool_syntax  see `ChatTemplate.syntax`
    """

    def __init__(self, tokenizer: Any, vocab_size: int, tool_syntax: str = "auto") -> None:
        self.tokenizer = tokenizer
        self._tool_syntax = tool_syntax
        self.vocabulary = Vocabulary(tokenizer)
        self.vocab_size = vocab_size
        self._last: tuple[str | None, list[int]] = (None, [])
        self._templates: dict[str, ChatTemplate] = {}
        self._warned = False

    def encode(
        self, prompt: Prompt, tools: Tools = (), variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Encode a prompt. Raises SpeqError if it is empty or has token ids that the model lacks.

        tools      tools that chat messages may call; refused if the template has no place for them
        variables  of the chat template, such as enable_thinking
        """
        if isinstance(prompt, str):
            ids = self._encode_text(prompt)
        elif isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, Sequence):
            raise OptionError(
                f"prompt is a {type(prompt).__name__}; give a string, token ids or chat messages"
            )
        elif is_written(prompt):
            ids = self._encode_chat(prompt, tools, variables)  # type: ignore[arg-type]
        else:
            ids = list(prompt)  # type: ignore[arg-type]
        if not ids:
            raise OptionError("the prompt is empty; give at least one token")
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                raise OptionError(self._why_unknown(token_id, given=not is_written(prompt)))
        return ids

    def _encode_text(self, text: str) -> list[int]:
        last, ids = self._last
        if text != last:
            ids = tokens_of(self.tokenizer, text)
            self._last = (text, ids)
            self._warn_of_two_beginnings(ids)
        return list(ids)

    def _warn_of_two_beginnings(self, ids: list[int]) -> None:
        """Warn once if a text begins with what the tokenizer adds itself."""
        bos_id = self.tokenizer.bos_token_id
        if not self._warned and bos_id is not None and ids[:2] == [bos_id] * 2:
            self._warned = True
            logger.warning(
                "the prompt begins with %r, which the tokenizer adds to texts itself; leave "
                "it out, or the model reads it twice",
                self.tokenizer.bos_token,
            )

    def _why_unknown(self, token_id: Any, given: bool) -> str:
        """Explain an unknown token id. given: ids were given, not a text."""
        if given or type(token_id) is not int:
            return (
                f"the prompt holds {show(token_id)}; token ids are whole numbers from 0 to "
                f"{self.vocab_size - 1}"
            )
        name = show(self.vocabulary.name(token_id))
        return (
            f"the prompt holds the token {name} with the id {token_id}, and the model has "
            f"embeddings of {self.vocab_size} tokens: they were not enlarged when the tokenizer "
            "was; leave that token out, or take a checkpoint whose embeddings have it"
        )

    @property
    def chat_facts(self) -> dict[str, Any] | None:
        """What the chat template knows: tools and the syntax of their calls, by name, and marks of
        thoughts; None if there is no template.
        """
        try:
            with_tools = self._template([dict(TOOL)])
        except SpeqError:  # nor is there one without a tokenizer
            return None
        form = with_tools.form
        syntax = "harmony" if form.is_harmony else None if form.syntax is None else form.syntax.name
        return {
            "tools": syntax if with_tools.takes_tools else None,
            "thoughts": None if form.thoughts is None else [form.thoughts.begin, form.thoughts.end],
        }

    def answer_parser(self, prompt_ids: Sequence[int], tools: Tools = ()) -> AnswerParser | None:
        """What tells thoughts and calls of tools from text in a chat's answer; None: all is text.

        prompt_ids  of the chat, which may end within a thought

        Raises SpeqError for tools that the model would call in an unknown form.
        """
        template = self._template([dict(tool) for tool in tools])
        if tools:
            template.form.check_tools(template.takes_tools)
        return template.form.parser(self._end_of(prompt_ids), tools)

    def answer_grammar(
        self, prompt_ids: Sequence[int], tools: Tools = (), most_calls: int | None = None
    ) -> AnswerGrammar:
        """What writes grammars of a chat's answers; see there."""
        form = self._template([dict(tool) for tool in tools]).form
        is_thinking = form.is_thinking(self._end_of(prompt_ids))
        return AnswerGrammar(form, is_thinking, self.vocabulary.special, tools, most_calls)

    def thought_tokens(
        self, prompt_ids: Sequence[int], tools: Tools = ()
    ) -> tuple[int, int, bool] | None:
        """The ids of the tokens around a thought in a chat's answer, and whether its prompt ends
        within one; None if its answers have none.

        Raises SpeqError for marks that are several tokens.
        """
        form = self._template([dict(tool) for tool in tools]).form
        if form.thoughts is None:
            return None
        ids: list[int] = []
        for mark in (form.thoughts.begin, form.thoughts.end):
            found = self.tokenizer.encode(mark, add_special_tokens=False)
            if len(found) != 1:
                raise UnsupportedError(
                    f"the length of a thought can be bounded where its marks are single tokens, "
                    f"and {mark} is {len(found)} for this model; leave the bound out"
                )
            ids += found
        begin_id, end_id = ids
        return begin_id, end_id, form.is_thinking(self._end_of(prompt_ids))

    def _end_of(self, prompt_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(prompt_ids[-END_TOKENS:], skip_special_tokens=False))

    def _encode_chat(
        self, messages: Sequence[Message], tools: Tools, variables: Mapping[str, Any] | None
    ) -> list[int]:
        if not self.tokenizer.chat_template:
            raise OptionError("the model has no chat template; give the prompt as text")
        for message in messages:
            check_message(message)
        described = [dict(tool) for tool in tools]
        for name in RESERVED & (variables or {}).keys():
            raise OptionError(f"{name} is no variable of a chat template; leave it out")
        text = self._template(described).render(messages, described, variables)
        return tokens_of(self.tokenizer, text, add_special_tokens=False)

    def _template(self, tools: list[dict[str, Any]]) -> ChatTemplate:
        """The model's chat template; of several, the one for chats with or without tools."""
        try:
            text = self.tokenizer.get_chat_template(tools=tools or None)
        except ValueError as error:
            raise OptionError(f"the model has no chat template for this: {error}") from error
        if text not in self._templates:
            variables = dict(self.tokenizer.special_tokens_map)
            self._templates[text] = ChatTemplate(text, variables, self._tool_syntax)
        return self._templates[text]


def is_written(prompt: Prompt) -> bool:
    """True if a prompt is a text or messages, not token ids."""
    return isinstance(prompt, str) or (
        bool(prompt) and all(isinstance(part, Mapping) for part in prompt)
    )


def check_message(message: Message) -> None:
    """Raise SpeqError for a message that templates would render in Python syntax, such as None.

    Content may be absent or None beside tool calls, or a list of parts.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise OptionError(f"a message has the role {show(role)}; give a text such as 'user'")
    parts = isinstance(content, list) and all(isinstance(part, Mapping) for part in content)
    if not isinstance(content, str) and not parts and not message.get("tool_calls"):
        raise OptionError(f"a message has the content {show(content)}; give a text")


def show(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # of a number with thousands of digits
        return f"an {type(value).__name__} too long to show"
