"""The model itself with other experts as draft: same network, same KV cache (MoE-SpeQ 3.4.1)."""

from collections.abc import Sequence as Several
from functools import partial

from torch import Tensor

from speq.decode.draft_pass import OnLayer, draft_pass_over, run_together
from speq.decode.drafter import Asking, DraftBase, DraftBounds, GoOn
from speq.decode.drafters.best_first import BestFirst
from speq.decode.drafters.in_step import Ask, Drafting, in_step
from speq.decode.drafters.next_token import Asked, Chosen, NextToken, next_token_on, next_tokens_on
from speq.decode.sequence import Draft, Sequence
from speq.devices.device import Accelerator
from speq.layers.draft_experts import DraftBank, OnRoute
from speq.models.texts import TextTokens


class TwinDrafter:
    """Drafts a chain or a tree, one token to each pass over a bank of experts.

    graphs_on   the device that passes are recorded on; None: they are launched
    next_token  chooses what follows each; measurements may put another one in its place
    """

    def __init__(self, base: DraftBase, bank: DraftBank, graphs_on: Accelerator | None) -> None:
        self._model, self._bank, self._cache = base.model, bank, base.cache
        self._confidence = base.confidence
        self.draft_pass = draft_pass_over(base.model, base.cache, bank, graphs_on)
        self.next_token: NextToken = next_token_on(base.sampler)
        self._next_tokens = next_tokens_on(base.sampler)

    def propose(
        self, sequence: Sequence, bounds: DraftBounds, on_route: OnRoute, go_on: GoOn
    ) -> Draft:
        """Draft as the exact model chooses, by the same noise, up to an end of text or as far as
        `go_on` lets it.

        The draft's KV entries are forgotten again: verification writes exact ones in their place.
        """
        drafting = self.drafting(sequence, bounds, on_route, go_on)
        (draft,) = in_step([drafting], lambda _, asks: [self._answer(sequence, asks[0])])
        return draft

    def drafting(
        self, sequence: Sequence, bounds: DraftBounds, on_route: OnRoute, go_on: GoOn
    ) -> Drafting:
        """The same, pass by pass."""
        before = self._cache.length
        try:
            if bounds.nodes is None or not bounds.length:
                return (yield from self._chain(sequence, bounds.length, on_route, go_on))
            return (yield from self._tree(sequence, bounds.length, bounds.nodes, on_route, go_on))
        finally:
            self._cache.length = before

    def _answer(self, sequence: Sequence, ask: Ask) -> Chosen | None:
        """What follows the token that one text asks for."""
        run = partial(self.draft_pass.run, ask.token_id, tree=ask.tree)
        return self.next_token(run, sequence, ask.drafted, ask.on_layer)

    def _chain(self, sequence: Sequence, length: int, on_route: OnRoute, go_on: GoOn) -> Drafting:
        tokens: list[int] = []
        leads: list[float | None] = []
        passes = 0
        while len(tokens) < length:
            if tokens and (sequence.ends(tokens[-1]) or not go_on(len(tokens), leads[-1])):
                break
            last = tokens[-1] if tokens else sequence.pending_id
            chosen = yield Ask(last, tokens, partial(on_route, len(tokens)))
            self._cache.advance(1)
            passes += 1
            if chosen is None:  # damaged experts must not end what needs no draft
                break
            tokens.append(chosen.token_id)
            leads.append(chosen.lead)
        return Draft.chain(tokens, leads, passes)

    def _tree(
        self, sequence: Sequence, passes: int, nodes: int, on_route: OnRoute, go_on: GoOn
    ) -> Drafting:
        """Nodes that are run are the first of the tree, in the order in which they are run."""
        growing = BestFirst(self._confidence.probability)
        draft, node, last = growing.draft, 0, sequence.pending_id
        while True:
            on_layer = partial(on_route, node)
            chosen = yield Ask(last, draft.above(node), on_layer, growing.as_last())
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

    def propose_together(
        self, drafters: Several["TwinDrafter"], asking: Several[Asking]
    ) -> list[Draft]:
        """Position j of all texts is run in one pass."""
        batch = [each.sequence for each in asking]

        def answer(texts: list[int], asks: list[Ask]) -> list[Chosen | None]:
            if len(texts) == 1:
                return [drafters[texts[0]]._answer(batch[texts[0]], asks[0])]
            tokens = [
                TextTokens(drafters[text]._cache, [ask.token_id], ask.tree)
                for text, ask in zip(texts, asks, strict=True)
            ]

            def run(on_layer: OnLayer) -> Tensor:
                return run_together(self._model, self._bank, tokens, on_layer)

            return self._next_tokens(
                run,
                [
                    Asked(batch[text], ask.drafted, ask.on_layer)
                    for text, ask in zip(texts, asks, strict=True)
                ],
            )

        pairs = zip(drafters, asking, strict=True)
        return in_step([drafter.drafting(*each) for drafter, each in pairs], answer)
