"""The loop: draft, verify, accept, commit.

The INT4 experts draft k tokens and name, layer by layer, the exact experts those will need; the
exact model then verifies k + 1 tokens in one pass, experts out of slots. Plain decoding is the case
k = 0, and a prompt is run by the same model, chunk by chunk. `start` and `step` return the tokens
they emitted; what they measured goes by way of the recorder, and no other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from speq.decode.accept import accept
from speq.decode.drafter import DraftBounds, Drafter, Listener, PlainDecoding
from speq.decode.offload import Offload
from speq.decode.sampler import HostSampler, Sampler
from speq.decode.sequence import Draft, Outcome, Sequence
from speq.decode.verification import EagerVerification, Verification
from speq.governor.confidence import Confidence
from speq.governor.draft_length import Decision, FixedDraftLength, Governor
from speq.governor.prices import Prices
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel, OnHidden, Scored
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.row_pruning import Stakes
from speq.stats import Recorder, StepStats


@dataclass(slots=True)
class Engine:
    """One model over one KV cache, for one sequence at a time.

    sampler     chooses tokens where the model computes
    confidence  how likely drafted tokens are to stand
    prices      what missing experts and tokens cost
    draft       of the last step
    live        nodes of it that were not given up in its verification
    path        nodes of it that were accepted, the pending token's first
    """

    model: MoEModel
    cache: KVCache
    offload: Offload
    verification: Verification
    drafter: Drafter
    governor: Governor
    recorder: Recorder
    chunk: int
    sampler: Sampler = field(default_factory=HostSampler)
    confidence: Confidence = field(default_factory=Confidence)
    prices: Prices = field(default_factory=Prices)
    live: list[int] = field(default_factory=list, init=False)
    draft: Draft = field(default_factory=Draft, init=False)
    path: list[int] = field(default_factory=list, init=False)

    def start(
        self, sequence: Sequence, progress: Callable[[int, int], None] | None = None
    ) -> list[int]:
        """Run the prompt and return the first token. progress: told (tokens done, tokens)."""
        stats = self.recorder.begin("prefill")
        self.cache.clear()
        prompt = sequence.prompt_ids
        stream = self.offload.stream.prompt(len(prompt), self.chunk, progress)
        # An accelerator is through with a pass when its outcome is known, and no sooner.
        with self.recorder.timed("prefill"):
            with self.mending(), stream:
                scored = self.model.prefill(
                    self.offload.reader, self.cache, prompt, self.chunk, self.listening(sequence)
                )
            outcome = accept(Draft(), scored.logits, sequence, self.sampler)
        if progress is not None:
            progress(len(prompt), len(prompt))
        self.governor.begin()
        emitted = sequence.extend(outcome.token_ids)
        stats.emitted = len(emitted)
        self.offload.supply.report()
        self.recorder.finish()
        return emitted

    def step(self, sequence: Sequence, draft_length: int | None = None) -> list[int]:
        """Run one round of drafting and verification; return the tokens it emitted, at least one.

        draft_length  where it is given, the governor neither decides nor learns
        """
        governor = self.governor if draft_length is None else FixedDraftLength(draft_length)
        stats = self.recorder.begin("decode")
        decision = within(governor.decide(), sequence, self.cache)
        bounds = DraftBounds(decision.draft_length, decision.nodes)
        draft = self.propose(sequence, bounds, governor)
        with self.recorder.timed("verify"):
            scored = self.verify(sequence.pending_id, draft)
            outcome = accept(draft, scored.logits, sequence, self.sampler, self.live)
        self.tell(sequence.pending_id, draft, outcome, scored)
        emitted = self.commit(sequence, draft, outcome, stats)
        stats.ground, stats.reason = decision.ground, decision.reason
        stats.forecast = decision.forecast
        finished = self.recorder.finish()
        governor.observe(finished)
        self.prices.observe(finished)
        return emitted

    def propose(self, sequence: Sequence, bounds: DraftBounds, governor: Governor) -> Draft:
        """Draft so far, as long as each pass is worth it by the experts named so far and the chance
        that the token that it runs stands.
        """
        prefetcher = self.offload.prefetcher
        prefetcher.begin(bounds.length)

        def go_on(drafted: int, lead: float | None, parent: int | None = None) -> bool:
            reach = prefetcher.lookahead.extend(self.confidence.probability(lead), parent)
            return governor.go_on(drafted, prefetcher.new_experts, reach)

        with self.mending(), self.recorder.timed("draft"):
            draft = self.drafter.propose(sequence, bounds, prefetcher.request, go_on)
            prefetcher.end()
        self.draft = draft
        return draft

    def verify(self, pending_id: int, draft: Draft) -> Scored:
        """Score the pending token and the draft with the exact experts, in one pass. Nodes that are
        not `live` behind it were given up.
        """
        reach, prices = draft.reach(self.confidence.probability), self.prices
        rows = self.offload.rows
        rows.begin(Stakes([-1, *draft.parents], reach, prices.expert_s, prices.token_s))
        try:
            with self.mending():
                return self.verification.score(pending_id, draft)
        finally:
            self.live = rows.end()

    def listening(self, sequence: Sequence) -> OnHidden | None:
        """Who hears the prompt of a text that begins; None: nobody wants to."""
        if not isinstance(self.drafter, Listener):
            return None
        self.drafter.begin(sequence)
        return self.drafter.hear

    def tell(self, pending_id: int, draft: Draft, outcome: Outcome, scored: Scored) -> None:
        """Let the drafter hear what the exact model made of the accepted path."""
        if isinstance(self.drafter, Listener):
            accepted = [draft.token_ids[node - 1] for node in outcome.path[1:]]
            rows = [scored.hidden_states[node : node + 1] for node in outcome.path]
            self.drafter.hear([pending_id, *accepted], torch.cat(rows))

    def commit(
        self, sequence: Sequence, draft: Draft, outcome: Outcome, stats: StepStats
    ) -> list[int]:
        """Keep the accepted path in the KV cache, emit its tokens, complete the record."""
        self.offload.supply.report()
        self.cache.keep_path(0, outcome.path)
        self.path = outcome.path
        emitted = sequence.extend(outcome.token_ids)
        stats.draft_length, stats.passes = draft.depth, draft.passes
        stats.branches = draft.nodes - 1 - draft.depth
        stats.given_up = draft.nodes - len(self.live)
        stats.accepted = outcome.accepted
        stats.emitted = len(emitted)
        for lead, stood in draft.tried(outcome):
            self.confidence.learn(lead, stood)
        stats.named, stats.choices = self.lookahead.recall(outcome.path)
        if len(outcome.path) < draft.nodes:
            self.recorder.rejected(self.lookahead.rejected(outcome.path))
        return emitted

    @property
    def lookahead(self) -> LookaheadBuffer:
        """The routes of the last step's draft and verification."""
        return self.offload.prefetcher.lookahead

    @property
    def prompt_experts(self) -> int:
        """(layer, expert) pairs that the prompts so far have wanted, each counted once."""
        return self.offload.stream.history.chosen

    @contextmanager
    def mending(self) -> Iterator[None]:
        """An interrupt can strike between any two lines: what lay in slots is then forgotten, and
        so are the entries of tokens.
        """
        try:
            yield
        except BaseException:
            self.offload.supply.forget()
            self.cache.erase()
            raise

    def close(self) -> None:
        """Give back slots and KV cache, even where a traceback still holds this engine."""
        self.offload.supply.close()
        self.drafter = PlainDecoding()  # the other one may hold an INT4 copy that is given up
        self.verification = EagerVerification(self.model, self.cache, self.offload.target)
        for tensor in (self.offload.slots, *self.cache.tensors()):
            tensor.untyped_storage().resize_(0)


def within(decision: Decision, sequence: Sequence, cache: KVCache) -> Decision:
    """The governor's choice, short of drafting more than may still be emitted, and of a tree that
    the cache has no room for.
    """
    useful = sequence.remaining - 1
    if decision.nodes is not None:
        room = cache.capacity - cache.lengths[0] - 1
        decision = replace(decision, nodes=min(decision.nodes, room))
    if decision.draft_length <= useful:
        return decision
    return Decision(useful, f"{useful} left after the next token", "bound", nodes=decision.nodes)
