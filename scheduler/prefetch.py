"""Has the experts a verification needs in slots when its layers compute.

`OnDemand` fetches what is missing when it is asked for, as Mixtral-Offloading does: the baseline
(`--prefetch none`) that everything cleverer is compared with. `DraftGuided` fetches what the draft
names, as it names it (MoE-SpeQ 3.3.2).
"""

from collections import Counter
from collections.abc import Generator
from enum import Enum
from typing import Protocol

from speq.routing import Route
from speq.scheduler.expert_cache import ExpertKey
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.supply import ExpertSupply
from speq.scheduler.transfer import Priority

# Prefetches under way at a time: those asked for later may be more urgent.
QUEUE = 8
# Of the tokens a draft is to have, the first third primes, the second is guided (MoE-SpeQ 3.3.2).
PHASES = 3


class Prefetcher(Protocol):
    """Serves verifications, and hears of the draft before them."""

    lookahead: LookaheadBuffer

    def begin(self, draft_length: int) -> None:
        """A step follows that drafts so many tokens at most."""

    def request(self, token: int, layer: int, route: Route) -> None:
        """A draft's route, as soon as it is known."""

    def serve(self, layer: int, experts: list[int]) -> Generator[dict[int, int], None, None]:
        """Yield {expert: slot} in waves that together name each of `experts` once."""


class OnDemand:
    """Serve a layer's experts out of the slots, fetching those that are missing."""

    def __init__(self, supply: ExpertSupply, lookahead: LookaheadBuffer) -> None:
        self.lookahead = lookahead
        self._supply = supply

    def begin(self, draft_length: int) -> None:
        self.lookahead.clear()

    def request(self, token: int, layer: int, route: Route) -> None:
        self.lookahead.record(token, layer, route)
        self._supply.cache.policy.foretell(layer, route.topk_ids.flatten().tolist())

    def serve(self, layer: int, experts: list[int]) -> Generator[dict[int, int], None, None]:
        return self._supply.serve(layer, experts)


class Mode(Enum):
    """When the draft's routes are acted on.

    SINGLE_SOONER  once, when the first drafted token has named its experts
    SINGLE_LATER   once, when the last one has
    THREE_PHASE    not while the first third of the tokens is drafted; then what is likely; from
                   the last third on everything, in the order of layers, through the verification
    """

    SINGLE_SOONER = "single-sooner"
    SINGLE_LATER = "single-later"
    THREE_PHASE = "three-phase"


class DraftGuided:
    """Prefetches what the draft names."""

    def __init__(self, supply: ExpertSupply, lookahead: LookaheadBuffer, mode: Mode) -> None:
        self.lookahead = lookahead
        self._supply = supply
        self._mode = mode
        self.begin(0)

    def begin(self, draft_length: int) -> None:
        self.lookahead.clear()
        self._draft_length = draft_length
        # By layer: how many tokens want each expert, and which of them are likely to be used.
        self._wanted: list[Counter[int]] = [Counter() for _ in range(self.lookahead.num_layers)]
        self._likely: list[set[int]] = [set() for _ in range(self.lookahead.num_layers)]
        self._next_layer = 0

    def request(self, token: int, layer: int, route: Route) -> None:
        self.lookahead.record(token, layer, route)
        experts = route.topk_ids.flatten().tolist()
        self._wanted[layer].update(experts)
        self._supply.cache.policy.foretell(layer, experts)
        last_layer = layer + 1 == self.lookahead.num_layers
        if self._mode is Mode.THREE_PHASE:
            phase = PHASES * token // max(self._draft_length, 1)
            if phase == 1:
                weights = route.topk_weights.flatten()
                # One token's choice is likely to be used if it has its even share of the weight.
                even = float(weights.sum()) / len(experts)
                named = zip(experts, weights.tolist(), strict=True)
                self._likely[layer] |= {e for e, weight in named if weight >= even}
            if phase:
                self._load(likely_only=phase == 1)
        elif last_layer:
            at = 0 if self._mode is Mode.SINGLE_SOONER else self._draft_length - 1
            if token == at:
                self._load(likely_only=False, queue=None)

    def serve(self, layer: int, experts: list[int]) -> Generator[dict[int, int], None, None]:
        self._next_layer = layer + 1
        if self._mode is Mode.THREE_PHASE:
            yield from self._supply.serve(layer, experts, lambda: self._load(likely_only=False))
        else:
            yield from self._supply.serve(layer, experts)
        self._supply.withdraw(layer)

    def _load(self, likely_only: bool, queue: int | None = QUEUE) -> None:
        """Ask for what is wanted and missing, by layer, what most tokens want first."""
        for layer in range(self._next_layer, self.lookahead.num_layers):
            keys = [
                ExpertKey(layer, expert)
                for expert, tokens in self._wanted[layer].most_common()
                if not likely_only or tokens > 1 or expert in self._likely[layer]
            ]
            with self._supply.keeping(keys):
                for key in keys:
                    if queue is not None and self._supply.under_way >= queue:
                        return
                    if not self._supply.load(key, Priority.PREFETCH):
                        break
