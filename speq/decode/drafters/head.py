"""A head as draft: one layer over the exact model's hidden states, with entries of its own, in
place of a second copy of the experts.

Tokens are ranked by what the head says under the noise that the exact model draws with, so that any
tree is lossless as it stands. Where a head says the token after the next as well, as Jakiro's does
by the contrast of its branches (CEPD), the last token of a path comes from the same pass as the one
before it.
"""

from typing import ClassVar

from torch import Tensor

from speq.decode.drafter import DraftBase, DraftBounds, GoOn
from speq.decode.drafters.best_first import BestFirst
from speq.decode.drafters.next_token import Chosen, next_token_on
from speq.decode.sequence import Draft, Sequence
from speq.errors import Broken, present
from speq.heads.draft_head import HeadState
from speq.heads.head_text import HeadText
from speq.layers.draft_experts import OnRoute

# Tokens that may follow a node besides the likeliest: a head is less certain than an INT4 copy.
OTHERS = 7
# What its leads mean at first, as `Confidence.assume` has it.
LEAD_SCALE = 1.0


class HeadDrafter:
    """Drafts a chain or a tree, one token to each pass over the head.

    next_token  chooses what follows each; measurements may put another one in its place
    shape       of the head
    says_after  whether a path's last token comes from the pass before it; measurements may have
                it take a pass of its own
    """

    needs_int4: ClassVar[bool] = False

    def __init__(self, base: DraftBase) -> None:
        head = present(base.head, "drafter head begins without a head")
        self._text = HeadText(base.model, head, base.cache.capacity)
        self.shape, self.says_after = head.shape, head.beyond
        self._confidence = base.confidence
        self._confidence.assume(LEAD_SCALE)
        self.next_token = next_token_on(base.sampler, OTHERS)

    def knows(self, prompt_ids: list[int]) -> int:
        return self._text.knows(prompt_ids)

    def begin(self, count: int, of: "HeadDrafter") -> None:
        self._text.begin(count, of._text)

    def hear(self, token_ids: list[int], features: Tensor) -> None:
        self._text.hear(token_ids, features)

    def propose(
        self, sequence: Sequence, bounds: DraftBounds, on_route: OnRoute, go_on: GoOn
    ) -> Draft:
        """Draft up to an end of text or as far as `go_on` lets it. Where the head names experts,
        on_route is told those of the pending token, and of each that follows one which was run.
        """
        if not bounds.length:
            return Draft()
        text = self._text
        tokens = len(sequence.prompt_ids) + len(sequence.generated_ids) - 1
        if text.heard != tokens:
            raise Broken(f"a head has heard {text.heard} of {tokens} tokens that it drafts behind")
        state = text.root(sequence.pending_id)
        root = text.cache.length
        self._name(0, sequence.pending_id, None, on_route)
        try:
            if bounds.nodes is None:
                return self._chain(sequence, bounds.length, state, on_route, go_on)
            return self._tree(sequence, bounds.length, bounds.nodes, state, on_route, go_on)
        finally:
            text.forget(root)

    def _name(self, node: int, token_id: int, feature: Tensor | None, on_route: OnRoute) -> None:
        """Tell what a node will want, as far as the head names it. feature: as of `HeadText`."""
        if self._text.names_experts:
            for layer, route in self._text.routes(token_id, feature):
                on_route(node, layer, route)

    def _chain(
        self, sequence: Sequence, length: int, state: HeadState, on_route: OnRoute, go_on: GoOn
    ) -> Draft:
        tokens: list[int] = []
        leads: list[float | None] = []
        passes = 0
        while True:
            chosen = self._after(state, sequence, tokens)
            passes += 1
            if chosen is None:  # a damaged head must not end what needs no draft
                break
            tokens.append(chosen.token_id)
            leads.append(chosen.lead)
            last = len(tokens) == length or sequence.ends(tokens[-1])
            on = not last and go_on(passes, leads[-1])
            self._name(len(tokens), tokens[-1], state.feature, on_route)
            if not on:
                break
            if self.says_after and len(tokens) == length - 1:
                tokens += self._beyond(state, sequence, tokens)
                leads += [None] * (len(tokens) - len(leads))
                break
            state = self._text.node(tokens[-1], state.feature)
        return Draft.chain(tokens, leads, passes)

    def _tree(
        self,
        sequence: Sequence,
        length: int,
        nodes: int,
        state: HeadState,
        on_route: OnRoute,
        go_on: GoOn,
    ) -> Draft:
        """Nodes that are run are the first of the tree, in the order in which they are run."""
        growing = BestFirst(self._confidence.probability)
        draft, node, states = growing.draft, 0, {0: state}
        says_after = self.says_after and length > 1
        passes = min(length - says_after, nodes)
        while True:
            above = draft.above(node)
            chosen = self._after(states[node], sequence, above)
            draft.passes += 1
            if chosen is None:
                break
            ahead = [*above, chosen.token_id]
            beyond = self._beyond(states[node], sequence, ahead) if says_after else []
            growing.found(node, chosen, *beyond)
            best = growing.best(sequence.ends)
            if best is None or draft.passes >= passes:
                break
            if not go_on(draft.passes, best.lead, best.parent):
                break
            node, parent = growing.grow(best), states[best.parent]
            self._name(node, best.token_id, parent.feature, on_route)
            states[node] = self._text.node(best.token_id, parent.feature, growing.as_last())
        draft = growing.finished(nodes)
        for leaf in range(len(states), draft.nodes):
            known = states.get(draft.parents[leaf - 1])
            if known is not None:
                self._name(leaf, draft.token_ids[leaf - 1], known.feature, on_route)
        return draft

    def _after(self, state: HeadState, sequence: Sequence, ahead: list[int]) -> Chosen | None:
        """What follows the sequence and `ahead`, drafted tokens; None where it is not finite."""
        scores = self._text.next_scores(state)
        return self.next_token(lambda on_layer: scores, sequence, ahead, nobody)

    def _beyond(self, state: HeadState, sequence: Sequence, ahead: list[int]) -> list[int]:
        """The token after the next, by the state that the last of `ahead` was chosen by; none where
        the head tells none.
        """
        if not self.says_after:
            return []
        scores = self._text.after_scores(state)
        chosen = self.next_token(lambda on_layer: scores, sequence, ahead, nobody)
        return [] if chosen is None else [chosen.token_id]


def nobody(layer: int, route: object) -> None:
    """Is told routes, of which a head has none."""
