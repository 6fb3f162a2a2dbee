"""Answers requests with one generator, as a batch of as many as it has room for."""

from collections.abc import Generator as Coroutine
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from speq.engine.batch import Batch, StepOutput
from speq.engine.request import Request
from speq.errors import SpeqError
from speq.offline.answer_line import AnswerLine
from speq.offline.line_format import LineRequest
from speq.offline.line_reader import LineReader, is_machine_failure
from speq.offline.request_file import RequestLine


@dataclass(slots=True)
class BatchAnswerer:
    """reader: reads requests for the generator that answers them"""

    reader: LineReader
    _pending: dict[Request, tuple[RequestLine, LineRequest]] = field(default_factory=dict)

    def answers(self, lines: Iterable[RequestLine]) -> Coroutine[list[AnswerLine], None, None]:
        """What each step has brought; requests join as others leave.

        Raises SpeqError where the machine fails: requests that ran have no answer.
        """
        waiting, generator = iter(lines), self.reader.generator
        with generator.batch() as batch:
            while True:
                made: list[AnswerLine] = []
                line = None if batch.waiting else next(waiting, None)
                if line is not None:
                    made += self._add(batch, line)
                elif batch.idle:
                    return
                if not batch.idle:
                    for output in batch.step(generator.fixed_draft_length):
                        made += self._take(output)
                if made:
                    yield made

    def _add(self, batch: Batch, line: RequestLine) -> Iterator[AnswerLine]:
        """Have a request join; its answer where it is refused."""
        asked = self.reader.read(line)
        if isinstance(asked, AnswerLine):
            yield asked
            return
        try:
            batch.add(asked.request)
        except SpeqError as error:
            yield self.reader.failure(line, error)
        else:
            self._pending[asked.request] = line, asked

    def _take(self, output: StepOutput) -> Iterator[AnswerLine]:
        request, error = output.request, output.error
        line, asked = self._pending[request]
        if error is not None:
            if not isinstance(error, SpeqError) or is_machine_failure(error):
                raise error
            del self._pending[request]
            yield self.reader.failure(line, error)
            return
        asked.add_tokens(output.tokens)
        if request.finish_reason is not None:
            del self._pending[request]
            yield asked.answer(request.figures)
