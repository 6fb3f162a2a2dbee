"""From a line of a file to the request in it, in whichever format it is written."""

from dataclasses import dataclass, field
from typing import Any

from speq.config import SamplingParams
from speq.errors import EngineLost, OptionError, SpeqError
from speq.files.json_file import parse_json
from speq.generator import Generator
from speq.offline.answer_line import AnswerLine
from speq.offline.line_format import LineFormat, LineRequest, PlainFormat
from speq.offline.request_file import RequestLine

# What only requests in OpenAI's format have.
OPENAI_FIELDS = frozenset({"method", "url", "body"})


@dataclass(slots=True)
class LineReader:
    """Reads requests for one generator. name: what those in OpenAI's format call the model"""

    generator: Generator
    sampling: SamplingParams
    name: str
    _plain: LineFormat = field(init=False)
    _openai: LineFormat | None = None

    def __post_init__(self) -> None:
        self._plain = PlainFormat(self.generator, self.sampling)

    def read(self, line: RequestLine) -> LineRequest | AnswerLine:
        """The request of a line, or its answer where it is refused."""
        given: dict[str, Any] = {}
        format = self._plain
        try:
            given = object_of(line)
            format = self._format_of(given)
            return format.read_request(line, given)
        except SpeqError as error:
            return format.failure(line, given, error)

    def failure(self, line: RequestLine, error: SpeqError) -> AnswerLine:
        """The answer to a request that was read and then failed."""
        given = object_of(line)
        return self._format_of(given).failure(line, given, error)

    def _format_of(self, given: dict[str, Any]) -> LineFormat:
        if not OPENAI_FIELDS & given.keys():
            return self._plain
        if self._openai is None:
            from speq.server.needed import check_serve

            check_serve(("pydantic",))
            from speq.offline.openai_format import OpenAIFormat

            self._openai = OpenAIFormat(self.generator, self.sampling, self.name)
        return self._openai


def is_machine_failure(error: SpeqError) -> bool:
    """Return whether another request would fail as well: a disk, a device, memory or a stage of
    the model is what failed.
    """
    causes = EngineLost | OSError | MemoryError | RuntimeError
    return isinstance(error, EngineLost) or isinstance(error.__cause__, causes)


def object_of(line: RequestLine) -> dict[str, Any]:
    """Raises SpeqError for a line that holds no object."""
    try:
        given = parse_json(line.content)
    except ValueError as error:
        raise OptionError(f"line {line.line} is no JSON: {error}; give an object") from error
    if not isinstance(given, dict):
        raise OptionError(f"line {line.line} holds a JSON {type(given).__name__}; give an object")
    return given
