"""Fields of Anthropic's Messages API, as its clients write them."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from speq.server.fields import FIRST, Body, JsonObject, StopText


class Tolerant(Body):
    """A part of a body that newer clients write more into, such as where a cache may begin."""

    model_config = ConfigDict(extra="ignore")


class TextBlock(Tolerant):
    type: Literal["text"]
    text: str


class ThinkingBlock(Tolerant):
    type: Literal["thinking"]
    thinking: str


class RedactedBlock(Tolerant):
    type: Literal["redacted_thinking"]


class ToolUseBlock(Tolerant):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


class ToolResultBlock(Tolerant):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], FIRST] | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class Message(Tolerant):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], FIRST]


class MessageTool(Tolerant):
    """A tool; without a schema it is one that only Anthropic's own servers run, and is left out."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: JsonObject | None = None


class MessageToolChoice(Tolerant):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Tolerant):
    """budget_tokens: tokens of a thought at most; no effect where the model has no thoughts"""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None


class OutputConfig(Tolerant):
    effort: str | None = None


class CountBody(Body):
    """What tokens are counted of. Fields from metadata on are taken and change nothing."""

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1), FIRST]
    system: str | Annotated[list[TextBlock], FIRST] | None = None
    tools: Annotated[list[MessageTool], Field(max_length=256), FIRST] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: JsonObject | None = None
    service_tier: str | None = None
    cache_control: JsonObject | None = None
    context_management: JsonObject | None = None
    betas: Annotated[list[str], FIRST] | None = None


class MessagesBody(CountBody):
    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=16), FIRST] | None = None
    temperature: Annotated[float, Field(ge=0, le=1e4)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None


MESSAGE_BODIES: tuple[type[Body], ...] = (
    *(TextBlock, ThinkingBlock, RedactedBlock, ToolUseBlock, ToolResultBlock, Message),
    *(MessageTool, MessageToolChoice, Thinking, OutputConfig, CountBody, MessagesBody),
)


def texts_of(content: str | list[Any] | None) -> str:
    """Texts of blocks, each of which begins a line."""
    if isinstance(content, list):
        return "\n".join(block.text for block in content if isinstance(block, TextBlock))
    return content or ""
