"""Texts that are run side by side: they join between steps, and leave when they end.

A text's tokens do not depend on the others. Who joins waits for a KV cache and for room in it; then
its prompt is run chunk by chunk, between steps of those that are under way.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from speq.decode.engine import Engine, Reading
from speq.decode.sequence import Sequence
from speq.decode.turn import Turn
from speq.errors import SpeqError
from speq.runtime import Runtime
from speq.stats import Origin, StepStats, ratio

# Steps of a record, so that texts without end have none without end.
RECORDED_STEPS = 10_000


@dataclass(slots=True, eq=False)
class Request:
    """A text to be generated, and what has been measured of it.

    given_s, first_s, last_s  when it was asked for, and when its tokens came
    cached    tokens of its prompt that had entries
    steps     rounds that it took part in; drafted, accepted: tokens in them
    shared    summed over the rounds: texts of each, this one included
    moved_bytes, stall_s  of the rounds: a round's bytes are its texts', in equal parts, and each of
              them waited for all of its stalls
    prompt_moved_bytes, prompt_stall_s  of its prompt's chunks
    """

    sequence: Sequence
    given_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    cached: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    shared: int = 0
    moved_bytes: float = 0.0
    stall_s: float = 0.0
    prompt_moved_bytes: int = 0
    prompt_stall_s: float = 0.0

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
            "batch_mean": ratio(self.shared, self.steps),
            "moved_bytes": round(self.moved_bytes),
            "stall_s": self.stall_s,
            "prefill_moved_bytes": self.prompt_moved_bytes,
            "prefill_stall_s": self.prompt_stall_s,
            "cached_tokens": self.cached,
        }

    def read(self, step: StepStats) -> None:
        """A chunk of its prompt was run."""
        self.prompt_moved_bytes += step.moved_bytes
        self.prompt_stall_s += step.stall_s

    def stepped(self, step: StepStats, turn: Turn, texts: int) -> None:
        """It took part in a round of so many texts."""
        self.steps += 1
        self.drafted += turn.draft.depth
        self.accepted += turn.outcome.accepted
        self.shared += texts
        self.moved_bytes += step.moved_bytes / texts
        self.stall_s += step.stall_s


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a step has brought for a text: tokens, or the error that ended it.

    origins  of each token, where it is from
    """

    request: Request
    token_ids: list[int]
    origins: list[Origin] = field(default_factory=list)
    error: Exception | None = None


