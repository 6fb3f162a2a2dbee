"""An answerer without a model: it answers each request with the request, out of order."""

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from speq.offline.answer_line import AnswerLine
from speq.offline.request_file import RequestLine


def content_of(line: RequestLine) -> dict[str, Any]:
    return {"line": line.line, "text": line.content.decode()}


@dataclass
class ScriptedAnswerer:
    """Answers groups of requests, the last of each first; fails those that begin with "bad".

    asked  numbers of the requests that it was given
    """

    group: int = 3
    asked: list[int] = field(default_factory=list)

    def answers(self, lines: Iterable[RequestLine]) -> Generator[list[AnswerLine], None, None]:
        waiting = iter(lines)
        while group := list(islice(waiting, self.group)):
            self.asked += [line.number for line in group]
            yield [
                AnswerLine(line.number, {"line": line.line, "error": "it is bad"}, "it is bad")
                if line.content.startswith(b"bad")
                else AnswerLine(line.number, content_of(line), None, 2, 5)
                for line in reversed(group)
            ]
