"""Texts side by side, in a thread of their own; other requests wait until there is room."""

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Protocol, cast

from transformers import GenerationConfig

from speq.batching import Emitted, Request
from speq.decode.sequence import Sequence as Text
from speq.devices.failures import of_the_device
from speq.errors import EngineLost, SpeqError
from speq.generator import Token, tokens_of
from speq.options.typed import SamplingOptions
from speq.server.engine_worker import (
    End,
    EngineFailed,
    EngineRequest,
    QueueFull,
    Unavailable,
    WorkerStats,
)
from speq.server.token_stream import TokenStream
from speq.stats import Origin
from speq.text.prompts import Prompt
from speq.units import Clock

logger = logging.getLogger("speq")

# Reasons to finish, beside "eos", "length" and "stop".
STOPPED, FAILED = "stopped", "failed"
# How often it is looked, while there is nothing to do, whether something could be done.
CHECK_S = 5.0
# Bounds of what clients are told to wait for.
RETRY_AFTER_S = (1.0, 60.0)
CLOSING = "the server is ending; ask again when it is back"


class Batch(Protocol):
    """Runs texts side by side: `speq.batching.Batch`, or what shows what it does."""

    @property
    def idle(self) -> bool: ...
    @property
    def cached_share(self) -> float: ...
    def takes(self, context: int) -> bool: ...
    def add(self, sequence: Text, given_s: float | None = None) -> Request: ...
    def drop(self, request: Request) -> None: ...
    def step(
        self,
        draft_length: int | None = None,
        progress: Callable[[Request, int, int], None] | None = None,
    ) -> list[Emitted]: ...


class Engine(Protocol):
    """Generates: `speq.Generator`, or what does as it does."""

    @property
    def max_batch(self) -> int: ...
    @property
    def fixed_draft_length(self) -> int | None: ...
    def batch(self) -> AbstractContextManager[Batch]: ...
    def check_alive(self) -> None:
        """Raise EngineLost where nothing more can be generated."""

    def prepare(
        self,
        prompt: Prompt,
        config: GenerationConfig | None,
        options: SamplingOptions,
        top_logprobs: int | None = None,
    ) -> Text: ...


class Observer(Protocol):
    """Counts requests: `speq.dashboard.live.metrics.Metrics`."""

    def waiting(self, requests: int) -> None: ...
    def begun(self, queued_s: float) -> None: ...
    def prompted(self, prompt_tokens: int, cached_tokens: int, ttft_s: float) -> None: ...
    def cached(self, share: float) -> None:
        """Of the room in KV caches, what texts under way take."""

    def ended(self, reason: str) -> None:
        """reason: "eos", "length", "stop", "stopped" or "failed"."""


class Viewer(Protocol):
    """Sees texts come, in the engine's thread: `speq.server.watched.Watched`."""

    def begun(self, stream: TokenStream) -> None: ...
    def reading(self, stream: TokenStream, done: int, total: int) -> None:
        """So many tokens of its prompt were run."""

    def told(self, stream: TokenStream, tokens: list[Token], origins: list[Origin]) -> None: ...
    def ended(self, stream: TokenStream, end: End | SpeqError) -> None: ...


class Cancelled(Exception):
    """Ends a prompt that nobody waits for any more."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A request that is run since `start_s`, for which it had waited `queued_s`."""

    stream: TokenStream
    start_s: float
    queued_s: float


