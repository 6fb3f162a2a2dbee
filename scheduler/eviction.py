"""Policies that choose the resident expert to evict: the protocol, and a class for each."""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from speq.errors import Broken
from speq.scheduler.expert_key import ExpertKey

# Of an expert's frequency so much is the last token's.
RECENCY = 0.03
# The same of the probability that a token chooses it, by one mean or another. The first is slow to
# forget: it is best where use changes little, as on routes of a fixed law and of the bundled model.
# Where each text has experts of its own, it misses 2.8 times as often as the last.
RECENCIES = (0.03, 0.1, 0.3)
# Each visit tells which of them is best; of the mean of what they missed, so much is the last
# visit's.
JUDGED = 1 / 256
KEPT = 1 - np.array(RECENCIES)
# Least probability: no expert is expected never.
LEAST = 1e-12
# Prefetches may evict this many times the experts that the pass is expected to evict anyway. In
# replays of recorded routes, 1 moves the bytes of fetching on demand and leaves the link idle while
# the draft computes; 3 keeps it busy and moves a fifth more.
DARING = 1.75


class EvictionPolicy(Protocol):
    """Limits the slots of each layer and orders residents for eviction.

    A new policy has no resident. `speq.registries.CACHE_POLICIES` has the policies by name.

    keeps_all  True if nothing is ever evicted, so that the policy needs no hints
    """

    keeps_all: ClassVar[bool]

    def __init__(self, num_slots: int, num_layers: int, num_experts: int) -> None: ...

    def divide(self, num_slots: int) -> None:
        """Divide this number of slots among the layers from now on."""

    def quota(self, layer: int) -> int:
        """Slots the layer may fill at a time, at least one."""

    def touch(self, key: ExpertKey) -> None:
        """Note a use of `key`, which is resident or about to be."""

    def forget(self, key: ExpertKey) -> None:
        """Note that `key` is no longer resident."""

    def clear(self) -> None:
        """Note that no key is resident."""

    def observe(
        self, layer: int, topk_ids: NDArray[np.int64], topk_weights: NDArray[np.float32]
    ) -> None:
        """Note the exact model's route at `layer`, before the visit: ids and weights, [T, K]."""

    def visit(self, layer: int, experts: list[int]) -> None:
        """Note that the exact model is at `layer` and uses these experts."""

    def expect(self, rows: int) -> None:
        """Note the rows of the passes after this one; it is as many as this one's until told."""

    def hint_next_use(self, layer: int, experts: Iterable[int], known: float = 0.0) -> None:
        """Note experts of the next visit to `layer`.

        known  share of the visit's tokens whose experts are all hinted by now
        """

    def candidates(self, layer: int | None, ahead: bool = False) -> Iterable[ExpertKey]:
        """Residents of a layer, or of all layers (None), in the order of eviction.

        ahead  True for a prefetch, which evicts no expert that is known to be needed sooner
        """


class UntoldPolicy:
    """A policy to which routes, visits and hints say nothing."""

    def observe(
        self, layer: int, topk_ids: NDArray[np.int64], topk_weights: NDArray[np.float32]
    ) -> None:
        pass

    def visit(self, layer: int, experts: list[int]) -> None:
        pass

    def expect(self, rows: int) -> None:
        pass

    def hint_next_use(self, layer: int, experts: Iterable[int], known: float = 0.0) -> None:
        pass


class KeepAllPolicy(UntoldPolicy):
    """Evicts nothing: there are as many slots as experts."""

    keeps_all: ClassVar[bool] = True

    def __init__(self, num_slots: int, num_layers: int, num_experts: int) -> None:
        if num_slots < num_layers * num_experts:
            raise Broken(f"{num_slots} slots cannot hold all {num_layers * num_experts} experts")
        self._num_experts = num_experts

    def divide(self, num_slots: int) -> None:
        pass

    def quota(self, layer: int) -> int:
        return self._num_experts

    def touch(self, key: ExpertKey) -> None:
        pass

    def forget(self, key: ExpertKey) -> None:
        pass

    def clear(self) -> None:
        pass

    def candidates(self, layer: int | None, ahead: bool = False) -> Iterable[ExpertKey]:
        return ()


class LruPolicy(UntoldPolicy):
    """Evicts the least recently used expert; each layer has an equal share of slots.

    The policy of Mixtral-Offloading (arXiv:2312.17238). One order over all layers would be useless
    if slots are fewer than the experts of a pass: layers are visited in turn, so each would find
    its experts evicted by the other layers.
    """

    keeps_all: ClassVar[bool] = False

    def __init__(self, num_slots: int, num_layers: int, num_experts: int) -> None:
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

    def candidates(self, layer: int | None, ahead: bool = False) -> Iterable[ExpertKey]:
        if layer is not None:
            return self._own[layer]
        # The past does not tell which expert another layer needs sooner.
        return () if ahead else self._all


