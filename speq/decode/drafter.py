"""The protocol of drafters, and the one that proposes nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from speq.decode.sampler import Sampler
from speq.decode.sequence import Draft, Sequence
from speq.devices.device import Accelerator
from speq.layers.draft_experts import DraftExperts, OnRoute
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel

# Asked before each further token of a draft, told how many there are and the lead of the last.
GoOn = Callable[[int, float | None], bool]


@dataclass(frozen=True, slots=True)
class DraftBase:
    """The loaded parts that a drafter may draft with.

    cache      the exact model's; a drafter leaves its length as it was
    int4       the INT4 copy of the experts, where one is held
    sampler    chooses tokens where the model computes
    graphs_on  the device that passes may be recorded on; None: they are not
    """

    model: MoEModel
    cache: KVCache
    int4: DraftExperts | None
    sampler: Sampler
    graphs_on: Accelerator | None = None


class Drafter(Protocol):
    """Made over a `DraftBase` whenever arenas are laid out.

    needs_int4  whether it drafts with the INT4 copy, which then must fit the budget
    """

    needs_int4: ClassVar[bool]

    def propose(
        self, sequence: Sequence, draft_length: int, on_route: OnRoute, go_on: GoOn
    ) -> Draft:
        """Propose up to `draft_length` tokens behind the sequence's pending one.

        on_route is told the routes as they become known, and go_on asked before each token but the
        first; drafters whose tokens come all at once, or without routes, need call neither.
        """


class PlainDecoding:
    """Proposes nothing: the exact model emits one token a step."""

    needs_int4: ClassVar[bool] = False

    def propose(
        self, sequence: Sequence, draft_length: int, on_route: OnRoute, go_on: GoOn
    ) -> Draft:
        return Draft()
