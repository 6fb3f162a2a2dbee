"""Self-speculation: the model drafts with other experts and the same KV cache (MoE-SpeQ 3.4.1)."""

from collections.abc import Sequence
from functools import partial

from speq.devices.device import Accelerator
from speq.engine.draft import Draft
from speq.engine.draft_pass import draft_pass_over
from speq.engine.drafter import ContinueDraft, DraftContext, DraftLimits, DraftRequest
from speq.engine.drafters.best_first import BestFirst
from speq.engine.drafters.next_token import (
    Chosen,
    NextTokens,
    SamplePosition,
    next_tokens_on,
)
from speq.engine.drafters.shared_passes import Drafting, ForwardRequest, draft_together
from speq.engine.request import Request
from speq.layers.draft_experts import DraftBackend, OnRoute
from speq.models.packed_batch import SequenceTokens


class SelfDrafter:
    """Drafts a chain or a tree, one token in each pass over an expert backend.

    graphs_on    device to record passes on; None: they are launched
    next_tokens  chooses the next tokens; measurements may replace it
    """

    def __init__(
        self, context: DraftContext, backend: DraftBackend, graphs_on: Accelerator | None
    ) -> None:
        self._model, self._backend, self._cache = context.model, backend, context.cache
        self._confidence = context.confidence
        self.draft_pass = draft_pass_over(context.model, context.cache, backend, graphs_on)
        self.next_tokens: NextTokens = next_tokens_on(context.sampler)

    def propose(self, asked: DraftRequest) -> Draft:
        """Draft with the exact model's noise, to an end token or until `continue_draft` stops it.

        The draft's KV is dropped afterwards: verification writes exact KV in its place.
        """
        (draft,) = self.propose_together([self], [asked])
        return draft

    def drafting(
        self,
        request: Request,
        limits: DraftLimits,
        on_route: OnRoute,
        continue_draft: ContinueDraft,
    ) -> Drafting:
        """Draft pass by pass: yield the token that each pass runs."""
        before = self._cache.length
        try:
            if limits.nodes is None or not limits.length:
                return (yield from self._chain(request, limits.length, on_route, continue_draft))
            return (
                yield from self._tree(
                    request, limits.length, limits.nodes, on_route, continue_draft
                )
            )
        finally:
            self._cache.length = before

    def _chain(
        self, request: Request, length: int, on_route: OnRoute, continue_draft: ContinueDraft
    ) -> Drafting:
        tokens: list[int] = []
        logit_margins: list[float | None] = []
        passes = 0
        while len(tokens) < length:
            if tokens and (
                request.ends(tokens[-1]) or not continue_draft(len(tokens), logit_margins[-1])
            ):
                break
            last = tokens[-1] if tokens else request.pending_id
            chosen = yield ForwardRequest(last, tokens, partial(on_route, len(tokens)))
            self._cache.advance(1)
            passes += 1
            if chosen is None:  # damaged experts must not end a run, which needs no draft
                break
            tokens.append(chosen.token_id)
            logit_margins.append(chosen.logit_margin)
        return Draft.chain(tokens, logit_margins, passes)

    def _tree(
        self,
        request: Request,
        passes: int,
        nodes: int,
        on_route: OnRoute,
        continue_draft: ContinueDraft,
    ) -> Drafting:
        """Draft a tree. Its first nodes are those that were run, in that order."""
        growing = BestFirst(self._confidence.probability)
        draft, node, last = growing.draft, 0, request.pending_id
        while True:
            on_layer = partial(on_route, node)
            chosen = yield ForwardRequest(last, draft.above(node), on_layer, growing.as_last())
            self._cache.advance(1)
            draft.passes += 1
            if chosen is None:
                break
            growing.found(node, chosen)
            best = growing.best(request.ends)
            if best is None or draft.passes == min(passes, nodes):
                break
            if not continue_draft(draft.passes, best.logit_margin, best.parent):
                break
            node, last = growing.grow(best), best.token_id
        return growing.finished(nodes)

    def propose_together(
        self, drafters: Sequence["SelfDrafter"], requests: Sequence[DraftRequest]
    ) -> list[Draft]:
        """Run position j of all drafts in one pass."""

        def answer(indexes: list[int], forwards: list[ForwardRequest]) -> list[Chosen | None]:
            pairs = [*zip(indexes, forwards, strict=True)]
            batch = [
                SequenceTokens(drafters[index]._cache, [each.token_id], each.tree)
                for index, each in pairs
            ]
            positions = [
                SamplePosition(requests[index].request, each.drafted, each.on_layer)
                for index, each in pairs
            ]
            # The first one left: a pass of one sequence may be recorded over its own cache.
            drafter = drafters[indexes[0]]
            return drafter.next_tokens(partial(drafter.draft_pass.run, batch), positions)

        pairs = zip(drafters, requests, strict=True)
        return draft_together([drafter.drafting(*each) for drafter, each in pairs], answer)
