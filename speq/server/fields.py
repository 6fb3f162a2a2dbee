"""Fields of requests, as OpenAI's API names them. What is not here is refused by its name.

Some fields are taken with those values alone that ask for nothing, such as `n` with 1, and some
are taken and have no effect on an answer, such as `user`: clients send them.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

# As many likeliest tokens as OpenAI's own.
MOST_LOGPROBS = 20
# Answers to one request.
MOST_CHOICES = 128
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
        known = [field.alias or name for name, field in cls.model_fields.items()]
        unknown = next(name for name in given if name not in known)
        return {name: given[name] for name in (*known, unknown) if name in given}


def shallow(schema: Any) -> Any:
    """Raises ValueError where objects and lists lie in one another too deeply for templates."""
    inside = [schema]
    for _ in range(MOST_DEPTH):
        lists = [each.values() if isinstance(each, dict) else each for each in inside]
        inside = [part for each in lists for part in each if isinstance(part, dict | list)]
        if not inside:
            return schema
    raise ValueError(f"at most {MOST_DEPTH} objects and lists may lie in one another")


def whole(value: Any) -> Any:
    """A number without a fraction as an integer: some clients write 8 as 8.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def reading(from_value: Any, to: Any) -> BeforeValidator:
    """Read a value as another one, such as -1 as none: some clients write it so."""

    def read(value: Any) -> Any:
        value = whole(value)
        return to if type(value) is type(from_value) and value == from_value else value

    return BeforeValidator(read)


def without_empty(stop: Any) -> Any:
    """Stop texts without empty ones, which never end an answer."""
    if isinstance(stop, list):
        return [each for each in stop if each != ""] or None
    return None if stop == "" else stop


JsonObject = Annotated[dict[str, Any], AfterValidator(shallow)]
Tokens = Annotated[Annotated[int, Field(ge=1)] | None, reading(-1, None)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], FIRST]
Pattern = Annotated[str, Field(min_length=1, max_length=1 << 16)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024), FIRST
]
TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Metadata = Annotated[dict[str, str], Field(max_length=64), FIRST]


class StreamOptions(Body):
    """Counts of tokens in a stream.

    include_usage           in one more chunk at the end
    continuous_usage_stats  in each chunk
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class StructuredOutputs(Body):
    """What an answer must follow, one of them; vLLM's names."""

    json_: JsonObject | str | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None


class SampledBody(Body):
    """What chats and completions share. Those from top_k on are not OpenAI's: they go by vLLM's
    names, or llama.cpp's.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens = None
    stop: Annotated[
        StopText | Annotated[list[StopText], Field(max_length=16), FIRST] | None,
        BeforeValidator(without_empty),
    ] = None
    seed: Annotated[Annotated[int, Field(ge=0, lt=1 << 63)] | None, reading(-1, None)] = None
    temperature: Annotated[float, Field(ge=0, le=1e4)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    logit_bias: Annotated[dict[TokenName, Bias], Field(max_length=1024), FIRST] | None = None
    user: str | None = None
    top_k: Annotated[Annotated[int, Field(ge=0)] | None, reading(-1, 0)] = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64), FIRST] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None
    cache_prompt: bool | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    return_token_ids: Literal[False] | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None


class TextContent(Body):
    """cache_control: Anthropic's; what can be reused is."""

    type: Literal["text"]
    text: str
    cache_control: JsonObject | None = None


class CalledFunction(Body):
    """arguments: an object, written as JSON; a text without any is one without fields."""

    name: str
    arguments: Annotated[str, reading("", "{}")]


class ToolCall(Body):
    """index: in the stream that it came by."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(Body):
    """The fields behind `tool_call_id` stand in messages that clients send back.

    reasoning_content, reasoning  what the model thought, for its template
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextContent], FIRST] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], FIRST] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    id: str | None = None
    cache_control: JsonObject | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0), FIRST] | None = None


class Function(Body):
    """parameters: a JSON schema, which the model's template shows to the model.

    strict  taken, and not enforced: arguments are what the model writes
    """

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function
    cache_control: JsonObject | None = None


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    """schema: of the answer; None: any object"""

    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(SampledBody):
    """chat_template_kwargs, reasoning_effort: variables of the model's chat template.

    thinking_token_budget  tokens of its thought at most; vLLM's name
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1), FIRST]
    max_completion_tokens: Tokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=256), FIRST] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    include_reasoning: Literal[True] | None = None
    thinking_token_budget: Annotated[Annotated[int, Field(ge=0)] | None, reading(-1, None)] = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1), FIRST] | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    prediction: JsonObject | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class CompletionBody(SampledBody):
    """prompt: texts or token ids, of one prompt or of several; echo: the prompt, before its text"""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(max_length=MOST_CHOICES), FIRST]
        | Annotated[list[TokenIds], Field(max_length=MOST_CHOICES), FIRST]
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: Literal[1] | None = None
    echo: bool | None = None
    suffix: None = None


class TokenizeBody(Body):
    """One of a text and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1), FIRST] | None = None
    tools: Annotated[list[Tool], Field(max_length=256), FIRST] | None = None


class ResizeBody(Body):
    """memory_budget: bytes, or a size such as 12GiB"""

    memory_budget: str | Annotated[int, Field(ge=0)]


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
    *(NamedFunction, NamedTool, JsonSchema, ResponseFormat, StructuredOutputs),
    *(ChatBody, CompletionBody, TokenizeBody, ResizeBody),
)
