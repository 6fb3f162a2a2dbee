"""What came of a request of a file."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AnswerLine:
    """A line of the answers.

    number      of the request, from 0
    content     the line's object
    error       why the request failed, in a sentence; None: it did not
    new_tokens  that were generated for it; prompt_tokens: that it begins with
    """

    number: int
    content: dict[str, Any]
    error: str | None = None
    prompt_tokens: int = 0
    new_tokens: int = 0
