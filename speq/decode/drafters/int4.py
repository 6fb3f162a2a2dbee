"""The model's own INT4 experts as draft (MoE-SpeQ 3.4.1): same network, same KV cache."""

from functools import partial
from typing import ClassVar

from speq.decode.draft_pass import draft_pass_over
from speq.decode.drafter import DraftBase, GoOn
from speq.decode.drafters.next_token import NextToken, next_token_on
from speq.decode.sequence import Draft, Sequence
from speq.layers.draft_experts import OnRoute


class Int4Drafter:
    """Drafts a chain, one pass over the INT4 experts for each token.

    next_token  chooses each; measurements may put another one in its place
    """

    needs_int4: ClassVar[bool] = True

    def __init__(self, base: DraftBase) -> None:
        assert base.int4 is not None, "planned for"
        self._cache = base.cache
        self.draft_pass = draft_pass_over(base.model, base.cache, base.int4, base.graphs_on)
        self.next_token: NextToken = next_token_on(base.sampler)

    def propose(
        self, sequence: Sequence, draft_length: int, on_route: OnRoute, go_on: GoOn
    ) -> Draft:
        """Draft as the exact model chooses, by the same noise, up to an end of text or as far as
        `go_on` lets it.

        The draft's KV entries are forgotten again: verification writes exact ones in their place.
        """
        tokens: list[int] = []
        leads: list[float | None] = []
        written = 0
        try:
            while len(tokens) < draft_length:
                if tokens and (sequence.ends(tokens[-1]) or not go_on(len(tokens), leads[-1])):
                    break
                last = tokens[-1] if tokens else sequence.pending_id
                run, on_layer = partial(self.draft_pass.run, last), partial(on_route, len(tokens))
                chosen = self.next_token(run, sequence, tokens, on_layer)
                self._cache.advance(1)
                written += 1
                if chosen is None:  # damaged codes must not end what needs no draft
                    break
                tokens.append(chosen.token_id)
                leads.append(chosen.lead)
        finally:
            self._cache.rewind(written)
        return Draft.chain(tokens, leads)
