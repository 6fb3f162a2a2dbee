"""The loop: draft, verify, accept, commit.

The INT4 experts draft k tokens and name, layer by layer, the exact experts those will need. The
exact model then verifies k + 1 tokens in one pass, with its experts in slots. Plain decoding is the
case k = 0. A prompt is run by the same model, chunk by chunk. The requests of a batch take their
steps together and share each pass, but the tokens of one do not depend on the others. Methods
return the tokens they emitted; measurements go through the recorder alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, cat

from speq.engine.accept import accept
from speq.engine.approximation import Approximation
from speq.engine.draft import Draft, Outcome
from speq.engine.drafter import (
    Drafter,
    DraftLimits,
    DraftRequest,
    FeatureDrafter,
    PlainDecoding,
    SecondaryDrafter,
    SharedPasses,
)
from speq.engine.forced_tokens import ForcedTokens
from speq.engine.offload import Offload
from speq.engine.prefixes import Prefixes
from speq.engine.request import Cancelled, PromptObserver, Request, RequestState
from speq.engine.request_step import PackedDrafts, RequestStep
from speq.engine.sampler import HostSampler, Sampler
from speq.engine.verification import EagerVerification, Verification
from speq.errors import SpeqError, present
from speq.files.alignment import free_memory
from speq.governor.batches import Governors, longest_draft
from speq.governor.confidence import Confidence
from speq.governor.draft_length import Decision, FixedDraftLength, Governor
from speq.governor.prices import Prices
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel, Scored
from speq.models.packed_batch import SequenceTokens
from speq.routing import Route
from speq.scheduler.lookahead import LookaheadBuffer
from speq.stats import DraftStats, Recorder, StepStats

# Tokens of a prompt whose logits are there at a time.
SCORED_ROWS = 8


@dataclass(slots=True)
class Engine:
    """One model over some KV caches, one for each request of a batch.

    caches, drafters  by `Request.kv_slot`; a drafter drafts over the cache of the same slot
    chunk       tokens of one pass over a prompt, at most
    sampler     chooses tokens where the model computes
    confidence  how likely drafted tokens are to be accepted
    prices      what missing experts and tokens cost
    approximation  runs verifications within an expert budget, for batches of one; None: exact
    prefixes    which tokens the caches hold of earlier requests
    secondary_drafters  by KV slot; the governor of a batch of one may choose them where they have
                a proposal; none where it knows of none
    steps       of the last step, request by request
    closed      its memory is given back: nothing may run
    """

    model: MoEModel
    caches: list[KVCache]
    offload: Offload
    verification: Verification
    drafters: list[Drafter]
    governors: Governors
    recorder: Recorder
    chunk: int
    sampler: Sampler = field(default_factory=HostSampler)
    confidence: Confidence = field(default_factory=Confidence)
    prices: Prices = field(default_factory=Prices)
    approximation: Approximation | None = None
    prefixes: Prefixes = field(default_factory=lambda: Prefixes([], 1))
    secondary_drafters: list[SecondaryDrafter] = field(default_factory=list)
    steps: list[RequestStep] = field(default_factory=list, init=False)
    closed: bool = field(default=False, init=False)

    @property
    def lookahead(self) -> LookaheadBuffer:
        """The routes of the last step's draft and verification."""
        return self.offload.prefetcher.lookahead

    # --- prefill ---

    def begin_prefill(self, request: Request, reuse: bool = False) -> None:
        """Forget what the request's KV slot and drafter hold: its prompt follows.

        reuse  keep the KV of the tokens it begins with, where it is known and they need not be run
        """
        request.state, request.prefilled = RequestState.PREFILL, 0
        if reuse and request.prompt_logprobs is None:
            with self.invalidate_on_error():
                request.prefilled = self.prefixes.begin(
                    request.kv_slot, request.prompt_token_ids, request.owner
                )
        else:
            self.caches[request.kv_slot].clear()
            drafter = self.drafters[request.kv_slot]
            if isinstance(drafter, FeatureDrafter):
                drafter.reset(0, drafter)
        request.metrics.cached_tokens = request.prefilled

    def prefill_chunk(
        self,
        request: Request,
        progress: Callable[[int, int], None] | None = None,
        alone: bool = True,
    ) -> list[int]:
        """Run the next chunk of a prompt; return the first token after the last chunk.

        progress  told (tokens done, tokens) while it runs, layer by layer; where it raises
                  Cancelled, only this chunk is lost
        alone     nobody decodes before the next chunk, whose experts may be read ahead
        """
        stats = self.recorder.begin("prefill")
        cached, start = request.metrics.cached_tokens, request.prefilled
        if start == cached:
            stats.cached_tokens = cached
        total = len(request.prompt_token_ids) - cached

        def report(done: int, _: int) -> None:
            if progress is not None:
                progress(start - cached + done, total)

        end = self.prefixes.end(start, len(request.prompt_token_ids))
        announced = request.left_to_prefill if alone else end - start
        emitted: list[int] = []
        with self.recorder.timed("prefill"):
            stream = self.offload.stream.prompt(announced, self.chunk, report)
            with self._left_whole(request), self.invalidate_on_error(), stream:
                self._run_chunk(request, end)
            if not request.left_to_prefill:
                emitted = self._first_token(request)
        if emitted and progress is not None:
            progress(total, total)
        self.governors.begin()
        stats.emitted = len(emitted)
        self.offload.loader.report()
        self.recorder.finish()
        return emitted

    def prefill(self, request: Request, reuse: bool = False) -> list[int]:
        """Run a whole prompt; return the first token."""
        self.begin_prefill(request, reuse)
        emitted: list[int] = []
        while request.left_to_prefill:
            emitted = self.prefill_chunk(request)
        return emitted

    def _run_chunk(self, request: Request, end: int) -> None:
        token_ids = request.prompt_token_ids[request.prefilled : end]
        cache, drafter = self.caches[request.kv_slot], self.drafters[request.kv_slot]
        observe = drafter.observe_verified if isinstance(drafter, FeatureDrafter) else None
        tokens = SequenceTokens(cache, token_ids)
        hidden = self.model.prefill(self.offload.reader, tokens, observe)
        if request.prompt_logprobs is not None:
            following = request.prompt_token_ids[request.prefilled + 1 : end + 1]
            self._score_prompt(hidden, following, request.prompt_logprobs)
        request.prefilled, request.last_hidden = end, hidden[-1:]
        self.prefixes.read(request.kv_slot, token_ids)

    def _score_prompt(self, hidden: Tensor, token_ids: list[int], observer: PromptObserver) -> None:
        """Tell how likely the tokens after some of a prompt's hidden states [T, H] were."""
        for start in range(0, len(token_ids), SCORED_ROWS):
            following = token_ids[start : start + SCORED_ROWS]
            rows = hidden[start : start + len(following)]
            observer.note(self.model.logits(rows), following)

    def _first_token(self, request: Request) -> list[int]:
        last = present(request.last_hidden, "a prompt without tokens was run")
        with self.invalidate_on_error():
            scored = self.model.score_last(last)
        outcome = accept(Draft(), scored.logits, request, self.sampler)
        request.state, request.last_hidden = RequestState.DECODE, None
        return request.extend(outcome.token_ids)

    def end(self, request: Request) -> None:
        """A request is finished or given up: its KV stays as long as there is room."""
        request.state = RequestState.FINISHED
        token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.prefixes.ended(request.kv_slot, token_ids)

    # --- decode ---

    def step(self, batch: Sequence[Request], draft_length: int | None = None) -> list[list[int]]:
        """Run one step of a batch; return the tokens that it emitted for each request.

        draft_length  where it is given, the governor neither decides nor learns

        A request of several whose logits are not finite emits nothing, and the others continue:
        `RequestStep.error` says so.
        """
        governor = self.governors.of(len(batch))
        if draft_length is not None:
            governor = FixedDraftLength(draft_length)
        stats = self.recorder.begin("decode")
        decision = self._decide(governor, batch)
        forced = [self._forced(request, governor, len(batch)) for request in batch]
        if len(batch) == 1 and forced[0]:
            reason = "the form of the answer forces these tokens"
            decision = Decision(len(forced[0]), reason, "forced")
        self.steps = [
            self._begin_step(request, decision, tokens, len(batch))
            for request, tokens in zip(batch, forced, strict=True)
        ]
        self.propose(self.steps, governor)
        with self.recorder.timed("verify"):
            scored = self.verify(self.steps)
            for each, scores in zip(self.steps, scored, strict=True):
                self.accept(each, scores)
        self._observe_verified(self.steps, scored)
        if self.approximation is not None:
            stats.approximation = self.approximation.report(self.steps[0], scored[0], self.sampler)
        emitted = self.commit(self.steps, stats)
        stats.ground, stats.reason = decision.ground, decision.reason
        stats.drafter = decision.drafter
        stats.forecast = decision.forecast
        finished = self.recorder.finish()
        if not finished.audit_s:  # which took twice as long
            if not any(forced):
                governor.observe(finished)
            self.prices.observe(finished)
        return emitted

    def _decide(self, governor: Governor, batch: Sequence[Request]) -> Decision:
        """The governor's choice. A secondary drafter is for batches of one."""
        if len(batch) > 1:
            return governor.decide(False)
        (request,) = batch
        cache = self.caches[request.kv_slot]
        has_proposal = governor.secondary is not None and self.secondary_drafters[
            request.kv_slot
        ].has_proposal(request)
        return within(governor.decide(has_proposal), request, cache)

    def _forced(self, request: Request, governor: Governor, batch_size: int) -> list[int]:
        """The tokens that the form of an answer forces, as many as are of use, where the run
        drafts at all.
        """
        if request.constraint is None or self.approximation is not None:
            return []
        if isinstance(governor, FixedDraftLength) and not governor.draft_length:
            return []
        most = longest_draft(self.governors.most_rows, batch_size)
        return request.forced[: min(most, request.remaining - 1)]

    def _begin_step(
        self, request: Request, decision: Decision, forced: list[int], batch_size: int
    ) -> RequestStep:
        cache = self.caches[request.kv_slot]
        if forced:
            limits = DraftLimits(len(forced))
            return RequestStep(request, cache, ForcedTokens(forced), limits)
        secondary = decision.drafter is not None
        drafters: Sequence[Drafter] = self.secondary_drafters if secondary else self.drafters
        decision = within(decision, request, cache)
        length, nodes = decision.draft_length, decision.nodes
        if batch_size > 1:
            most = longest_draft(self.governors.most_rows, batch_size)
            length, nodes = min(length, most), None if nodes is None else min(nodes, most)
        return RequestStep(request, cache, drafters[request.kv_slot], DraftLimits(length, nodes))

    def propose(self, steps: list[RequestStep], governor: Governor) -> None:
        """Draft for each request, as long as each pass is worth its cost, by the experts named so
        far and the probability that the token it runs is accepted.
        """
        for each in steps:
            each.cache.settle()
        prefetcher = self.offload.prefetcher
        prefetcher.begin(max(each.limits.length for each in steps), len(steps))
        lookahead = prefetcher.lookahead

        def on_route(index: int, node: int, layer: int, route: Route) -> None:
            prefetcher.request(lookahead.token(index, node), layer, route)

        def continue_draft(
            index: int, drafted: int, logit_margin: float | None, parent: int | None = None
        ) -> bool:
            accept_prob = lookahead.extend(self.confidence.probability(logit_margin), parent, index)
            on = governor.continue_draft(drafted, prefetcher.new_experts, accept_prob)
            steps[index].stopped = not on
            return on

        requests = [
            DraftRequest(
                each.request, each.limits, partial(on_route, index), partial(continue_draft, index)
            )
            for index, each in enumerate(steps)
        ]
        with self.invalidate_on_error(), self.recorder.timed("draft"):
            drafters = [each.drafter for each in steps]
            for each, draft in zip(steps, drafts_of(drafters, requests), strict=True):
                each.draft = draft
            prefetcher.end()

    def verify(self, steps: list[RequestStep]) -> list[Scored]:
        """Score the pending tokens and drafts of a batch with the exact experts, in one pass.
        Nodes that are not `active` behind it were pruned.
        """
        packed = PackedDrafts.of([each.draft for each in steps])
        pruner, prices = self.offload.rows, self.prices
        self.lookahead.scored(packed.node_counts)
        values = packed.row_values(self.confidence.probability, prices.expert_s, prices.token_s)
        batch = [each.tokens for each in steps]

        def score_again() -> Scored:
            pruner.begin(values)
            return self.verification.score(batch)[0]

        try:
            with self.invalidate_on_error():
                if self.approximation is None:
                    pruner.begin(values)
                    scored = self.verification.score(batch)
                else:
                    scored = [self.approximation.score(score_again, values.accept_prob)]
        finally:
            rows = pruner.end()
        for at, each in enumerate(steps):
            each.first_row = packed.first_rows[at]
            each.active = packed.nodes_among(rows, at)
        return scored

    def accept(self, step: RequestStep, scored: Scored) -> None:
        try:
            step.outcome = accept(
                step.draft, scored.logits, step.request, self.sampler, step.active
            )
        except SpeqError as error:
            if len(self.steps) == 1:
                raise
            step.outcome, step.error = Outcome([], []), error

    def _observe_verified(self, steps: list[RequestStep], scored: list[Scored]) -> None:
        """Tell drafters what the exact model made of the accepted paths."""
        for step, each in zip(steps, scored, strict=True):
            drafter = self.drafters[step.request.kv_slot]
            if isinstance(drafter, FeatureDrafter) and step.error is None:
                rows: list[Tensor] = [each.features[node : node + 1] for node in step.outcome.path]
                drafter.observe_verified(step.accepted_ids, cat(rows))

    def commit(self, steps: list[RequestStep], stats: StepStats) -> list[list[int]]:
        """Keep accepted paths in the KV caches, emit their tokens, complete the record."""
        self.offload.loader.report()
        emitted, kept = [], []
        stats.sequences = len(steps)
        for step in steps:
            draft, outcome = step.draft, step.outcome
            step.cache.keep_path(outcome.path)
            emitted.append(step.request.extend(outcome.token_ids))
            if step.error is not None:
                stats.sequences -= 1
                continue
            kept += [step.first_row + node for node in outcome.path]
            stats.draft_length += draft.depth
            stats.passes = max(stats.passes, draft.passes)
            stats.branches += draft.nodes - 1 - draft.depth
            stats.given_up += draft.nodes - len(step.active)
            stats.accepted += outcome.accepted
            stats.emitted += len(emitted[-1])
            if len(steps) > 1:
                stats.drafts.append(DraftStats(draft.depth, outcome.accepted, step.stopped))
            for logit_margin, accepted in draft.tried(outcome):
                self.confidence.learn(logit_margin, accepted)
        stats.named, stats.choices = self.lookahead.recall(kept)
        if len(kept) < stats.rows:
            self.recorder.rejected(self.lookahead.rejected(kept))
        return emitted

    # --- its memory ---

    @contextmanager
    def _left_whole(self, request: Request) -> Iterator[None]:
        """Have a sequence's KV end before a chunk that is cancelled: its states may be of part of
        the layers.
        """
        try:
            yield
        except Cancelled:
            cache = self.caches[request.kv_slot]
            request.prefilled = cache.resumable(request.prefilled)
            cache.resume(request.prefilled)
            raise

    @contextmanager
    def invalidate_on_error(self) -> Iterator[None]:
        """An interrupt can strike between any two lines. What lay in expert slots is then
        forgotten, and so is all KV.
        """
        try:
            yield
        except Cancelled:
            raise
        except BaseException:
            self.offload.loader.forget()
            for cache in self.caches:
                cache.erase()
            raise

    def close(self) -> None:
        """Release expert slots and KV caches, even where a traceback still holds this engine."""
        self.closed = True
        self.offload.memory.leave()
        self.offload.loader.close()
        self.model.forget_recordings()
        # Other ones may hold an INT4 copy that is given up.
        self.drafters, self.secondary_drafters = [PlainDecoding() for _ in self.caches], []
        self.prefixes.listeners = []
        self.steps = []
        self.verification = EagerVerification(self.model, self.offload.target)
        kv = [tensor for cache in self.caches for tensor in cache.tensors()]
        for tensor in (self.offload.slots, *kv):
            free_memory(tensor)


