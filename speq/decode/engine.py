"""The loop: draft, verify, accept, commit.

The INT4 experts draft k tokens and name, layer by layer, the exact experts those will need; the
exact model then verifies k + 1 tokens in one pass, experts out of slots. Plain decoding is the case
k = 0, and a prompt is run by the same model, chunk by chunk. Several texts take their steps
together: passes over the draft's experts and over the exact ones are common to all of them, and
what a text's tokens are does not depend on the others. `start` and `step` return the tokens they
emitted; what they measured goes by way of the recorder, and no other.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from speq.decode.accept import accept
from speq.decode.approximation import Approximation
from speq.decode.drafter import (
    Asking,
    DraftBounds,
    Drafter,
    Listener,
    Offering,
    PlainDecoding,
    SharedPasses,
)
from speq.decode.offload import Offload
from speq.decode.prefixes import Prefixes
from speq.decode.sampler import HostSampler, Sampler
from speq.decode.sequence import Draft, Outcome, Sequence
from speq.decode.turn import Turn, place, stakes_of
from speq.decode.verification import EagerVerification, Verification
from speq.errors import SpeqError, present
from speq.governor.batches import Governors, longest_draft
from speq.governor.confidence import Confidence
from speq.governor.draft_length import Decision, FixedDraftLength, Governor
from speq.governor.prices import Prices
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel, Scored
from speq.routing import Route
from speq.scheduler.lookahead import LookaheadBuffer
from speq.stats import DraftStats, Recorder, StepStats


@dataclass(slots=True)
class Reading:
    """A prompt that is being run.

    cached  tokens whose entries were there
    done    tokens that were run, those included
    last    hidden state [1, H] of the last token that was
    """

    sequence: Sequence
    cached: int = 0
    done: int = field(init=False)
    last: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.done = self.cached

    @property
    def left(self) -> int:
        return len(self.sequence.prompt_ids) - self.done


@dataclass(slots=True)
class Engine:
    """One model over some KV caches, each for a text.

    caches, drafters  of each text, by `Sequence.row`; a drafter drafts over the cache beside it
    sampler     chooses tokens where the model computes
    confidence  how likely drafted tokens are to stand
    prices      what missing experts and tokens cost
    approximation  runs verifications within an expert budget; None: they are exact. Only of single
             texts
    sides       drafters beside these, of each text, which the governor of single texts may choose
                where they have a draft; none where it knows of none
    turns       of the last step, text by text
    prefixes    what the caches know of earlier texts
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
    sides: list[Offering] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list, init=False)

    def start(
        self,
        sequence: Sequence,
        progress: Callable[[int, int], None] | None = None,
        reuse: bool = False,
    ) -> list[int]:
        """Run the prompt and return the first token.

        progress  told (tokens done, tokens)
        reuse     as of `begin`
        """
        stats = self.recorder.begin("prefill")
        reading = self.begin(sequence, reuse)
        stats.cached_tokens = reading.cached
        tokens = reading.left
        stream = self.offload.stream.prompt(tokens, self.chunk, progress)
        # An accelerator is through with a pass when its outcome is known, and no sooner.
        with self.recorder.timed("prefill"):
            with self.mending(), stream:
                while reading.left:
                    self._read_chunk(reading)
            emitted = self._first_token(reading)
        if progress is not None:
            progress(tokens, tokens)
        self._finish_prompt(stats, emitted)
        return emitted

    def begin(self, sequence: Sequence, reuse: bool = False) -> Reading:
        """Forget what the sequence's cache and drafter hold: its prompt follows.

        reuse  leave out tokens at its beginning whose entries are known
        """
        if reuse:
            with self.mending():
                prompt_ids, owner = sequence.prompt_ids, sequence.owner
                return Reading(sequence, self.prefixes.begin(sequence.row, prompt_ids, owner))
        self.caches[sequence.row].clear()
        drafter = self.drafters[sequence.row]
        if isinstance(drafter, Listener):
            drafter.begin(0, drafter)
        return Reading(sequence)

    def end(self, sequence: Sequence) -> None:
        """A sequence is through, or given up: its entries stay as long as there is room."""
        self.prefixes.ended(sequence.row, [*sequence.prompt_ids, *sequence.generated_ids])

    def read(
        self, reading: Reading, progress: Callable[[int, int], None] | None = None
    ) -> list[int]:
        """Run the next chunk of a prompt; return the first token where that was the last chunk.

        Chunks are those of `start`, so that entries and tokens are the same.

        progress  as of `start`
        """
        stats = self.recorder.begin("prefill")
        emitted: list[int] = []
        if reading.done == reading.cached:
            stats.cached_tokens = reading.cached
        done, tokens = reading.done - reading.cached, len(reading.sequence.prompt_ids)
        tokens -= reading.cached

        def told(now: int, _: int) -> None:
            if progress is not None:
                progress(done + now, tokens)

        # What follows a chunk is read ahead where nobody else takes a step in between.
        end = self.prefixes.end(reading.done, len(reading.sequence.prompt_ids))
        announced = reading.left if len(self.caches) == 1 else end - reading.done
        stream = self.offload.stream.prompt(announced, self.chunk, told)
        with self.recorder.timed("prefill"):
            with self.mending(), stream:
                self._read_chunk(reading)
            if not reading.left:
                emitted = self._first_token(reading)
        if not reading.left and progress is not None:
            progress(tokens, tokens)
        self._finish_prompt(stats, emitted)
        return emitted

    def _read_chunk(self, reading: Reading) -> None:
        sequence = reading.sequence
        end = self.prefixes.end(reading.done, len(sequence.prompt_ids))
        tokens = sequence.prompt_ids[reading.done : end]
        cache, drafter = self.caches[sequence.row], self.drafters[sequence.row]
        on_hidden = drafter.hear if isinstance(drafter, Listener) else None
        reading.last = self.model.read(self.offload.reader, cache, tokens, on_hidden)
        reading.done += len(tokens)
        self.prefixes.read(sequence.row, tokens)

    def _first_token(self, reading: Reading) -> list[int]:
        last = present(reading.last, "a prompt was read that has no tokens")
        with self.mending():
            scored = self.model.score_last(last)
        outcome = accept(Draft(), scored.logits, reading.sequence, self.sampler)
        return reading.sequence.extend(outcome.token_ids)

    def _finish_prompt(self, stats: StepStats, emitted: list[int]) -> None:
        self.governors.begin()
        stats.emitted = len(emitted)
        self.offload.supply.report()
        self.recorder.finish()

    def step(self, sequence: Sequence, draft_length: int | None = None) -> list[int]:
        """Run one round of drafting and verification; return the tokens it emitted, at least one.

        draft_length  where it is given, the governor neither decides nor learns
        """
        (emitted,) = self.step_all([sequence], draft_length)
        return emitted

    def step_all(
        self, batch: Several[Sequence], draft_length: int | None = None
    ) -> list[list[int]]:
        """One round of several texts; of each the tokens that it emitted.

        A text of several of which the model's logits are no numbers emits nothing, and the others
        go on: `Turn.error` says so.
        """
        governor = self.governors.of(len(batch))
        if draft_length is not None:
            governor = FixedDraftLength(draft_length)
        stats = self.recorder.begin("decode")
        decision = governor.decide(governor.side is not None and self._offered(batch))
        if len(batch) == 1:
            decision = within(decision, batch[0], self.caches[batch[0].row])
        self.turns = [self._turn(sequence, decision, len(batch)) for sequence in batch]
        self.propose(self.turns, governor)
        with self.recorder.timed("verify"):
            scored = self._score_turns(self.turns)
            for turn, each in zip(self.turns, scored, strict=True):
                self._accept(turn, each)
        self._tell(self.turns, scored)
        if self.approximation is not None:
            (turn,) = self.turns
            stats.approximation = self.approximation.report(
                turn.draft, scored[0], turn.outcome, turn.sequence, self.sampler
            )
        emitted = self.commit(self.turns, stats)
        stats.ground, stats.reason = decision.ground, decision.reason
        stats.drafter = decision.drafter
        stats.forecast = decision.forecast
        finished = self.recorder.finish()
        if not finished.audit_s:  # which took twice as long
            governor.observe(finished)
            self.prices.observe(finished)
        return emitted

    def _turn(self, sequence: Sequence, decision: Decision, texts: int) -> Turn:
        cache = self.caches[sequence.row]
        beside = decision.drafter is not None
        drafter: Drafter = (self.sides if beside else self.drafters)[sequence.row]
        decision = within(decision, sequence, cache)
        length, nodes = decision.draft_length, decision.nodes
        if texts > 1:
            most = longest_draft(self.governors.most_rows, texts)
            length, nodes = min(length, most), None if nodes is None else min(nodes, most)
        return Turn(sequence, cache, drafter, DraftBounds(length, nodes))

    def _offered(self, batch: Several[Sequence]) -> bool:
        """Whether the drafter beside the run's own has a draft. It is for single texts."""
        return len(batch) == 1 and self.sides[batch[0].row].offers(batch[0])

    def _accept(self, turn: Turn, scored: Scored) -> None:
        try:
            turn.outcome = accept(turn.draft, scored.logits, turn.sequence, self.sampler, turn.live)
        except SpeqError as error:
            if len(self.turns) == 1:
                raise
            turn.outcome, turn.error = Outcome([], []), error

    def propose(self, turns: list[Turn], governor: Governor) -> None:
        """Draft for each text, as long as each pass is worth it by the experts named so far and the
        chance that the token that it runs stands.
        """
        for turn in turns:
            turn.cache.settle()
        prefetcher = self.offload.prefetcher
        prefetcher.begin(max(turn.bounds.length for turn in turns), len(turns))
        lookahead = prefetcher.lookahead

        def on_route(text: int, node: int, layer: int, route: Route) -> None:
            prefetcher.request(lookahead.token(text, node), layer, route)

        def go_on(text: int, drafted: int, lead: float | None, parent: int | None = None) -> bool:
            reach = lookahead.extend(self.confidence.probability(lead), parent, text)
            on = governor.go_on(drafted, prefetcher.new_experts, reach)
            turns[text].stopped = not on
            return on

        asking = [
            Asking(turn.sequence, turn.bounds, partial(on_route, text), partial(go_on, text))
            for text, turn in enumerate(turns)
        ]
        with self.mending(), self.recorder.timed("draft"):
            drafters = [turn.drafter for turn in turns]
            for turn, draft in zip(turns, drafts_of(drafters, asking), strict=True):
                turn.draft = draft
            prefetcher.end()

    def attempt(self, sequence: Sequence, bounds: DraftBounds) -> Turn:
        """A round that leaves the text, its entries and its drafter as they were, for measurements:
        drafted for, verified, and with the path that would be accepted. `lookahead` has its routes
        until the next round.
        """
        self.recorder.begin("attempt")
        cache, drafter = self.caches[sequence.row], self.drafters[sequence.row]
        self.turns = [turn] = [Turn(sequence, cache, drafter, bounds)]
        self.propose(self.turns, FixedDraftLength(bounds.length, nodes=bounds.nodes))
        (scored,) = self._score_turns(self.turns)
        self._accept(turn, scored)
        self.offload.supply.report()
        return turn

    def follow(self, token_ids: list[int], scored: Scored) -> None:
        """The text of the first cache goes on with these tokens, which were just verified: their
        entries are kept, and its drafter hears of them. `begin` is what forgets the text before.
        """
        self.cache.advance(len(token_ids))
        self.cache.settle()
        drafter = self.drafter
        if isinstance(drafter, Listener):
            drafter.hear(token_ids, scored.features)

    def verify(self, pending_id: int, draft: Draft) -> Scored:
        """Score a pending token behind the first cache, and a draft, with the exact experts."""
        (scored,) = self._scored([draft], lambda: [self.verification.score(pending_id, draft)])
        return scored

    def _score_turns(self, turns: list[Turn]) -> list[Scored]:
        """Score the pending tokens and drafts of all texts with the exact experts, in one pass.
        Nodes that are not `live` behind it were given up.
        """
        drafts = [turn.draft for turn in turns]

        def score() -> list[Scored]:
            if len(turns) == 1 and turns[0].sequence.row == 0:
                return [self.verification.score(turns[0].sequence.pending_id, drafts[0])]
            return self.verification.score_texts([turn.tokens for turn in turns])

        scored = self._scored(drafts, score)
        live = self.offload.rows.live
        for turn, first in zip(turns, place(drafts), strict=True):
            turn.first = first
            last = first + turn.draft.nodes
            turn.live = [row - first for row in live if first <= row < last]
        return scored

    def _scored(self, drafts: list[Draft], score: Callable[[], list[Scored]]) -> list[Scored]:
        """Verify drafts side by side. score: does so, with rows that may be given up."""
        rows, prices = self.offload.rows, self.prices
        self.lookahead.scored([draft.nodes for draft in drafts])
        probability = self.confidence.probability
        stakes = stakes_of(drafts, probability, prices.expert_s, prices.token_s)

        def begun() -> list[Scored]:
            rows.begin(stakes)
            return score()

        try:
            with self.mending():
                if self.approximation is None:
                    return begun()
                return [self.approximation.score(lambda: begun()[0], stakes.reach)]
        finally:
            rows.end()

    def _tell(self, turns: list[Turn], scored: list[Scored]) -> None:
        """Let drafters hear what the exact model made of the accepted paths."""
        for turn, each in zip(turns, scored, strict=True):
            drafter = self.drafters[turn.sequence.row]
            if isinstance(drafter, Listener) and turn.error is None:
                rows = [each.features[node : node + 1] for node in turn.outcome.path]
                drafter.hear(turn.accepted_ids, torch.cat(rows))

    def commit(self, turns: list[Turn], stats: StepStats) -> list[list[int]]:
        """Keep accepted paths in the KV caches, emit their tokens, complete the record."""
        self.offload.supply.report()
        emitted, kept = [], []
        stats.sequences = len(turns)
        for turn in turns:
            draft, outcome = turn.draft, turn.outcome
            turn.cache.keep_path(outcome.path)
            emitted.append(turn.sequence.extend(outcome.token_ids))
            if turn.error is not None:
                stats.sequences -= 1
                continue
            kept += turn.kept
            stats.draft_length += draft.depth
            stats.passes = max(stats.passes, draft.passes)
            stats.branches += draft.nodes - 1 - draft.depth
            stats.given_up += draft.nodes - len(turn.live)
            stats.accepted += outcome.accepted
            stats.emitted += len(emitted[-1])
            if len(turns) > 1:
                stats.drafts.append(DraftStats(draft.depth, outcome.accepted, turn.stopped))
            for lead, stood in draft.tried(outcome):
                self.confidence.learn(lead, stood)
        stats.named, stats.choices = self.lookahead.recall(kept)
        if len(kept) < stats.rows:
            self.recorder.rejected(self.lookahead.rejected(kept))
        return emitted

    @property
    def cache(self) -> KVCache:
        """Of single texts."""
        return self.caches[0]

    @property
    def drafter(self) -> Drafter:
        """Of single texts; measurements may put another one in its place."""
        return self.drafters[0]

    @drafter.setter
    def drafter(self, drafter: Drafter) -> None:
        self.drafters[0] = drafter

    @property
    def governor(self) -> Governor:
        """Of single texts."""
        return self.governors.alone

    @property
    def draft(self) -> Draft:
        """Of the first text of the last step."""
        return self.turns[0].draft if self.turns else Draft()

    @property
    def path(self) -> list[int]:
        """Nodes of that draft that were accepted, the pending token's first."""
        return self.turns[0].outcome.path if self.turns else []

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
            for cache in self.caches:
                cache.erase()
            raise

    def close(self) -> None:
        """Give back slots and KV cache, even where a traceback still holds this engine."""
        self.offload.supply.close()
        # Other ones may hold an INT4 copy that is given up.
        self.drafters, self.sides = [PlainDecoding() for _ in self.caches], []
        self.prefixes.listeners = []
        self.turns = []
        self.verification = EagerVerification(self.model, self.cache, self.offload.target)
        entries = [tensor for cache in self.caches for tensor in cache.tensors()]
        for tensor in (self.offload.slots, *entries):
            tensor.untyped_storage().resize_(0)


def drafts_of(drafters: list[Drafter], asking: list[Asking]) -> list[Draft]:
    """Of each text: in passes that are common to all, where drafters make such."""
    first = drafters[0]
    if len(drafters) > 1 and isinstance(first, SharedPasses):
        return first.propose_together(drafters, asking)
    pairs = zip(drafters, asking, strict=True)
    return [drafter.propose(*each) for drafter, each in pairs]


def within(decision: Decision, sequence: Sequence, cache: KVCache) -> Decision:
    """The governor's choice, short of drafting more than may still be emitted, and of a tree that
    the cache has no room for.
    """
    useful = sequence.remaining - 1
    if decision.nodes is not None:
        room = cache.capacity - cache.length - 1
        decision = replace(decision, nodes=min(decision.nodes, room))
    if decision.draft_length <= useful:
        return decision
    reason = f"{useful} left after the next token"
    drafter = decision.drafter if useful else None
    return Decision(useful, reason, "bound", nodes=decision.nodes, drafter=drafter)
