"""Errors as OpenAI's API has them: {"error": {"message", "type", "param", "code"}}."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from speq.engine.token_stream import EngineFailed, QueueFull, Unavailable
from speq.errors import SpeqError
from speq.server.field_names import FIELD_NAMES
from speq.server.fields import Body

INVALID, SERVER, RATE = "invalid_request_error", "server_error", "rate_limit_error"


@dataclass
class ApiError(Exception):
    """What a client is told.

    status   of HTTP
    message  a sentence
    param    the field that is at fault
    code     a word for programs
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def type(self) -> str:
        return SERVER if self.status >= 500 else RATE if self.status == 429 else INVALID

    @property
    def content(self) -> dict[str, Any]:
        told = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": told}

    @property
    def body(self) -> bytes:
        return json.dumps(self.content).encode()


def error_of(error: SpeqError) -> ApiError:
    """What a client is told of an error of ours."""
    sentence = str(error)
    if isinstance(error, QueueFull):
        headers = {"retry-after": str(error.retry_after_s)}
        return ApiError(429, sentence, code=error.code, headers=headers)
    if isinstance(error, Unavailable):
        return ApiError(503, sentence, code=error.code, headers={"retry-after": "1"})
    if isinstance(error, EngineFailed):
        return ApiError(500, sentence, code=error.code)
    # Sentences about an option begin with its name.
    first = sentence.partition(" ")[0]
    return ApiError(400, sentence, param=first if first in FIELD_NAMES else None)


AnyBody = TypeVar("AnyBody", bound=Body)


def validated(kind: type[AnyBody], given: Any) -> AnyBody:
    """A body of that kind. Raises ApiError for what is none."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        faults = error.errors(include_url=False)
    raise error_of_fields(faults)


def error_of_fields(faults: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of the faults that pydantic found in a body. Where a field may be of several kinds,
    the kind that fits furthest counts.
    """
    first = location_of(faults[0])[:1]
    fault = max(
        (f for f in faults if location_of(f)[:1] == first), key=lambda f: len(location_of(f))
    )
    name = field_path(location_of(fault))
    if not name:
        return ApiError(400, "the body is no object of fields; send one as JSON")
    if fault["type"] == UNKNOWN:
        return ApiError(
            400, f"{name} is not supported here; leave it out", name, "unsupported_parameter"
        )
    if fault["type"] == MISSING:
        return ApiError(400, f"{name} is missing; give it", name, "missing_required_parameter")
    wanted = fault["msg"].replace("Input should", "it must")
    shown = reprlib.repr(fault.get("input"))
    return ApiError(
        400, f"{name} is {shown}, which is not supported: {wanted}", name, "invalid_value"
    )


# Kinds of faults that pydantic puts at the name of the field itself.
UNKNOWN, MISSING = "extra_forbidden", "missing"


def location_of(fault: Mapping[str, Any]) -> list[str | int]:
    """The place of a fault: names of fields and numbers, without names of types."""
    location = list(fault["loc"])
    behind = location[1:] if location[:1] == ["body"] else location
    last = [behind.pop()] if behind and fault["type"] in (UNKNOWN, MISSING) else []
    return [part for part in behind if isinstance(part, int) or part in FIELD_NAMES] + last


def field_path(parts: Sequence[str | int]) -> str:
    """The name of a field as clients write it: messages[0].content."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)[:80]
    return text
