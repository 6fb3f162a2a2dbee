"""Drafts with a head: one layer over the exact model's hidden states, with KV of its own.

Tokens are ranked by the head's logits with the noise that the exact model samples with, so any tree
is lossless. If a head also predicts the token after the next, as Jakiro's does by the contrast of
its branches (CEPD), the last token of a path comes from the same pass as the one before it.
"""

from typing import ClassVar

from torch import Tensor

from speq.engine.draft import Draft
from speq.engine.drafter import ContinueDraft, DraftContext, DraftRequest, FeatureDrafter
from speq.engine.drafters.best_first import BestFirst
from speq.engine.drafters.next_token import Chosen, SamplePosition, next_tokens_on
from speq.engine.request import Request
from speq.errors import Broken, present
from speq.heads.draft_head import HeadState
from speq.heads.head_context import HeadContext
from speq.layers.draft_experts import OnRoute

# Tokens that may follow a node besides the likeliest: a head is less certain than an INT4 copy.
OTHERS = 7
# Scale of its logit margins, see `Confidence.assume`.
LEAD_SCALE = 1.0


class HeadDrafter(FeatureDrafter):
    """Drafts a chain or a tree, one token in each pass of the head.

    next_tokens  chooses the next tokens; measurements may replace it
    shape        of the head
    says_after   True if a path's last token comes from the pass before it; measurements may change
                 it
    """

    needs_int4: ClassVar[bool] = False

    def __init__(self, context: DraftContext) -> None:
        head = present(context.head, "drafter head has no head")
        self._context = HeadContext(context.model, head, context.cache.capacity)
        self.shape, self.says_after = head.shape, head.predicts_two
        self._confidence = context.confidence
        self._confidence.assume(LEAD_SCALE)
        self.next_tokens = next_tokens_on(context.sampler, OTHERS)

    def common_prefix_length(self, prompt_token_ids: list[int]) -> int:
        return self._context.common_prefix_length(prompt_token_ids)

    def reset(self, count: int, of: "HeadDrafter") -> None:
        self._context.reset(count, of._context)

    def observe_verified(self, token_ids: list[int], features: Tensor) -> None:
        self._context.observe_verified(token_ids, features)

    def propose(self, asked: DraftRequest) -> Draft:
        """Draft up to an end token or until `continue_draft` stops it.

        If the head predicts experts, `on_route` is called with those of the pending token and of
        each token after one that was run.
        """
        request, limits, on_route, continue_draft = asked
        if not limits.length:
            return Draft()
        context = self._context
        tokens = len(request.prompt_token_ids) + len(request.output_token_ids) - 1
        if context.verified_count != tokens:
            raise Broken(
                f"a head has observed {context.verified_count} of the {tokens} tokens before its "
                "draft"
            )
        state = context.root(request.pending_id)
        root = context.cache.length
        self._name(0, request.pending_id, None, on_route)
        try:
            if limits.nodes is None:
                return self._chain(request, limits.length, state, on_route, continue_draft)
            return self._tree(request, limits.length, limits.nodes, state, on_route, continue_draft)
        finally:
            context.forget(root)

    def _name(self, node: int, token_id: int, feature: Tensor | None, on_route: OnRoute) -> None:
        """Report the experts that the head predicts for a node. feature: see `HeadContext`"""
        if self._context.predicts_experts:
            for layer, route in self._context.routes(token_id, feature):
                on_route(node, layer, route)

    def _chain(
        self,
        request: Request,
        length: int,
        state: HeadState,
        on_route: OnRoute,
        continue_draft: ContinueDraft,
    ) -> Draft:
        tokens: list[int] = []
        logit_margins: list[float | None] = []
        passes = 0
        while True:
            chosen = self._after(state, request, tokens)
            passes += 1
            if chosen is None:  # a damaged head must not end a run, which needs no draft
                break
            tokens.append(chosen.token_id)
            logit_margins.append(chosen.logit_margin)
            last = len(tokens) == length or request.ends(tokens[-1])
            on = not last and continue_draft(passes, logit_margins[-1])
            self._name(len(tokens), tokens[-1], state.feature, on_route)
            if not on:
                break
            if self.says_after and len(tokens) == length - 1:
                tokens += self._beyond(state, request, tokens)
                logit_margins += [None] * (len(tokens) - len(logit_margins))
                break
            state = self._context.node(tokens[-1], state.feature)
        return Draft.chain(tokens, logit_margins, passes)

    def _tree(
        self,
        request: Request,
        length: int,
        nodes: int,
        state: HeadState,
        on_route: OnRoute,
        continue_draft: ContinueDraft,
    ) -> Draft:
        """Draft a tree. Its first nodes are those that were run, in that order."""
        growing = BestFirst(self._confidence.probability)
        draft, node, states = growing.draft, 0, {0: state}
        says_after = self.says_after and length > 1
        passes = min(length - says_after, nodes)
        while True:
            above = draft.above(node)
            chosen = self._after(states[node], request, above)
            draft.passes += 1
            if chosen is None:
                break
            ahead = [*above, chosen.token_id]
            beyond = self._beyond(states[node], request, ahead) if says_after else []
            growing.found(node, chosen, *beyond)
            best = growing.best(request.ends)
            if best is None or draft.passes >= passes:
                break
            if not continue_draft(draft.passes, best.logit_margin, best.parent):
                break
            node, parent = growing.grow(best), states[best.parent]
            self._name(node, best.token_id, parent.feature, on_route)
            states[node] = self._context.node(best.token_id, parent.feature, growing.as_last())
        draft = growing.finished(nodes)
        for leaf in range(len(states), draft.nodes):
            known = states.get(draft.parents[leaf - 1])
            if known is not None:
                self._name(leaf, draft.token_ids[leaf - 1], known.feature, on_route)
        return draft

    def _after(self, state: HeadState, request: Request, ahead: list[int]) -> Chosen | None:
        """Choose the token after the drafted tokens `ahead`; None if logits are not finite."""
        return self._choose(self._context.next_scores(state), request, ahead)

    def _beyond(self, state: HeadState, request: Request, ahead: list[int]) -> list[int]:
        """Choose the token after the next from the same state; empty if the head predicts none."""
        if not self.says_after:
            return []
        chosen = self._choose(self._context.after_scores(state), request, ahead)
        return [] if chosen is None else [chosen.token_id]

    def _choose(self, scores: Tensor, request: Request, ahead: list[int]) -> Chosen | None:
        positions = [SamplePosition(request, ahead, ignore_route)]
        return self.next_tokens(lambda on_layer: scores, positions)[0]


def ignore_route(layer: int, route: object) -> None:
    """Ignore routes: a head's pass has none."""