class LfuPolicy(LruPolicy):
    """Least frequently used out first: who was wanted by the fewest visits lately.

    MoE-Infinity's kind of count (arXiv:2401.14361), aged so that a new sequence is not judged by
    an old one.
    """

    def __init__(self, num_slots: int, num_layers: int, num_experts: int) -> None:
        super().__init__(num_slots, num_layers, num_experts)
        self._frequency = np.zeros((num_layers, num_experts))

    def visit(self, layer: int, experts: list[int]) -> None:
        self._frequency[layer] *= 1 - RECENCY
        self._frequency[layer, experts] += RECENCY

    def candidates(self, layer: int | None, ahead: bool = False) -> Iterable[ExpertKey]:
        # Ties are broken by LRU: the sort is stable.
        return sorted(super().candidates(layer, ahead), key=lambda key: self._frequency[key])


class EntropyPolicy(LruPolicy):
    """Least recently used out first, shares of slots by how many experts a layer's routing uses.

    That number is the exponential of the entropy of a layer's recent choices: a layer that uses
    few experts lends slots to layers that use many. Shares change once a pass. No layer has less
    than half an equal share.
    """

    def __init__(self, num_slots: int, num_layers: int, num_experts: int) -> None:
        self._frequency = np.full((num_layers, num_experts), 1 / num_experts)
        super().__init__(num_slots, num_layers, num_experts)

    def divide(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._share_out()

    def quota(self, layer: int) -> int:
        return max(1, int(self._shares[layer]))

    def visit(self, layer: int, experts: list[int]) -> None:
        self._frequency[layer] *= 1 - RECENCY
        self._frequency[layer, experts] += RECENCY / len(experts)
        if layer == self._num_layers - 1:
            self._share_out()

    def _share_out(self) -> None:
        """Divide the slots by spread; rounding gives the rest to the largest remainders."""
        share = self._frequency / self._frequency.sum(axis=1, keepdims=True)
        logs = np.log(share, out=np.zeros_like(share), where=share > 0)
        spread = np.exp(-(share * logs).sum(axis=1))
        # One slot for each layer, if there are enough.
        least = max(
            self._num_slots // (2 * self._num_layers), min(1, self._num_slots // self._num_layers)
        )
        rest = self._num_slots - least * self._num_layers
        exact = least + rest * spread / spread.sum()
        self._shares = np.floor(exact).astype(int)
        left = self._num_slots - int(self._shares.sum())
        self._shares[np.argsort(self._shares - exact, kind="stable")[:left]] += 1

    def candidates(self, layer: int | None, ahead: bool = False) -> Iterable[ExpertKey]:
        found = super().candidates(layer, ahead)
        if layer is not None:
            return found
        # Layers beyond their share give first.
        over = [len(own) > self.quota(at) for at, own in enumerate(self._own)]
        return sorted(found, key=lambda key: not over[key.layer])


class LookaheadPolicy:
    """Evicts the expert whose next use is expected last; all layers share all slots.

    Time is counted in visits to layers, which take turns. A hinted expert is needed at the next
    visit to its layer. A row of a visit chooses any other with the probability that was measured,
    independently of rows beside it: a visit of a prompt's rows wants nearly all experts.
    """

    keeps_all: ClassVar[bool] = False

    def __init__(self, num_slots: int, num_layers: int, num_experts: int) -> None:
        self._num_layers = num_layers
        shape = (num_layers, num_experts)
        # By each of RECENCIES: probabilities, and how many of a row's choices were lately not among
        # as many of the likeliest as a layer has slots.
        self._means = np.full((len(RECENCIES), *shape), 1 / num_experts)
        self._missed = np.zeros(len(RECENCIES))
        self._probability = self._means[0]
        self._hinted = np.zeros(shape, dtype=bool)  # for the layer's next visit
        self._known = np.zeros(num_layers)  # share of the next visit's tokens that are hinted
        self._rows = self._next_rows = 1  # of this pass, and of those after it
        self._chosen: NDArray[np.int64] | None = None  # by how many rows of the next visit
        self._layer = num_layers - 1
        self.divide(num_slots)
        self.clear()

    def divide(self, num_slots: int) -> None:
        self._num_slots = num_slots
        num_experts = self._probability.shape[1]
        self._share = min(max(num_slots // self._num_layers, 1), num_experts)

    def quota(self, layer: int) -> int:
        return self._num_slots

    def clear(self) -> None:
        self._resident = np.zeros(self._probability.shape, dtype=bool)
        self._order: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    def touch(self, key: ExpertKey) -> None:
        if not self._resident[key]:
            self._resident[key] = True
            self._order = None

    def forget(self, key: ExpertKey) -> None:
        self._resident[key] = False  # `candidates` skips its place in the order

    def hint_next_use(self, layer: int, experts: Iterable[int], known: float = 0.0) -> None:
        self._known[layer] = known
        self._hinted[layer, list(experts)] = True
        self._order = None

    def observe(
        self, layer: int, topk_ids: NDArray[np.int64], topk_weights: NDArray[np.float32]
    ) -> None:
        self._rows = self._next_rows = len(topk_ids)
        self._chosen = np.bincount(topk_ids.ravel(), minlength=self._probability.shape[1])

    def expect(self, rows: int) -> None:
        self._next_rows = rows

    def visit(self, layer: int, experts: list[int]) -> None:
        self._layer = layer
        self._known[layer] = 0.0
        if self._chosen is None:
            chosen = np.zeros(self._probability.shape[1])
            chosen[experts] = 1.0
        else:
            chosen = self._chosen / self._rows
        self._learn(self._means[:, layer], chosen)
        self._chosen = None
        self._hinted[layer] = False
        self._order = None

    def _learn(self, means: NDArray[np.float64], chosen: NDArray[np.float64]) -> None:
        """Judge and renew the probabilities of a layer's experts, [means, E]. chosen: share of the
        rows that chose each.
        """
        least = np.partition(means, -self._share, axis=1)[:, -self._share, None]
        missed = np.where(means < least, chosen, 0.0).sum(1)
        self._missed += JUDGED * (missed - self._missed)
        self._probability = self._means[self._missed.argmin()]
        kept = (KEPT**self._rows)[:, None]
        means *= kept
        means += (1 - kept) * chosen

    def candidates(self, layer: int | None, ahead: bool = False) -> Iterator[ExpertKey]:
        if ahead:
            yield from self._eviction_candidates()
            return
        if self._order is None:
            self._order = self._sorted()
        for at, expert in zip(*self._order, strict=True):
            if self._resident[at, expert] and layer in (None, at):
                yield ExpertKey(int(at), int(expert))

    def _eviction_candidates(self) -> Iterator[ExpertKey]:
        """Residents that a prefetch may evict.

        They are not hinted for this pass, and are among the last needed of all experts that are
        resident or hinted. These are Belady's choices made early (Cao et al., "A study of
        integrated prefetching and caching strategies", 1995: conservative prefetching).
        """
        count = 1 + math.ceil(DARING * (self._hinted & ~self._resident).sum())
        layers, experts = np.nonzero(self._resident | self._hinted)
        wanted = self._hinted[layers, experts]
        # A hinted expert is needed again in a later pass. So is one without a hint, as far as the
        # experts of this pass are known.
        known = np.where(wanted, 1.0, self._known[layers])
        needed = self._expected(layers, self._visits(layers, experts, known))
        order = np.argsort(-needed, kind="stable")[:count]
        for at in order[~wanted[order]]:
            key = ExpertKey(int(layers[at]), int(experts[at]))
            if self._resident[key]:  # it may have been evicted since
                yield key

    def _visits(
        self,
        layers: NDArray[np.int64],
        experts: NDArray[np.int64],
        known: NDArray[np.float64] | float = 0.0,
    ) -> NDArray[np.float64]:
        """Visits to their own layers that are expected to pass before experts are used.

        known  share of the next visit's tokens that are known not to want them
        """
        unwanted = 1 - np.maximum(self._probability[layers, experts], LEAST)
        later = 1 - unwanted**self._next_rows
        now = 1 - unwanted ** np.where(layers > self._layer, self._rows, self._next_rows)
        return (1 - (1 - known) * now) / later

    def _expected(
        self, layers: NDArray[np.int64], visits: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Visits to any layer until each of `layers` had `visits` more of its own."""
        return (layers - self._layer - 1) % self._num_layers + 1 + self._num_layers * visits

    def _sorted(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Layers and experts of the residents, the last needed first."""
        layers, experts = np.nonzero(self._resident)
        visits = np.where(self._hinted[layers, experts], 0.0, self._visits(layers, experts))
        order = np.argsort(-self._expected(layers, visits), kind="stable")
        return layers[order], experts[order]
