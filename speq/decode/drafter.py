"""The protocol of drafters, and the one that proposes nothing."""

from collections.abc import Callable
from typing import Protocol

from speq.decode.sequence import Draft, Sequence
from speq.layers.draft_experts import OnRoute

# Asked before each further token of a draft, told how many there are.
GoOn = Callable[[int], bool]


class Drafter(Protocol):
    def propose(
        self, sequence: Sequence, draft_length: int, on_route: OnRoute, go_on: GoOn
    ) -> Draft:
        """Propose up to `draft_length` tokens behind the sequence's pending one.

        on_route is told the routes as they become known, and go_on asked before each token but the
        first; drafters whose tokens come all at once, or without routes, need call neither.
        """


class PlainDecoding:
    """Proposes nothing: the exact model emits one token a step."""

    def propose(
        self, sequence: Sequence, draft_length: int, on_route: OnRoute, go_on: GoOn
    ) -> Draft:
        return Draft()
