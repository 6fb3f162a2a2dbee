"""Runs given sequences through the exact model and the draft (teacher forcing).

Neither sees the other's output, so one difference does not cause the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from speq.config import SamplingParams
from speq.engine.draft import Draft
from speq.engine.request import Request
from speq.measure.probe import follow, verify
from speq.models.packed_batch import SequenceTokens
from speq.runtime import Runtime
from speq.scheduler.lookahead import LookaheadBuffer


@dataclass(frozen=True, slots=True)
class ForcedPass:
    """Results for some tokens of a sequence: the exact model's in one pass, the draft's singly.

    start      position of the first of them in the sequence
    exact      [T, V] logits
    draft      [T, V] logits; None without a draft
    lookahead  both models' routes, until the next pass
    """

    start: int
    exact: Tensor
    draft: Tensor | None
    lookahead: LookaheadBuffer

    @property
    def tokens(self) -> int:
        return len(self.exact)


def forced_passes(runtime: Runtime, token_ids: list[int], rows: int) -> Iterator[ForcedPass]:
    """Run a sequence as verification would, `rows` tokens at a time, and singly as the draft would.

    As in a run, the draft reads the exact KV of earlier passes and its own within a pass. Between
    passes the cache has the exact KV of the sequence so far, and the drafter has observed it. A
    caller that runs more from there must leave both unchanged (`probe.attempt`).
    """
    engine, model = runtime.engine, runtime.model
    cache, lookahead = engine.caches[0], engine.lookahead
    engine.begin_prefill(Request(token_ids, SamplingParams(max_new_tokens=1)))
    for start in range(0, len(token_ids), rows):
        tokens = token_ids[start : start + rows]
        engine.recorder.begin("forced")
        lookahead.clear()
        drafted = []
        if runtime.draft_backend is not None:
            for at, token in enumerate(tokens):
                runtime.draft_backend.on_route = partial(lookahead.record, at)
                hidden = model.forward(runtime.draft_backend, [SequenceTokens(cache, [token])])[0]
                drafted.append(model.logits(hidden, runtime.draft_backend))
                cache.advance(1)
            cache.rewind(len(tokens))
        scored = verify(engine, tokens[0], Draft.chain(tokens[1:]))
        follow(engine, tokens, scored)
        draft = torch.cat(drafted) if drafted else None
        yield ForcedPass(start, scored.logits, draft, lookahead)