def drafts_of(drafters: list[Drafter], requests: list[DraftRequest]) -> list[Draft]:
    """A draft for each request: in passes common to all, where drafters make such."""
    pairs = [*zip(drafters, requests, strict=True)]
    shared = [at for at, (drafter, _) in enumerate(pairs) if isinstance(drafter, SharedPasses)]
    drafts: dict[int, Draft] = {}
    if shared:
        first: Any = drafters[shared[0]]
        made = first.propose_together(*zip(*(pairs[at] for at in shared), strict=True))
        drafts.update(zip(shared, made, strict=True))
    return [
        drafts[at] if at in drafts else drafter.propose(each)
        for at, (drafter, each) in enumerate(pairs)
    ]


def within(decision: Decision, request: Request, cache: KVCache) -> Decision:
    """The governor's choice, but no more tokens than may still be emitted, and no larger a tree
    than the cache has room for.
    """
    useful = request.remaining - 1
    if decision.nodes is not None:
        room = cache.capacity - cache.length - 1
        decision = replace(decision, nodes=min(decision.nodes, room))
    if decision.draft_length <= useful:
        return decision
    reason = f"{useful} left after the next token"
    drafter = decision.drafter if useful else None
    return Decision(useful, reason, "bound", nodes=decision.nodes, drafter=drafter)
