"""The one thread that runs requests, as a batch; others wait until there is room."""

import contextlib
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from speq.devices.failures import is_device_error
from speq.engine.batch import Batch, StepOutput
from speq.engine.request import Cancelled, Request, Token
from speq.engine.token_stream import End, EngineFailed, QueueFull, TokenStream, Unavailable
from speq.errors import EngineLost, SpeqError
from speq.stats import Origin
from speq.units import Clock

logger = logging.getLogger("speq")

# Reasons to finish, beside "eos", "length" and "stop".
STOPPED, FAILED = "stopped", "failed"
# How often an idle engine is checked.
CHECK_S = 5.0
# Bounds of what clients are told to wait for.
RETRY_AFTER_S = (1.0, 60.0)
CLOSING = "the server is ending; ask again when it is back"


class BatchEngine(Protocol):
    """Generates: `speq.Generator`, or what does as it does."""

    @property
    def max_batch(self) -> int: ...
    @property
    def fixed_draft_length(self) -> int | None: ...
    def batch(self) -> AbstractContextManager[Batch]: ...
    def check_alive(self) -> None:
        """Raise EngineLost where nothing more can be generated."""


class Observer:
    """Hears of requests, in the engine's thread if nothing else is said. This one does nothing."""

    def on_queue(self, waiting: int) -> None:
        """So many requests wait; in any thread."""

    def on_start(self, stream: TokenStream) -> None:
        """A batch has taken a request."""

    def on_prefill(self, stream: TokenStream, done: int, total: int) -> None:
        """So many tokens of its prompt were run."""

    def on_tokens(self, stream: TokenStream, tokens: list[Token], origins: list[Origin]) -> None:
        """Tokens have come; where the first of a request are, their origin is "prompt"."""

    def on_cache(self, share: float) -> None:
        """Running requests use this share of KV-cache capacity."""

    def on_end(self, stream: TokenStream, end: End | SpeqError) -> None:
        """A request that a batch had taken is over."""


@dataclass(frozen=True, slots=True)
class QueueLengths:
    """running, waiting: requests that a batch has, and those that wait."""

    running: int
    waiting: int


