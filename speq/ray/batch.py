"""Answers requests of a file with replicas on a Ray cluster."""

import asyncio
import secrets
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from speq.config import SamplingParams
from speq.engine.token_stream import EngineFailed, Unavailable
from speq.errors import PeerError, SpeqError, present
from speq.offline.answer_line import AnswerLine
from speq.offline.line_reader import LineReader, is_machine_failure
from speq.offline.request_file import RequestLine
from speq.ray.replicas import (
    PATIENCE_S,
    Replica,
    ReplicaSpec,
    replica_options,
    run_application,
    running_serve,
)
from speq.ray.settings import RaySettings

# A request that ran at so many losses of replicas is taken for their cause.
MOST_LOSSES = 3
# Requests that a replica has at a time, of each KV slot: those that wait join at once.
QUEUE_DEPTH = 2


class BatchReplica(Replica):
    """A replica that answers lines of files."""

    def __init__(self, spec: ReplicaSpec, sampling: SamplingParams) -> None:
        super().__init__(spec)
        self._reader = LineReader(self._generator, sampling, spec.name)
        self._reading = asyncio.Lock()

    async def answer(self, line: RequestLine) -> AnswerLine | str:
        """The answer of a line; a sentence where the machine fails."""
        async with self._reading:
            asked = await asyncio.to_thread(self._reader.read, line)
        if isinstance(asked, AnswerLine):
            return asked
        stream = None
        try:
            stream = self._served.thread.submit(asked.request)
            async for token in stream:
                asked.add_tokens([token])
        except SpeqError as error:
            failed = isinstance(error, EngineFailed) and is_machine_failure(error)
            if failed or isinstance(error, Unavailable):
                return str(error)
            return self._reader.failure(line, error)
        return asked.answer(present(stream.end, "a stream that is read has no end").stats)


@dataclass(slots=True)
class ReplicaAnswerer:
    """replicas: a handle of `BatchReplica`; most_requests: that they have at a time"""

    replicas: Any
    most_requests: int

    def answers(self, lines: Iterable[RequestLine]) -> Generator[list[AnswerLine], None, None]:
        """Answers as they come. Raises SpeqError where a machine fails, or a request takes too many
        replicas along.
        """
        waiting, tasks = iter(lines), set[asyncio.Task[AnswerLine]]()
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            while True:
                while len(tasks) < self.most_requests and (line := next(waiting, None)):
                    tasks.add(loop.create_task(self._answer(line)))
                if not tasks:
                    return
                done, tasks = runner.run(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
                yield [task.result() for task in done]

    async def _answer(self, line: RequestLine) -> AnswerLine:
        from ray.exceptions import RayError, RayTaskError

        reason = ""
        for _ in range(MOST_LOSSES):
            try:
                answer: AnswerLine | str = await self.replicas.answer.remote(line)
            except RayTaskError:
                raise  # a fault of ours
            except RayError as error:
                reason = str(error).strip().partition("\n")[0].rstrip(".")
                continue
            if isinstance(answer, str):
                raise PeerError(answer)
            return answer
        raise PeerError(
            f"{MOST_LOSSES} replicas were lost while they answered the request in line {line.line} "
            f"({reason}); see whether they have memory enough, and give the command again: answers "
            "so far are kept"
        )


@contextmanager
def answerer_on_ray(
    spec: ReplicaSpec, sampling: SamplingParams, settings: RaySettings
) -> Iterator[ReplicaAnswerer]:
    """Replicas for as long as the block lasts, on a cluster that we are connected to.

    Raises SpeqError where none can be made.
    """
    from ray import serve

    runs = running_serve()
    if runs is None:
        serve.start(proxy_location="Disabled")
    depth = QUEUE_DEPTH * spec.run.max_batch
    options = replica_options(settings) | {
        "max_ongoing_requests": depth,
        "num_replicas": settings.replicas,
        "graceful_shutdown_timeout_s": PATIENCE_S,
    }
    bound = serve.deployment(BatchReplica).options(**options).bind(spec, sampling)
    name = f"speq-batch-{secrets.token_hex(4)}"
    with run_application(bound, name, None, ends_serve=runs is None) as replicas:
        yield ReplicaAnswerer(replicas, settings.replicas * depth)
