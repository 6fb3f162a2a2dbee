"""The protocol of drafters, and the one that proposes nothing."""

from typing import Protocol

from speq.layers.draft_experts import OnRoute
from speq.sequence import Draft, Sequence


class Drafter(Protocol):
    def propose(self, sequence: Sequence, draft_length: int, on_route: OnRoute) -> Draft:
        """Propose up to `draft_length` tokens behind the sequence's pending one.

        on_route is told the routes as they become known; drafters without routes never call it.
        """


class PlainDecoding:
    """Proposes nothing: the exact model emits one token a step."""

    def propose(self, sequence: Sequence, draft_length: int, on_route: OnRoute) -> Draft:
        return Draft()
