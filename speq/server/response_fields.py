"""Fields of OpenAI's Responses API, as its clients write them."""

from typing import Annotated, Any, Literal

from pydantic import Field

from speq.server.fields import (
    FIRST,
    Body,
    JsonObject,
    JsonSchema,
    Metadata,
    NamedFunction,
    StreamOptions,
    Tokens,
)
from speq.server.message_fields import Tolerant


class TextPart(Tolerant):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


Parts = Annotated[list[TextPart], FIRST]


class MessageItem(Tolerant):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Parts


class CallItem(Tolerant):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(Tolerant):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class ReasoningItem(Tolerant):
    """A thought: whole texts in `content`, or a summary of them."""

    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None


class ResponseTool(Tolerant):
    """A tool; one of another type runs on OpenAI's own servers, and is left out."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: JsonObject | None = None


class ResponseToolChoice(Tolerant):
    type: Literal["function"]
    name: str


class Reasoning(Tolerant):
    effort: str | None = None


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Tolerant):
    format: TextFormat | None = None


class ResponseBody(Body):
    """Fields from store on are taken with values that ask for nothing here, or change nothing."""

    model: str | None = None
    input: (
        str
        | Annotated[
            list[CallItem | CallOutputItem | ReasoningItem | MessageItem],
            Field(min_length=1),
            FIRST,
        ]
    )
    instructions: str | None = None
    max_output_tokens: Tokens = None
    temperature: Annotated[float, Field(ge=0, le=1e4)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=256), FIRST] | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    store: bool | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    include: Annotated[list[str], Field(max_length=64), FIRST] | None = None
    metadata: Metadata | None = None
    client_metadata: JsonObject | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    user: str | None = None


RESPONSE_BODIES: tuple[type[Body], ...] = (
    *(TextPart, MessageItem, CallItem, CallOutputItem, ReasoningItem, ResponseTool),
    *(ResponseToolChoice, Reasoning, TextFormat, TextOptions, ResponseBody, NamedFunction),
)


def texts_in(content: str | list[Any] | None) -> str:
    """Texts of parts, each of which begins a line."""
    if isinstance(content, list):
        return "\n".join(part.text for part in content)
    return content or ""
