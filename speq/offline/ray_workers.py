"""Workers that are Ray actors: each holds a generator, on whatever machine Ray puts it."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from speq.config import RunConfig, SamplingParams
from speq.errors import SpeqError
from speq.generator import Generator
from speq.offline.answer import Answer
from speq.offline.batch_answerer import BatchAnswerer
from speq.offline.in_blocks import News
from speq.offline.request_file import RequestLine
from speq.ray.settings import RaySettings


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is made of. name: what requests in OpenAI's form call the model."""

    model: str
    name: str
    run: RunConfig
    sampling: SamplingParams


@dataclass(slots=True)
class Answering:
    """The actor. It loads the model with its first block, so that a failure is that block's."""

    spec: WorkerSpec
    _answerer: BatchAnswerer | None = None

    def answer(self, lines: list[RequestLine]) -> Iterator[list[Answer] | str]:
        """Answers as they come; a sentence at the end where the machine fails."""
        try:
            if self._answerer is None:
                spec = self.spec
                generator = Generator.load(spec.model, spec.run)
                self._answerer = BatchAnswerer(generator, spec.sampling, spec.name)
            yield from self._answerer.answers(lines)
        except SpeqError as error:
            yield str(error)


@dataclass(slots=True)
class RayWorkers:
    """Actors on a cluster that we are connected to. One that is lost is made anew."""

    spec: WorkerSpec
    settings: RaySettings
    _idle: deque[Any] = field(default_factory=deque)
    _busy: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    _given: int = 0

    def __post_init__(self) -> None:
        self._idle.extend(self._made() for _ in range(self.settings.replicas))

    def _made(self) -> Any:
        import ray

        settings = self.settings
        actor = ray.remote(num_cpus=settings.cpus, num_gpus=settings.replica_gpus)(Answering)
        return actor.remote(self.spec)

    @property
    def idle(self) -> bool:
        return bool(self._idle)

    def give(self, lines: list[RequestLine]) -> int:
        actor = self._idle.popleft()
        self._given += 1
        stream = actor.answer.options(num_returns="streaming").remote(lines)
        self._busy[self._given] = actor, stream
        return self._given

    def wait(self) -> News:
        import ray
        from ray.exceptions import RayError, RayTaskError

        streams = {stream: number for number, (_, stream) in self._busy.items()}
        (ready,), _ = ray.wait([*streams], num_returns=1)
        number = streams[ready]
        actor, stream = self._busy[number]
        try:
            news = ray.get(next(stream))
        except StopIteration:
            del self._busy[number]
            self._idle.append(actor)
            return News(number, ended=True)
        except RayTaskError:
            raise  # a fault of ours
        except RayError as error:
            del self._busy[number]
            self._idle.append(self._made())
            return News(number, lost=str(error).strip().partition("\n")[0].rstrip("."))
        if isinstance(news, str):
            raise SpeqError(news)
        return News(number, news)
