"""Fields of Ollama's API, as its clients write them."""

from typing import Annotated, Any, Literal

from pydantic import Field

from speq.server.fields import FIRST, Body, JsonObject, StopText, Tool
from speq.server.message_fields import Tolerant

# What asks for nothing here: where layers and threads are, and how long a model is kept.
IGNORED = Annotated[Any, Field(default=None)]


class OllamaOptions(Body):
    """num_predict: tokens at most; below 0: what the context leaves"""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[list[StopText], Field(max_length=16), FIRST] | None = None
    num_predict: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    num_ctx: IGNORED
    num_keep: IGNORED
    num_batch: IGNORED
    num_gpu: IGNORED
    main_gpu: IGNORED
    num_thread: IGNORED
    use_mmap: IGNORED


class OllamaFunction(Body):
    name: str
    arguments: JsonObject


class OllamaCall(Tolerant):
    function: OllamaFunction


class OllamaMessage(Tolerant):
    """thinking: what the model thought before it answered"""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], FIRST] | None = None
    tool_name: str | None = None
    images: Annotated[list[Any], Field(max_length=0), FIRST] | None = None


class OllamaBody(Body):
    """What chats and generated texts share. format: "json", or a schema; think: whether, or how
    much
    """

    model: str | None = None
    stream: bool | None = None
    format: Literal["", "json"] | JsonObject | None = None
    options: OllamaOptions | None = None
    think: bool | str | None = None
    keep_alive: str | float | None = None


class OllamaChatBody(OllamaBody):
    messages: Annotated[list[OllamaMessage], FIRST]
    tools: Annotated[list[Tool], Field(max_length=256), FIRST] | None = None


class OllamaGenerateBody(OllamaBody):
    """raw: the prompt is continued, without the chat template"""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    images: Annotated[list[Any], Field(max_length=0), FIRST] | None = None
    suffix: Literal[""] | None = None


class ShowBody(Tolerant):
    model: str | None = None
    name: str | None = None


OLLAMA_BODIES: tuple[type[Body], ...] = (
    *(OllamaOptions, OllamaFunction, OllamaCall, OllamaMessage),
    *(OllamaChatBody, OllamaGenerateBody, ShowBody),
)
