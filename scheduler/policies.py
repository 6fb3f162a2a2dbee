"""Eviction by what was: least recently used, least frequently used, slots by routing entropy."""

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from speq.scheduler.expert_cache import EvictionPolicy, ExpertKey
from speq.scheduler.lookahead_policy import LookaheadPolicy

# Of an expert's frequency, and of the probability that a visit wants it, so much is the last visit.
RECENCY = 0.05


class LruPolicy:
    """An equal share of slots for each layer, least recently used out first.

    The policy of Mixtral-Offloading (arXiv:2312.17238). A single order over all layers would be
    useless below the experts of a whole pass: layers are visited in turn, so that each would find
    its experts evicted by the layers since.
    """

    def __init__(self, num_slots: int, num_layers: int) -> None:
        self._num_layers = num_layers
        self.divide(num_slots)
        self.clear()

    def divide(self, num_slots: int) -> None:
        self._share, self._rest = divmod(num_slots, self._num_layers)

    def clear(self) -> None:
        self._all: OrderedDict[ExpertKey, None] = OrderedDict()
        self._own: list[OrderedDict[ExpertKey, None]] = [
            OrderedDict() for _ in range(self._num_layers)
        ]

    def quota(self, layer: int) -> int:
        return max(1, self._share + (layer < self._rest))

    def touch(self, key: ExpertKey) -> None:
        for order in (self._all, self._own[key.layer]):
            order[key] = None
            order.move_to_end(key)

    def forget(self, key: ExpertKey) -> None:
        del self._all[key], self._own[key.layer][key]

    def visit(self, layer: int, experts: list[int]) -> None:
        pass

    def foretell(self, layer: int, experts: Iterable[int], known: float = 0.0) -> None:
        pass

    def candidates(self, layer: int | None, ahead: bool = False) -> Iterable[ExpertKey]:
        if layer is not None:
            return self._own[layer]
        # What another layer needs sooner is not to be told from the past.
        return () if ahead else self._all


class LfuPolicy(LruPolicy):
    """As LRU, but who was wanted by the fewest visits lately goes first (MoE-Infinity's kind of
    count, arXiv:2401.14361, aged so that a new text is not judged by an old one).
    """

    def __init__(self, num_slots: int, num_layers: int, num_experts: int) -> None:
        super().__init__(num_slots, num_layers)
        self._frequency = np.zeros((num_layers, num_experts))

    def visit(self, layer: int, experts: list[int]) -> None:
        self._frequency[layer] *= 1 - RECENCY
        self._frequency[layer, experts] += RECENCY

    def candidates(self, layer: int | None, ahead: bool = False) -> Iterable[ExpertKey]:
        # Among equals the least recently used: the order of LRU, sorted stably.
        return sorted(super().candidates(layer, ahead), key=lambda key: self._frequency[key])


class EntropyPolicy(LruPolicy):
    """As LRU, but layers share slots by how many experts their routing spreads over.

    That number is the exponential of the entropy of a layer's recent choices: a layer that keeps
    to a few experts lends its slots to those that use many. Shares change once a pass, and no layer
    has less than half an equal one.
    """

    def __init__(self, num_slots: int, num_layers: int, num_experts: int) -> None:
        self._frequency = np.full((num_layers, num_experts), 1 / num_experts)
        super().__init__(num_slots, num_layers)

    def divide(self, num_slots: int) -> None:
        super().divide(num_slots)
        self._num_slots = num_slots
        self._share_out()

    def quota(self, layer: int) -> int:
        return max(1, int(self._shares[layer]))

    def visit(self, layer: int, experts: list[int]) -> None:
        self._frequency[layer] *= 1 - RECENCY
        self._frequency[layer, experts] += RECENCY / len(experts)
        if layer == self._num_layers - 1:
            self._share_out()

    def candidates(self, layer: int | None, ahead: bool = False) -> Iterable[ExpertKey]:
        found = super().candidates(layer, ahead)
        if layer is not None:
            return found
        # Whoever has more than its share gives first.
        over = [len(own) > self.quota(at) for at, own in enumerate(self._own)]
        return sorted(found, key=lambda key: not over[key.layer])

    def _share_out(self) -> None:
        """Slots by spread, whole ones: what rounding leaves goes to the largest remainders."""
        share = self._frequency / self._frequency.sum(axis=1, keepdims=True)
        logs = np.log(share, out=np.zeros_like(share), where=share > 0)
        spread = np.exp(-(share * logs).sum(axis=1))
        # One each as far as there are so many.
        least = max(
            self._num_slots // (2 * self._num_layers), min(1, self._num_slots // self._num_layers)
        )
        rest = self._num_slots - least * self._num_layers
        exact = least + rest * spread / spread.sum()
        self._shares = np.floor(exact).astype(int)
        left = self._num_slots - int(self._shares.sum())
        self._shares[np.argsort(self._shares - exact, kind="stable")[:left]] += 1


def eviction_policy(name: str, num_slots: int, num_layers: int, num_experts: int) -> EvictionPolicy:
    """The policy of that name (`--cache-policy`), with no key resident."""
    match name:
        case "lru":
            return LruPolicy(num_slots, num_layers)
        case "lfu":
            return LfuPolicy(num_slots, num_layers, num_experts)
        case "entropy":
            return EntropyPolicy(num_slots, num_layers, num_experts)
        case "lookahead":
            return LookaheadPolicy(num_slots, num_layers, num_experts)
    raise ValueError(f"there is no policy {name}")
