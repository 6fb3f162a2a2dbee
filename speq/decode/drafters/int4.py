"""The model's own INT4 experts as draft (MoE-SpeQ 3.4.1): same network, same KV cache."""

from functools import partial
from typing import ClassVar

from speq.decode.draft_pass import draft_pass_over
from speq.decode.drafter import DraftBase, DraftBounds, GoOn
from speq.decode.drafters.best_first import BestFirst
from speq.decode.drafters.next_token import NextToken, next_token_on
from speq.decode.sequence import Draft, Sequence
from speq.layers.draft_experts import OnRoute


class Int4Drafter:
    """Drafts a chain or a tree, one token to each pass over the INT4 experts.

    next_token  chooses what follows each; measurements may put another one in its place
    """

    needs_int4: ClassVar[bool] = True

    def __init__(self, base: DraftBase) -> None:
        assert base.int4 is not None, "planned for"
        self._cache = base.cache
        self._confidence = base.confidence
        self.draft_pass = draft_pass_over(base.model, base.cache, base.int4, base.graphs_on)
        self.next_token: NextToken = next_token_on(base.sampler)

    def propose(
        self, sequence: Sequence, bounds: DraftBounds, on_route: OnRoute, go_on: GoOn
    ) -> Draft:
        """Draft as the exact model chooses, by the same noise, up to an end of text or as far as
        `go_on` lets it.

        The draft's KV entries are forgotten again: verification writes exact ones in their place.
        """
        before = self._cache.lengths[0]
        try:
            if bounds.nodes is None or not bounds.length:
                return self._chain(sequence, bounds.length, on_route, go_on)
            return self._tree(sequence, bounds.length, bounds.nodes, on_route, go_on)
        finally:
            self._cache.rewind(self._cache.lengths[0] - before)

    def _chain(self, sequence: Sequence, length: int, on_route: OnRoute, go_on: GoOn) -> Draft:
        tokens: list[int] = []
        leads: list[float | None] = []
        passes = 0
        while len(tokens) < length:
            if tokens and (sequence.ends(tokens[-1]) or not go_on(len(tokens), leads[-1])):
                break
            last = tokens[-1] if tokens else sequence.pending_id
            run, on_layer = partial(self.draft_pass.run, last), partial(on_route, len(tokens))
            chosen = self.next_token(run, sequence, tokens, on_layer)
            self._cache.advance(1)
            passes += 1
            if chosen is None:  # damaged codes must not end what needs no draft
                break
            tokens.append(chosen.token_id)
            leads.append(chosen.lead)
        return Draft.chain(tokens, leads, passes)

    def _tree(
        self, sequence: Sequence, passes: int, nodes: int, on_route: OnRoute, go_on: GoOn
    ) -> Draft:
        """Nodes that are run are the first of the tree, in the order in which they are run."""
        growing = BestFirst(self._confidence.probability)
        draft, node, last = growing.draft, 0, sequence.pending_id
        while True:
            run = partial(self.draft_pass.run, last, tree=growing.as_last())
            chosen = self.next_token(run, sequence, draft.above(node), partial(on_route, node))
            self._cache.advance(1)
            draft.passes += 1
            if chosen is None:
                break
            growing.found(node, chosen)
            best = growing.best(sequence.ends)
            if best is None or draft.passes == min(passes, nodes):
                break
            if not go_on(draft.passes, best.lead, best.parent):
                break
            node, last = growing.grow(best), best.token_id
        return growing.finished(nodes)
