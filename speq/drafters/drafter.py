"""The protocol of drafters, and the one that proposes nothing."""

from collections.abc import Callable
from typing import Protocol

from speq.routing import Route
from speq.sequence import Draft, Sequence

# Told (token of the draft, layer, route) once it is known; drafters without routes never call.
OnRoute = Callable[[int, int, Route], None]


class Drafter(Protocol):
    def propose(self, sequence: Sequence, draft_length: int, on_route: OnRoute) -> Draft:
        """Propose up to `draft_length` tokens behind the sequence's pending one."""


class PlainDecoding:
    """Proposes nothing: the exact model emits one token a step."""

    def propose(self, sequence: Sequence, draft_length: int, on_route: OnRoute) -> Draft:
        return Draft()