class BatchWorker:
    """An `EngineWorker` over one generator, whose `max_batch` says how many requests run together.

    viewers  see all texts
    clock    gives seconds
    """

    def __init__(
        self,
        engine: Engine,
        observer: Observer,
        max_waiting: int,
        viewers: Sequence[Viewer] = (),
        clock: Clock = time.perf_counter,
    ) -> None:
        self.failure: str | None = None
        self.capacity = max_waiting + engine.max_batch
        self._engine, self._observer, self._clock = engine, observer, clock
        self._viewers = viewers
        self._changed = threading.Condition()
        self._waiting: deque[TokenStream] = deque()
        self._taken: list[UnderWay] = []
        self._requests: dict[Request, UnderWay] = {}  # of those taken, once they have joined
        self._draining = self._aborting = False
        self._took_s = 0.0  # the request that ended last
        self._thread = threading.Thread(target=self._work, name="speq-engine")
        self._thread.start()

    # --- the event loop's side ---

    def submit(self, request: EngineRequest) -> TokenStream:
        with self._changed:
            self._check_open()
            ahead = len(self._waiting) + len(self._taken)
            if ahead >= self.capacity:
                raise QueueFull(
                    f"{ahead} requests are under way or waiting, and no more are taken; ask again "
                    "later",
                    self._retry_after_s(ahead),
                )
            stream = TokenStream(request, self._clock())
            self._waiting.append(stream)
            self._told()
        return stream

    def cancel(self, stream: TokenStream) -> None:
        stream.cancelled = True
        with self._changed, contextlib.suppress(ValueError):
            self._waiting.remove(stream)
            stream.finish(End(STOPPED))
            self._told()

    def stats(self) -> WorkerStats:
        with self._changed:
            return WorkerStats(len(self._taken), len(self._waiting))

    def drain(self) -> None:
        with self._changed:
            self._draining = True
            self._send_home(CLOSING)

    def abort(self) -> None:
        self._aborting = True
        self.drain()

    def close(self) -> None:
        self.abort()
        self._thread.join()

    def _check_open(self) -> None:
        if self.failure is not None:
            raise Unavailable(self.failure)
        if self._draining:
            raise Unavailable(CLOSING)

    def _retry_after_s(self, ahead: int) -> int:
        """As long as those ahead may take, if they take as long as the last one."""
        least, most = RETRY_AFTER_S
        expected_s = ahead * self._took_s / self._engine.max_batch
        return math.ceil(min(max(expected_s, least), most))

    def _send_home(self, sentence: str) -> None:
        while self._waiting:
            self._waiting.popleft().fail(Unavailable(sentence))
        self._told()

    def _told(self) -> None:
        self._observer.waiting(len(self._waiting))
        self._changed.notify_all()

    # --- the engine's thread ---

    def _work(self) -> None:
        try:
            while (first := self._next()) is not None:
                self._run(first)
        except BaseException as error:
            logger.exception("the engine died")
            self._die(f"the engine died ({type(error).__name__}); its log has more")

    def _next(self) -> UnderWay | None:
        """The request that a batch begins with; None where there will be none."""
        while True:
            # Who waits may be cancelled before it is taken.
            if self._awaited() and (taken := self._take(lambda context: True)) is not None:
                return taken
            if self._draining or self.failure is not None:
                return None
            self._look_alive()

    def _look_alive(self) -> None:
        try:
            self._engine.check_alive()
        except SpeqError as error:
            self._die(str(error))

    def _awaited(self) -> bool:
        """Whether a request waits, or comes before the engine has been idle for long."""
        with self._changed:
            if not self._waiting and not self._draining and self.failure is None:
                self._changed.wait(CHECK_S)
            return bool(self._waiting)

    def _take(self, takes: Callable[[int], bool]) -> UnderWay | None:
        """The request that has waited longest, if a batch takes it."""
        with self._changed:
            if not self._waiting or not takes(self._waiting[0].request.context):
                return None
            stream, start_s = self._waiting.popleft(), self._clock()
            taken = UnderWay(stream, start_s, start_s - stream.asked_s)
            self._taken.append(taken)
            self._told()
        self._observer.begun(taken.queued_s)
        for viewer in self._viewers:
            viewer.begun(stream)
        return taken

    def _run(self, first: UnderWay) -> None:
        """Run a batch from its first text until none is left."""
        try:
            with self._engine.batch() as batch:
                self._join(batch, first)
                while not batch.idle and self.failure is None:
                    emitted = batch.step(self._engine.fixed_draft_length, self._read)
                    self._let_go(batch)
                    self._observer.cached(batch.cached_share)
                    for each in emitted:
                        self._tell(each)
                    # Who comes when all have left begins another batch, with records of its own.
                    while not batch.idle and (taken := self._take(batch.takes)) is not None:
                        self._join(batch, taken)
        except Cancelled:
            self._stop(self._taken[0])
        except SpeqError as error:
            self._fail(error)
        finally:
            self._observer.cached(0.0)

    def _join(self, batch: Batch, taken: UnderWay) -> None:
        """Have a request join, if the engine can hold it."""
        stream = taken.stream
        asked = stream.request
        try:
            options = cast(SamplingOptions, asdict(asked.sampling))
            sequence = self._engine.prepare(asked.prompt, None, options, asked.top_logprobs)
            sequence.owner = asked.owner
            self._requests[batch.add(sequence, stream.asked_s)] = taken
        except SpeqError as error:
            self._end(taken, error)

    def _unwanted(self, taken: UnderWay) -> bool:
        return taken.stream.cancelled or self._aborting

    def _read(self, request: Request, done: int, total: int) -> None:
        """A part of a prompt was run. A chunk that nobody waits for ends there, where it takes no
        other text's entries with it.
        """
        taken = self._requests[request]
        if len(self._taken) == 1 and self._unwanted(taken):
            raise Cancelled
        for viewer in self._viewers:
            viewer.reading(taken.stream, done, total)

    def _tell(self, emitted: Emitted) -> None:
        request, sequence = emitted.request, emitted.request.sequence
        taken = self._requests.get(request)
        if taken is None:  # it was let go, or the device was lost
            return
        if emitted.error is not None:
            self._end(taken, failed(emitted.error))
            return
        if emitted.origins[:1] == ["prompt"]:
            ttft_s = request.first_s - request.given_s
            self._observer.prompted(len(sequence.prompt_ids), request.cached, ttft_s)
        tokens = tokens_of(sequence, emitted.token_ids)
        for token in tokens:
            taken.stream.put(token)
        for viewer in self._viewers:
            viewer.told(taken.stream, tokens, emitted.origins)
        if sequence.finish_reason is not None:
            self._end(taken, End(sequence.finish_reason, request.figures, taken.queued_s))

    def _let_go(self, batch: Batch) -> None:
        """Of texts that nobody wants any more."""
        for request, taken in [*self._requests.items()]:
            if self._unwanted(taken):
                batch.drop(request)
                self._stop(taken)

    def _stop(self, taken: UnderWay) -> None:
        self._end(taken, End(STOPPED, queued_s=taken.queued_s))

    def _end(self, taken: UnderWay, end: End | SpeqError) -> None:
        """A request is over, with an error or without."""
        with self._changed:
            self._taken.remove(taken)
        self._requests = {key: each for key, each in self._requests.items() if each is not taken}
        self._took_s = self._clock() - taken.start_s
        self._observer.ended(end.finish_reason if isinstance(end, End) else FAILED)
        for viewer in self._viewers:
            viewer.ended(taken.stream, end)
        if isinstance(end, SpeqError):
            # Before its client hears of it, who may ask again at once.
            if is_the_end(end.__cause__):
                self._die(str(end))
            taken.stream.fail(end)
        elif self._aborting and end.finish_reason == STOPPED:
            taken.stream.fail(Unavailable(CLOSING))
        else:
            taken.stream.finish(end)

    def _fail(self, error: SpeqError) -> None:
        """All that was under way is lost."""
        while self._taken:
            self._end(self._taken[0], failed(error))

    def _die(self, sentence: str) -> None:
        logger.error("no more requests are taken: %s", sentence)
        with self._changed:
            self.failure = self.failure or sentence
            self._send_home(sentence)
        while self._taken:
            self._end(self._taken[0], Unavailable(sentence))


def failed(error: Exception) -> EngineFailed:
    """That the engine can hold the request is known, so it is not the request's fault."""
    made = EngineFailed(str(error))
    made.__cause__ = error if isinstance(error, EngineLost) else error.__cause__
    return made


def is_the_end(cause: BaseException | None) -> bool:
    """Whether whoever asks after a failure of this cause fails as well."""
    lost_device = isinstance(cause, RuntimeError) and of_the_device(cause)
    return lost_device or isinstance(cause, EngineLost)