@dataclass(slots=True)
class Batch:
    """Requests over one runtime; none of its methods may be called while another one is.

    record   begins another record of steps, of a run that began at that time
    waiting  for a KV cache, first come, first served
    reading  whose prompt is being run
    running  that take their steps together

    A chunk and a round take turns, so that a text's first token is told before its next round.
    """

    runtime: Runtime
    record: Callable[[float], None] = lambda start_s: None
    clock: Callable[[], float] = time.perf_counter
    waiting: deque[Request] = field(default_factory=deque)
    reading: tuple[Request, Reading] | None = None
    running: list[Request] = field(default_factory=list)
    _round_is_due: bool = False

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.reading or self.running)

    @property
    def _joined(self) -> list[Request]:
        """Those that have a KV cache."""
        return self.running if self.reading is None else [*self.running, self.reading[0]]

    @property
    def cached_share(self) -> float:
        """Of the room that all KV caches have, what entries of texts under way take."""
        caches = self.runtime.engine.caches
        held = sum(caches[each.sequence.row].length for each in self._joined)
        return held / sum(cache.capacity for cache in caches)

    def takes(self, context: int) -> bool:
        """Whether a text of so many tokens, added now, would have a KV cache in the next step."""
        if self.reading or self.waiting or len(self.running) == self.runtime.config.max_batch:
            return False
        return not self.running or self.runtime.has_room(context)

    def add(self, sequence: Sequence, given_s: float | None = None) -> Request:
        """Have a text join as soon as there is room. Raises SpeqError where there never will be.

        given_s  when it was asked for, by this clock; default: now
        """
        request = Request(sequence, self.clock() if given_s is None else given_s)
        self.runtime.check(request.context)
        self.waiting.append(request)
        return request

    def drop(self, request: Request) -> None:
        """Let a text go that is no longer wanted, if it has not ended."""
        with suppress(ValueError):
            self.waiting.remove(request)
        if request in self._joined:
            self.runtime.engine.end(request.sequence)
        if self.reading is not None and self.reading[0] is request:
            self.reading = None
        if request in self.running:
            self.running.remove(request)

    def clear(self) -> list[Request]:
        """Let all texts go; return them."""
        dropped = [*self._joined, *self.waiting]
        for request in dropped:
            self.drop(request)
        return dropped

    def step(
        self,
        draft_length: int | None = None,
        progress: Callable[[Request, int, int], None] | None = None,
    ) -> list[Emitted]:
        """Run a chunk of the prompt of who joins, or one round of those under way, in turns where
        there are both; what came of it, text by text. Texts that have ended have left.

        draft_length  of all texts; None: the governor's
        progress      told (whose prompt, tokens done, tokens) while a chunk is run
        """
        self._renew_record()
        try:
            if not (self._round_is_due and self.running):
                emitted = self._read(progress)
                if emitted or self.reading is not None:
                    self._round_is_due = True
                    return emitted
            self._round_is_due = False
            return self._round(draft_length)
        except BaseException:
            self.clear()
            raise

    def _renew_record(self) -> None:
        run = self.runtime.recorder.run
        if run is not None and len(run.steps) >= RECORDED_STEPS:
            self.record(self.clock())

    def _read(self, progress: Callable[[Request, int, int], None] | None) -> list[Emitted]:
        if self.reading is None:
            refused = self._admit()
            if self.reading is None:
                return refused
        request, reading = self.reading
        engine = self.runtime.engine
        try:
            token_ids = engine.read(reading, progress and partial(progress, request))
        except SpeqError as error:
            self.reading = None
            engine.caches[request.sequence.row].clear()  # what is there may be no numbers
            return [Emitted(request, [], error=error), *self._end(self._lost, error)]
        request.read(engine.recorder.step)
        if reading.left:
            return []
        self.reading = None
        self.running.append(request)
        request.first_s = request.last_s = self.clock()
        return [self._emitted(request, token_ids, ["prompt"])]

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
            return [Emitted(request, [], error=error)]
        free = self._free_rows(engine)
        sequence = request.sequence
        sequence.row = engine.prefixes.row_for(sequence.prompt_ids, free, sequence.owner)
        reading = engine.begin(sequence, reuse=True)
        request.cached = reading.cached
        self.reading = request, reading
        return []

    def _free_rows(self, engine: Engine) -> list[int]:
        if self.runtime.records_passes and not self.running:
            return [0]  # passes of a text by itself are recorded over this cache
        taken = {request.sequence.row for request in self.running}
        return [row for row in range(len(engine.caches)) if row not in taken]

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
                turn.cache.clear()
                emitted.append(Emitted(request, [], error=turn.error))
                continue
            request.last_s = self.clock()
            request.stepped(engine.recorder.step, turn, len(batch))
            accepted: list[Origin] = ["accepted"] * turn.outcome.accepted
            emitted.append(self._emitted(request, token_ids, [*accepted, "exact"]))
        return emitted

    def _emitted(self, request: Request, token_ids: list[int], origins: list[Origin]) -> Emitted:
        if request.sequence.finish_reason is not None:
            self.drop(request)
        return Emitted(request, token_ids, origins[: len(token_ids)])

    @property
    def _lost(self) -> list[Request]:
        """Texts whose entries are gone: a pass that fails in its midst takes those of all."""
        caches = self.runtime.engine.caches
        return [each for each in self._joined if not caches[each.sequence.row].length]

    def _end(self, requests: list[Request], error: SpeqError) -> list[Emitted]:
        joined = self._joined
        for request in requests:
            if request in joined:  # what is there may be no numbers
                self.runtime.engine.caches[request.sequence.row].clear()
            self.drop(request)
        return [Emitted(request, [], error=error) for request in requests]
