"""The loop: draft, verify, accept, commit.

The INT4 experts draft k tokens and name, layer by layer, the exact experts those will need; the
exact model then verifies k + 1 tokens in one pass, experts out of slots. Plain decoding is the case
k = 0, and a prompt is run by the same model, chunk by chunk. What a step measured is in its
StepStats, and nowhere else.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from speq.decode.accept import accept
from speq.decode.drafter import Drafter
from speq.decode.offload import Offload
from speq.decode.sequence import Draft, Outcome, Sequence
from speq.governor.draft_length import Decision, Governor
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel, Scored
from speq.stats import Recorder, StepStats


@dataclass(slots=True)
class Engine:
    """One model over one KV cache, for one sequence at a time."""

    model: MoEModel
    cache: KVCache
    offload: Offload
    drafter: Drafter
    governor: Governor
    recorder: Recorder
    chunk: int

    def start(
        self, sequence: Sequence, progress: Callable[[int, int], None] | None = None
    ) -> StepStats:
        """Run the prompt and emit the first token. progress: told (tokens done, tokens)."""
        stats = self.recorder.begin("prefill")
        self.cache.clear()
        prompt = sequence.prompt_ids
        stream = self.offload.stream.prompt(len(prompt), self.chunk, progress)
        with self.mending(), self.recorder.timed("prefill"), stream:
            scored = self.model.prefill(self.offload.reader, self.cache, prompt, self.chunk)
        if progress is not None:
            progress(len(prompt), len(prompt))
        self.governor.begin()
        outcome = accept(Draft(), scored.logits, sequence)
        stats.emitted = len(sequence.extend(outcome.token_ids))
        return self.recorder.finish()

    def step(self, sequence: Sequence) -> StepStats:
        """Run one round of drafting and verification and emit at least one token."""
        stats = self.recorder.begin("decode")
        decision = self.draft_length(sequence)
        prefetcher = self.offload.prefetcher
        prefetcher.begin(decision.draft_length)
        with self.mending(), self.recorder.timed("draft"):
            draft = self.drafter.propose(
                sequence, decision.draft_length, on_route=prefetcher.request, go_on=self.go_on
            )
        with self.mending(), self.recorder.timed("verify"):
            scored = self.verify(sequence, draft)
        outcome = accept(draft, scored.logits, sequence)
        stats.ground, stats.reason = decision.ground, decision.reason
        stats.forecast = decision.forecast
        self.commit(sequence, draft, outcome, stats)
        self.governor.observe(self.recorder.finish())
        return stats

    def draft_length(self, sequence: Sequence) -> Decision:
        """The governor's choice, short of drafting more than may still be emitted."""
        decision = self.governor.decide()
        useful = sequence.remaining - 1
        if decision.draft_length <= useful:
            return decision
        return Decision(useful, f"{useful} left after the next token", "bound")

    def go_on(self, drafted: int) -> bool:
        """Whether the draft under way is worth another token, by the experts it has named."""
        return self.governor.go_on(drafted, self.offload.prefetcher.new_experts)

    def verify(self, sequence: Sequence, draft: Draft) -> Scored:
        """Score the pending token and the whole draft with the exact experts, in one pass."""
        return self.model.score(
            self.offload.target,
            self.cache,
            [sequence.pending_id, *draft.token_ids],
            draft.depths(),
            draft.ancestors(),
        )

    def commit(self, sequence: Sequence, draft: Draft, outcome: Outcome, stats: StepStats) -> None:
        """Keep the accepted path in the KV cache, emit its tokens, complete the record."""
        self.cache.keep_path(0, outcome.path)
        stats.draft_length = len(draft.token_ids)
        stats.accepted = outcome.accepted
        stats.emitted = len(sequence.extend(outcome.token_ids))
        lookahead = self.offload.prefetcher.lookahead
        stats.named, stats.choices = lookahead.recall(outcome.path)
        if len(outcome.path) < draft.nodes:
            self.recorder.rejected(lookahead.rejected(outcome.path))

    @contextmanager
    def mending(self) -> Iterator[None]:
        """An interrupt can strike between any two lines: what lay in slots is then forgotten."""
        try:
            yield
        except BaseException:
            self.offload.supply.forget()
            raise

    def close(self) -> None:
        """Give back slots and KV cache, even where a traceback still holds this engine."""
        self.offload.supply.close()
        for tensor in (self.offload.slots, *self.cache.tensors()):
            tensor.untyped_storage().resize_(0)
