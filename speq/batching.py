"""Texts that are run side by side: they join between steps, and leave when they end.

A text's tokens do not depend on the others. Who joins waits for a KV cache and for room in it; then
its prompt is run chunk by chunk, between steps of those that are under way.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from speq.decode.engine import Engine, Reading
from speq.decode.sequence import Sequence
from speq.errors import SpeqError
from speq.runtime import Runtime
from speq.stats import ratio


@dataclass(slots=True, eq=False)
class Request:
    """A text to be generated, and what has been measured of it.

    given_s, first_s, last_s  when it was asked for, and when its tokens came
    steps     rounds that it took part in; drafted, accepted: tokens in them
    """

    sequence: Sequence
    given_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def context(self) -> int:
        """Tokens that its KV cache needs room for."""
        return len(self.sequence.prompt_ids) + self.sequence.sampling.max_new_tokens

    @property
    def figures(self) -> dict[str, Any]:
        """Those of `speq.stats.FIGURES` that a text among others has."""
        tokens = len(self.sequence.generated_ids)
        return {
            "new_tokens": tokens,
            "ttft_ms": (self.first_s - self.given_s) * 1e3,
            "tpot_ms": ratio((self.last_s - self.first_s) * 1e3, tokens - 1),
            "steps": self.steps,
            "draft_length_mean": ratio(self.drafted, self.steps),
            "accept_length_mean": ratio(tokens - 1, self.steps),
            "acceptance_rate": ratio(self.accepted, self.drafted),
        }


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a step has brought for a text: tokens, or the error that ended it."""

    request: Request
    token_ids: list[int]
    error: Exception | None = None


@dataclass(slots=True)
class Batch:
    """Requests over one runtime; none of its methods may be called while another one is.

    waiting  for a KV cache, first come, first served
    reading  whose prompt is being run
    running  that take their steps together
    """

    runtime: Runtime
    clock: Callable[[], float] = time.perf_counter
    waiting: deque[Request] = field(default_factory=deque)
    reading: tuple[Request, Reading] | None = None
    running: list[Request] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.reading or self.running)

    @property
    def _joined(self) -> list[Request]:
        """Those that have a KV cache."""
        return self.running if self.reading is None else [*self.running, self.reading[0]]

    def add(self, sequence: Sequence) -> Request:
        """Have a text join as soon as there is room. Raises SpeqError where there never will be."""
        request = Request(sequence, self.clock())
        self.runtime.check(request.context)
        self.waiting.append(request)
        return request

    def drop(self, request: Request) -> None:
        """Let a text go that is no longer wanted, if it has not ended."""
        with suppress(ValueError):
            self.waiting.remove(request)
        if self.reading is not None and self.reading[0] is request:
            self.reading = None
        if request in self.running:
            self.running.remove(request)

    def clear(self) -> list[Request]:
        """Let all texts go; return them."""
        dropped = [*self._joined, *self.waiting]
        self.running.clear()
        self.waiting.clear()
        self.reading = None
        return dropped

    def step(self, draft_length: int | None = None) -> list[Emitted]:
        """Run a chunk of the prompt of who joins, and one round of those under way; what came of
        both, text by text. Texts that have ended have left.

        draft_length  of all texts; None: the governor's
        """
        found: dict[Request, Emitted] = {}
        try:
            for each in (*self._read(), *self._round(draft_length)):
                before = found.get(each.request)
                tokens = each.token_ids if before is None else before.token_ids + each.token_ids
                found[each.request] = Emitted(each.request, tokens, each.error)
        except BaseException:
            self.clear()
            raise
        return [*found.values()]

    def _read(self) -> list[Emitted]:
        if self.reading is None:
            refused = self._admit()
            if self.reading is None:
                return refused
        request, reading = self.reading
        try:
            token_ids = self.runtime.engine.read(reading)
        except SpeqError as error:
            self.reading = None
            return [Emitted(request, [], error), *self._end(self._lost, error)]
        if reading.left:
            return []
        self.reading = None
        self.running.append(request)
        request.first_s = request.last_s = self.clock()
        return [self._emitted(request, token_ids)]

    def _admit(self) -> list[Emitted]:
        """Give the request that has waited longest a KV cache, if there is one that it fits in."""
        if not self.waiting or len(self.running) == self.runtime.config.max_batch:
            return []
        request = self.waiting[0]
        if self.running and not self.runtime.has_room(request.context):
            return []  # memory is laid out anew when all others have left
        self.waiting.popleft()
        try:
            engine = self.runtime.reserve(request.context)
        except SpeqError as error:
            return [Emitted(request, [], error)]
        request.sequence.row = self._free_row(engine)
        self.reading = request, engine.begin(request.sequence)
        return []

    def _free_row(self, engine: Engine) -> int:
        taken = {request.sequence.row for request in self.running}
        return next(row for row in range(len(engine.caches)) if row not in taken)

    def _round(self, draft_length: int | None) -> list[Emitted]:
        if not self.running:
            return []
        engine, batch = self.runtime.engine, [*self.running]
        try:
            tokens = engine.step_all([request.sequence for request in batch], draft_length)
        except SpeqError as error:
            return self._end(self._lost or batch, error)
        emitted = []
        for request, turn, token_ids in zip(batch, engine.turns, tokens, strict=True):
            if turn.error is not None:
                self.running.remove(request)
                emitted.append(Emitted(request, [], turn.error))
                continue
            request.last_s = self.clock()
            request.steps += 1
            request.drafted += turn.draft.depth
            request.accepted += turn.outcome.accepted
            emitted.append(self._emitted(request, token_ids))
        return emitted

    def _emitted(self, request: Request, token_ids: list[int]) -> Emitted:
        if request.sequence.finish_reason is not None:
            self.running.remove(request)
        return Emitted(request, token_ids)

    @property
    def _lost(self) -> list[Request]:
        """Texts whose entries are gone: a pass that fails in its midst takes those of all."""
        caches = self.runtime.engine.caches
        return [each for each in self._joined if not caches[each.sequence.row].length]

    def _end(self, requests: list[Request], error: SpeqError) -> list[Emitted]:
        for request in requests:
            self.drop(request)
        return [Emitted(request, [], error) for request in requests]