class EngineThread:
    """Runs requests over one engine, whose `max_batch` says how many run together.

    All methods but `close` are called in event loops, and none of these waits.

    max_waiting  requests that may wait; None: any number
    observers    hear of all requests
    closing      why a request is refused, or ended, after `drain` or `abort`
    clock        gives seconds
    """

    def __init__(
        self,
        engine: BatchEngine,
        observers: Sequence[Observer] = (),
        max_waiting: int | None = None,
        closing: str = CLOSING,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.failure: str | None = None
        self.capacity = sys.maxsize if max_waiting is None else max_waiting + engine.max_batch
        self._engine, self._observers, self._clock = engine, observers, clock
        self._closing = closing
        self._changed = threading.Condition()
        self._waiting: deque[TokenStream] = deque()
        self._taken: list[TokenStream] = []
        self._streams: dict[Request, TokenStream] = {}  # of those taken, once they have joined
        self._draining = self._aborting = False
        self._took_s = 0.0  # the request that ended last
        self._thread = threading.Thread(target=self._work, name="speq-engine", daemon=True)
        self._thread.start()

    # --- the event loop's side ---

    def submit(self, request: Request) -> TokenStream:
        """Generate for a request as soon as there is room.

        Raises QueueFull and Unavailable. The stream raises these, EngineFailed, and SpeqError for
        a request that the engine cannot take.
        """
        (stream,) = self.submit_all([request])
        return stream

    def submit_all(self, requests: Sequence[Request]) -> list[TokenStream]:
        """Do as `submit` for requests that one client asks for at once: all are taken, or none."""
        with self._changed:
            self._check_open()
            ahead = len(self._waiting) + len(self._taken)
            if ahead >= self.capacity:
                raise QueueFull(
                    f"{ahead} requests are running or waiting, and no more are taken; ask again "
                    "later",
                    self._retry_after_s(ahead),
                )
            streams = [TokenStream(request, self._clock()) for request in requests]
            self._waiting += streams
            self._report_waiting()
        return streams

    def cancel(self, stream: TokenStream) -> None:
        """End a stream that nobody reads any more, within a step. One that has ended stays so."""
        stream.cancelled = True
        with self._changed, contextlib.suppress(ValueError):
            self._waiting.remove(stream)
            stream.finish(End(STOPPED))
            self._report_waiting()

    @property
    def queue_lengths(self) -> QueueLengths:
        with self._changed:
            return QueueLengths(len(self._taken), len(self._waiting))

    def drain(self) -> None:
        """Take no more requests, and refuse those that wait; those that run continue."""
        with self._changed:
            self._draining = True
            self._refuse_waiting(self._closing)

    def abort(self) -> None:
        """Drain, and end running requests too: their streams raise Unavailable."""
        self._aborting = True
        self.drain()

    def close(self) -> None:
        """End all requests and the thread."""
        self.abort()
        self._thread.join()

    def _check_open(self) -> None:
        if self.failure is not None:
            raise Unavailable(self.failure)
        if self._draining:
            raise Unavailable(self._closing)

    def _retry_after_s(self, ahead: int) -> int:
        """Estimate the wait for the requests ahead, if each takes as long as the last one."""
        least, most = RETRY_AFTER_S
        expected_s = ahead * self._took_s / self._engine.max_batch
        return math.ceil(min(max(expected_s, least), most))

    def _refuse_waiting(self, sentence: str) -> None:
        while self._waiting:
            self._waiting.popleft().fail(Unavailable(sentence))
        self._report_waiting()

    def _report_waiting(self) -> None:
        for ahead, stream in enumerate(self._waiting, start=len(self._taken)):
            stream.ahead = ahead
        for observer in self._observers:
            observer.on_queue(len(self._waiting))
        self._changed.notify_all()

    # --- the engine's thread ---

    def _work(self) -> None:
        try:
            while (first := self._next()) is not None:
                self._run(first)
        except BaseException as error:
            logger.exception("the engine died")
            self._die(f"the engine died ({type(error).__name__}); its log has more")

    def _next(self) -> TokenStream | None:
        """The request that a batch begins with; None where there will be none."""
        while True:
            # A waiting request may be cancelled before it is taken.
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
        """Wait briefly for a request; return whether one is waiting."""
        with self._changed:
            if not self._waiting and not self._draining and self.failure is None:
                self._changed.wait(CHECK_S)
            return bool(self._waiting)

    def _take(self, has_room: Callable[[int], bool]) -> TokenStream | None:
        """The request that has waited longest, if a batch has room for it."""
        with self._changed:
            if not self._waiting or not has_room(self._waiting[0].request.context):
                return None
            stream = self._waiting.popleft()
            stream.start_s, stream.ahead = self._clock(), 0
            self._taken.append(stream)
            self._report_waiting()
        for observer in self._observers:
            observer.on_start(stream)
        return stream

    def _run(self, first: TokenStream) -> None:
        """Run a batch from its first request until none is left."""
        try:
            with self._engine.batch() as batch:
                self._join(batch, first)
                while not batch.idle and self.failure is None:
                    outputs = batch.step(self._engine.fixed_draft_length, self._show_prefill)
                    self._drop_unwanted(batch)
                    self._report_cache(batch.cached_share)
                    for output in outputs:
                        self._deliver(output)
                    # A request that comes when all have left begins a batch with its own records.
                    while not batch.idle and (taken := self._take(batch.has_room)) is not None:
                        self._join(batch, taken)
        except SpeqError as error:
            self._fail(error)
        finally:
            self._report_cache(0.0)

    def _report_cache(self, share: float) -> None:
        for observer in self._observers:
            observer.on_cache(share)

    def _join(self, batch: Batch, stream: TokenStream) -> None:
        """Have a request join, if the engine can hold it."""
        try:
            batch.add(stream.request, stream.arrival_s)
        except SpeqError as error:
            self._end(stream, error)
        else:
            self._streams[stream.request] = stream

    def _unwanted(self, stream: TokenStream) -> bool:
        return stream.cancelled or self._aborting

    def _show_prefill(self, request: Request, done: int, total: int) -> None:
        """A part of a prompt was run. A chunk that nobody waits for ends there."""
        stream = self._streams[request]
        if self._unwanted(stream):
            raise Cancelled
        stream.prefilled = request.metrics.cached_tokens + done
        for observer in self._observers:
            observer.on_prefill(stream, done, total)

    def _deliver(self, output: StepOutput) -> None:
        request = output.request
        stream = self._streams.get(request)
        if stream is None:  # it was dropped, or the device was lost
            return
        if output.error is not None:
            self._end(stream, failure_of(output.error))
            return
        stream.put(output.tokens)
        for observer in self._observers:
            observer.on_tokens(stream, output.tokens, output.origins)
        if request.finish_reason is not None:
            self._end(stream, End(request.finish_reason, request.figures, stream.queued_s))

    def _drop_unwanted(self, batch: Batch) -> None:
        for request, stream in [*self._streams.items()]:
            if self._unwanted(stream):
                batch.drop(request)
                self._stop(stream)

    def _stop(self, stream: TokenStream) -> None:
        self._end(stream, End(STOPPED, queued_s=stream.queued_s))

    def _end(self, stream: TokenStream, end: End | SpeqError) -> None:
        """A request is over, with an error or without."""
        with self._changed:
            self._taken.remove(stream)
        self._streams.pop(stream.request, None)
        self._took_s = self._clock() - stream.start_s
        for observer in self._observers:
            observer.on_end(stream, end)
        if isinstance(end, SpeqError):
            # Before its client hears of it, which may ask again at once.
            if is_fatal(end.__cause__):
                self._die(str(end))
            stream.fail(end)
        elif self._aborting and end.finish_reason == STOPPED:
            stream.fail(Unavailable(self._closing))
        else:
            stream.finish(end)

    def _fail(self, error: SpeqError) -> None:
        """All that ran is lost."""
        while self._taken:
            self._end(self._taken[0], failure_of(error))

    def _die(self, sentence: str) -> None:
        logger.error("no more requests are taken: %s", sentence)
        with self._changed:
            self.failure = self.failure or sentence
            self._refuse_waiting(sentence)
        while self._taken:
            self._end(self._taken[0], Unavailable(sentence))


def failure_of(error: Exception) -> EngineFailed:
    """An error of the engine at a request that it was able to hold."""
    made = EngineFailed(str(error))
    made.__cause__ = error if isinstance(error, EngineLost) else error.__cause__
    return made


def is_fatal(cause: BaseException | None) -> bool:
    """Tell whether all requests after a failure of this cause fail too."""
    lost_device = isinstance(cause, RuntimeError) and is_device_error(cause)
    return lost_device or isinstance(cause, EngineLost)
