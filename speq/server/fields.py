"""Fields of requests, as OpenAI's API names them. What is not here is refused by its name.

Some fields are taken with those values alone that ask for nothing, such as `n` with 1: clients
send them.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

# As many likeliest tokens as OpenAI's own.
MOST_LOGPROBS = 20
# Objects and lists within one another, where a field holds any JSON.
MOST_DEPTH = 64


# Of lists and objects: one fault is told of. A body may have millions of them.
FIRST = Field(fail_fast=True)


class Body(BaseModel):
    """Values are of the types that are declared, and none is made into another."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _first_unknown(cls, given: Any) -> Any:
        """Keep one of many unknown fields: each would be a fault of its own."""
        if not isinstance(given, dict) or len(given) <= len(cls.model_fields):
            return given
        unknown = next(name for name in given if name not in cls.model_fields)
        return {name: given[name] for name in (*cls.model_fields, unknown) if name in given}


def shallow(schema: Any) -> Any:
    """Raises ValueError where objects and lists lie in one another too deeply for templates."""
    inside = [schema]
    for _ in range(MOST_DEPTH):
        lists = [each.values() if isinstance(each, dict) else each for each in inside]
        inside = [part for each in lists for part in each if isinstance(part, dict | list)]
        if not inside:
            return schema
    raise ValueError(f"at most {MOST_DEPTH} objects and lists may lie in one another")


StopText = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], FIRST]
Metadata = Annotated[dict[str, str], Field(max_length=64), FIRST]


class StreamOptions(Body):
    """include_usage: one more chunk at the end, with what the request took."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SampledBody(Body):
    """What chats and completions share. The last four are not OpenAI's: they go by vLLM's names."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16), FIRST] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e4)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    n: Literal[1] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0), FIRST] | None = None
    user: str | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None

    @property
    def includes_usage(self) -> bool:
        """True where a stream ends with what it took."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TextContent(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """arguments: an object, written as JSON."""

    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Body):
    """The fields behind `tool_call_id` stand in messages that clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextContent], FIRST] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], FIRST] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0), FIRST] | None = None


class Function(Body):
    """parameters: a JSON schema, which the model's template shows to the model."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(shallow)] | None = None
    strict: Literal[False] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class ResponseFormat(Body):
    type: Literal["text"]


class ChatBody(SampledBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1), FIRST]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=256), FIRST] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1), FIRST] | None = None
    metadata: Metadata | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class CompletionBody(SampledBody):
    """prompt: a text or token ids; of several, one."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(max_length=1), FIRST]
        | Annotated[list[TokenIds], Field(max_length=1), FIRST]
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None


class TokenizeBody(Body):
    """One of a text and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1), FIRST] | None = None
    tools: Annotated[list[Tool], Field(max_length=256), FIRST] | None = None


BODIES: tuple[type[Body], ...] = (
    *(
        StreamOptions,
        SampledBody,
        TextContent,
        CalledFunction,
        ToolCall,
        ChatMessage,
        Function,
        Tool,
    ),
    *(ResponseFormat, ChatBody, CompletionBody, TokenizeBody),
)
# Tells names of fields from names of types in where pydantic found a fault.
FIELD_NAMES = frozenset(name for body in BODIES for name in body.model_fields)
