"""One sequence at a time, in a thread of its own; other requests wait for their turn."""

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import asdict
from typing import Any, Protocol, Unpack

from speq.devices.failures import of_the_device
from speq.errors import SpeqError
from speq.generator import Token
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
from speq.text.prompts import Prompt
from speq.units import Clock, Progress

logger = logging.getLogger("speq")

# Reasons to finish, beside "eos", "length" and "stop".
STOPPED, FAILED = "stopped", "failed"
# Bounds of what clients are told to wait for.
RETRY_AFTER_S = (1.0, 60.0)
CLOSING = "the server is ending; ask again when it is back"


class Engine(Protocol):
    """Generates: `speq.Generator`, or what shows what it does."""

    def reserve(self, context: int) -> None:
        """Raises SpeqError where a request of so many tokens does not fit."""

    def stream(
        self,
        prompt: Prompt,
        *,
        on_finish: Callable[[str, dict[str, Any]], None] | None = None,
        progress: Progress | None = None,
        top_logprobs: int | None = None,
        asked_s: float | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Generator[Token, None, None]: ...


class Observer(Protocol):
    """Counts requests: `speq.dashboard.live.metrics.Metrics`."""

    def waiting(self, requests: int) -> None: ...
    def begun(self, queued_s: float) -> None: ...
    def prompted(self, prompt_tokens: int) -> None: ...
    def ended(self, reason: str) -> None:
        """reason: "eos", "length", "stop", "stopped" or "failed"."""


class Cancelled(Exception):
    """Ends a prompt that nobody waits for any more."""


class SingleWorker:
    """An `EngineWorker` over one generator. clock: gives seconds."""

    def __init__(
        self,
        engine: Engine,
        observer: Observer,
        max_waiting: int,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.failure: str | None = None
        self._engine, self._observer, self._clock = engine, observer, clock
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[TokenStream] = deque()
        self._running: TokenStream | None = None
        self._draining = self._aborting = False
        self._took_s = 0.0  # the request before
        self._thread = threading.Thread(target=self._work, name="speq-engine")
        self._thread.start()

    # --- the event loop's side ---

    def submit(self, request: EngineRequest) -> TokenStream:
        with self._changed:
            self._check_open()
            ahead = len(self._waiting) + (self._running is not None)
            if ahead > self._max_waiting:
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
            return WorkerStats(int(self._running is not None), len(self._waiting))

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
        """As long as those ahead may take, if they take as long as the one before."""
        least, most = RETRY_AFTER_S
        return math.ceil(min(max(ahead * self._took_s, least), most))

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
            while (stream := self._next()) is not None:
                self._serve(stream)
        except BaseException as error:
            logger.exception("the engine died")
            self._die(f"the engine died ({type(error).__name__}); its log has more")

    def _next(self) -> TokenStream | None:
        """The request whose turn it is; None where there will be none."""
        with self._changed:
            self._running = None
            while not self._waiting:
                if self._draining or self.failure is not None:
                    return None
                self._changed.wait()
            self._running = self._waiting.popleft()
            self._told()
            return self._running

    def _die(self, sentence: str) -> None:
        with self._changed:
            self.failure = sentence
            if self._running is not None:
                self._running.fail(Unavailable(sentence))
                self._running = None
            self._send_home(sentence)

    def _serve(self, stream: TokenStream) -> None:
        """Generate for one request, to the end or as long as somebody reads it."""
        start_s = self._clock()
        queued_s = start_s - stream.asked_s
        self._observer.begun(queued_s)
        reason = FAILED
        try:
            self._engine.reserve(stream.request.context)
            end = self._generate(stream, queued_s)
            reason = end.finish_reason
            if self._aborting and reason == STOPPED:
                stream.fail(Unavailable(CLOSING))
            else:
                stream.finish(end)
        except EngineFailed as error:
            stream.fail(error)
            if isinstance(error.__cause__, RuntimeError) and of_the_device(error.__cause__):
                self._die(str(error))
        except SpeqError as error:
            stream.fail(error)
        finally:
            self._took_s = self._clock() - start_s
            self._observer.ended(reason)

    def _generate(self, stream: TokenStream, queued_s: float) -> End:
        """Raises EngineFailed where the engine does: that it can hold the request is known."""
        request = stream.request
        ends: list[End] = []

        def on_finish(reason: str, stats: dict[str, Any]) -> None:
            ends.append(End(reason, stats, queued_s))

        def progress(what: str, done: int, total: int) -> None:
            if stream.cancelled or self._aborting:
                raise Cancelled

        tokens = self._engine.stream(
            request.prompt,
            on_finish=on_finish,
            progress=progress,
            top_logprobs=request.top_logprobs,
            asked_s=stream.asked_s,
            **asdict(request.sampling),
        )
        try:
            with contextlib.closing(tokens):
                for at, token in enumerate(tokens):
                    if at == 0:
                        self._observer.prompted(len(request.prompt_ids))
                    if stream.cancelled or self._aborting:
                        break
                    stream.put(token)
        except Cancelled:
            pass
        except SpeqError as error:
            raise EngineFailed(str(error)) from error.__cause__
        return ends[0] if ends else End(STOPPED, queued_s=queued_s)
