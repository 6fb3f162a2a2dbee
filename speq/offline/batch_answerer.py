"""Answers requests with one generator, as many side by side as it has room for."""

from collections.abc import Generator as Coroutine
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from speq.config import SamplingParams
from speq.engine.batch import Batch, Request, StepOutput
from speq.errors import EngineLost, SpeqError
from speq.files.json_file import parse_json
from speq.generator import Generator
from speq.offline.answer import Answer
from speq.offline.form import Form, OfflineRequest, PlainForm
from speq.offline.request_file import RequestLine

# What only requests in OpenAI's form have.
OPENAI_FIELDS = frozenset({"method", "url", "body"})


@dataclass(slots=True)
class PendingAnswer:
    """A request that the engine has. given: what stood in its line."""

    line: RequestLine
    given: dict[str, Any]
    form: Form
    asked: OfflineRequest


@dataclass(slots=True)
class BatchAnswerer:
    """name: what requests in OpenAI's form call the model."""

    generator: Generator
    sampling: SamplingParams
    name: str
    _plain: Form = field(init=False)
    _openai: Form | None = None
    _pending: dict[Request, PendingAnswer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._plain = PlainForm(self.generator, self.sampling)

    def answers(self, lines: Iterable[RequestLine]) -> Coroutine[list[Answer], None, None]:
        """What each step has brought; requests join as others leave.

        Raises SpeqError where the machine fails: what was under way has no answer.
        """
        waiting = iter(lines)
        with self.generator.batch() as batch:
            while True:
                made: list[Answer] = []
                line = None if batch.waiting else next(waiting, None)
                if line is not None:
                    made += self._add(batch, line)
                elif batch.idle:
                    return
                if not batch.idle:
                    for output in batch.step(self.generator.fixed_draft_length):
                        made += self._take(output)
                if made:
                    yield made

    def _add(self, batch: Batch, line: RequestLine) -> Iterator[Answer]:
        """Have a request join; its answer where it failed at once."""
        given: dict[str, Any] = {}
        form = self._plain
        try:
            given = object_of(line)
            form = self._form_of(given)
            asked = form.read_request(line, given)
            request = batch.add(asked.request)
        except SpeqError as error:
            yield form.failure(line, given, error)
        else:
            self._pending[request] = PendingAnswer(line, given, form, asked)

    def _form_of(self, given: dict[str, Any]) -> Form:
        if not OPENAI_FIELDS & given.keys():
            return self._plain
        if self._openai is None:
            from speq.server.needed import check_serve

            check_serve(("pydantic",))
            from speq.offline.openai_form import OpenAIForm

            self._openai = OpenAIForm(self.generator, self.sampling, self.name)
        return self._openai

    def _take(self, output: StepOutput) -> Iterator[Answer]:
        request, error = output.request, output.error
        pending = self._pending[request]
        if error is not None:
            if not isinstance(error, SpeqError) or is_machine_failure(error):
                raise error
            del self._pending[request]
            yield pending.form.failure(pending.line, pending.given, error)
            return
        pending.asked.add_tokens(output.tokens)
        if request.finish_reason is not None:
            del self._pending[request]
            yield pending.asked.answer(request.figures)


def is_machine_failure(error: SpeqError) -> bool:
    """Whether another request would fail as well: a disk, a device, memory or a stage of the model
    is what failed.
    """
    return isinstance(error, EngineLost) or isinstance(
        error.__cause__, OSError | MemoryError | RuntimeError
    )


def object_of(line: RequestLine) -> dict[str, Any]:
    """Raises SpeqError for a line that holds no object."""
    try:
        given = parse_json(line.content)
    except ValueError as error:
        raise SpeqError(f"line {line.line} is no JSON: {error}; give an object") from error
    if not isinstance(given, dict):
        raise SpeqError(f"line {line.line} holds a JSON {type(given).__name__}; give an object")
    return given
