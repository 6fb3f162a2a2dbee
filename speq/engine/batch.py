"""Requests that run as one batch: they join between steps, and leave when they end.

The tokens of a request do not depend on the others. A request waits for a KV slot and for memory.
Then its prompt is run chunk by chunk, between decode steps of those that run.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from speq.engine.engine import Engine
from speq.engine.request import Cancelled, Request, Token
from speq.errors import SpeqError
from speq.runtime import Runtime
from speq.stats import Origin
from speq.units import Clock

# Steps of a record, so that requests without end have none without end.
RECORDED_STEPS = 10_000

# Told (request, tokens of its prompt that were run, tokens).
PrefillProgress = Callable[[Request, int, int], None]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tokens that a step emitted for a request, or the error that ended it.

    origins  source of each token
    """

    request: Request
    tokens: list[Token]
    origins: list[Origin] = field(default_factory=list)
    error: Exception | None = None


@dataclass(slots=True)
class Batch:
    """Requests over one runtime; none of its methods may be called while another one is.

    record      begins another record of steps, of a run that began at that time
    waiting     for a KV slot, first come, first served
    prefilling  the request whose prompt is being run
    running     those that take their decode steps together

    A chunk of a prompt and a decode step take turns, so that a request's first token is told before
    its next step.
    """

    runtime: Runtime
    record: Callable[[float], None] = lambda start_s: None
    clock: Clock = time.perf_counter
    waiting: deque[Request] = field(default_factory=deque)
    prefilling: Request | None = None
    running: list[Request] = field(default_factory=list)
    _decode_is_due: bool = False

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running)

    @property
    def _joined(self) -> list[Request]:
        """Those that have a KV slot."""
        return self.running if self.prefilling is None else [*self.running, self.prefilling]

    @property
    def cached_share(self) -> float:
        """Share of KV-cache capacity in use by running requests."""
        caches = self.runtime.engine.caches
        used = sum(caches[each.kv_slot].length for each in self._joined)
        return used / sum(cache.capacity for cache in caches)

    def has_room(self, context: int) -> bool:
        """True if a request of so many tokens, added now, would have a KV slot in the next step,
        or be refused.
        """
        if self.prefilling or self.waiting or len(self.running) == self.runtime.config.max_batch:
            return False
        try:
            return not self.running or self.runtime.has_room(context)
        except SpeqError:  # no memory could be laid out for it, which `add` says
            return True

    def add(self, request: Request, arrival_s: float | None = None) -> Request:
        """Have a request join as soon as there is room. Raises SpeqError where there never will be.

        arrival_s  when it was asked for, by this clock; default: now
        """
        request.metrics.arrival_s = self.clock() if arrival_s is None else arrival_s
        self.runtime.check(request.context)
        self.waiting.append(request)
        return request

    def drop(self, request: Request) -> None:
        """Remove a request that is no longer wanted, if it has not ended."""
        with suppress(ValueError):
            self.waiting.remove(request)
        if request in self._joined:
            self.runtime.engine.end(request)
        if self.prefilling is request:
            self.prefilling = None
        if request in self.running:
            self.running.remove(request)

    def clear(self) -> list[Request]:
        """Remove all requests; return them."""
        dropped = [*self._joined, *self.waiting]
        for request in dropped:
            self.drop(request)
        return dropped

    def step(
        self, draft_length: int | None = None, progress: PrefillProgress | None = None
    ) -> list[StepOutput]:
        """Run a chunk of the prompt of the request that joins, or one decode step of those that
        run, in turns where there are both; what came of it. Requests that ended have left.

        draft_length  of all requests; None: the governor's
        progress      told while a chunk is run; it may raise Cancelled, and drop the request then
        """
        self._renew_record()
        self.runtime.follow_budget()
        try:
            if not (self._decode_is_due and self.running):
                outputs = self._prefill(progress)
                if outputs or self.prefilling is not None:
                    self._decode_is_due = True
                    return outputs
            self._decode_is_due = False
            return self._decode(draft_length)
        except BaseException:
            self.clear()
            raise

    def _renew_record(self) -> None:
        run = self.runtime.recorder.run
        if run is not None and len(run.steps) >= RECORDED_STEPS:
            self.record(self.clock())

    def _prefill(self, progress: PrefillProgress | None) -> list[StepOutput]:
        if self.prefilling is None:
            refused = self._admit()
            if self.prefilling is None:
                return refused
        request, engine = self.prefilling, self.runtime.engine
        try:
            told = None if progress is None else partial(progress, request)
            token_ids = engine.prefill_chunk(request, told, alone=not self.running)
        except Cancelled:
            return []
        except SpeqError as error:
            self.prefilling = None
            engine.caches[request.kv_slot].clear()  # what is there may not be finite
            return [StepOutput(request, [], error=error), *self._end(self._lost, error)]
        request.metrics.add_prefill(engine.recorder.step)
        if request.left_to_prefill:
            return []
        self.prefilling = None
        self.running.append(request)
        request.metrics.first_token_s = request.metrics.last_token_s = self.clock()
        return [self._output(request, token_ids, ["prompt"])]

    def _admit(self) -> list[StepOutput]:
        """Give the request that has waited longest a KV slot, if there is one that it fits in."""
        if not self.waiting or len(self.running) == self.runtime.config.max_batch:
            return []
        request = self.waiting[0]
        if self.running and not self.runtime.has_room(request.context):
            return []  # memory is laid out anew when all others have left
        self.waiting.popleft()
        try:
            engine = self.runtime.reserve(request.context)
        except SpeqError as error:
            return [StepOutput(request, [], error=error)]
        free = self._free_slots(engine)
        request.kv_slot = engine.prefixes.kv_slot_for(request.prompt_token_ids, free, request.owner)
        self.prefilling = request
        engine.begin_prefill(request, reuse=True)
        return []

    def _free_slots(self, engine: Engine) -> list[int]:
        if self.runtime.records_passes and not self.running:
            return [0]  # passes of a request by itself are recorded over this cache
        taken = {request.kv_slot for request in self.running}
        return [slot for slot in range(len(engine.caches)) if slot not in taken]

    def _decode(self, draft_length: int | None) -> list[StepOutput]:
        if not self.running:
            return []
        engine, batch = self.runtime.engine, [*self.running]
        try:
            tokens = engine.step(batch, draft_length)
        except SpeqError as error:
            return self._end(self._lost or batch, error)
        outputs = []
        for request, step, token_ids in zip(batch, engine.steps, tokens, strict=True):
            if step.error is not None:
                self.running.remove(request)
                step.cache.clear()
                outputs.append(StepOutput(request, [], error=step.error))
                continue
            request.metrics.last_token_s = self.clock()
            depth, accepted = step.draft.depth, step.outcome.accepted
            request.metrics.add_decode(engine.recorder.step, depth, accepted, len(batch))
            origins: list[Origin] = ["accepted"] * accepted
            outputs.append(self._output(request, token_ids, [*origins, "exact"]))
        return outputs

    def _output(self, request: Request, token_ids: list[int], origins: list[Origin]) -> StepOutput:
        if request.finish_reason is not None:
            self.drop(request)
        kept = origins[: len(token_ids)]
        tokens = [
            replace(token, origin=origin)
            for token, origin in zip(request.take(token_ids), kept, strict=True)
        ]
        step = self.runtime.engine.recorder.step
        if tokens and step.phase == "decode":
            tokens[0] = replace(tokens[0], waited_s=step.stall_s)
        return StepOutput(request, tokens, kept)

    @property
    def _lost(self) -> list[Request]:
        """Requests whose KV is gone: a pass that fails in its midst takes that of all."""
        caches = self.runtime.engine.caches
        return [each for each in self._joined if not caches[each.kv_slot].length]

    def _end(self, requests: list[Request], error: SpeqError) -> list[StepOutput]:
        joined = self._joined
        for request in requests:
            if request in joined:  # what is there may not be finite
                self.runtime.engine.caches[request.kv_slot].clear()
            self.drop(request)
        return [StepOutput(request, [], error=error) for request in requests]
