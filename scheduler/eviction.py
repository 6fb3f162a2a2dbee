"""Which resident expert makes room for the next: the protocol, and a class for each policy."""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from speq.errors import Broken
from speq.scheduler.expert_key import ExpertKey

# Of an expert's frequency, and of the probability that a visit wants it, so much is
# the last token's, or the last visit's where it matters little how many tokens that had.
RECENCY = 0.05
# A visit of many tokens, such as a prompt's, is no more than so much of the probability: it wants
# nearly all experts, and says little of visits of a few.
MOST_OF_A_VISIT = 0.5
# Prefetches may evict so many times what will have gone by the end of the pass anyway, as far as
# can be told. Replaying recorded routes, 1 keeps to the bytes of fetching on demand and leaves the
# link idle while the draft computes; 3 has it busy, and moves a fifth more.
DARING = 1.75


class EvictionPolicy(Protocol):
    """Says how many slots a layer may fill, and orders residents by how soon they may go.

    A policy is made for so many slots, MoE layers and experts of a layer, with no key resident.
    `speq.registries.CACHE_POLICIES` has the policies by name.

    keeps_all  whether nobody ever makes room, so that it need not be told what is wanted
    """

    keeps_all: ClassVar[bool]

    def __init__(self, num_slots: int, num_layers: int, num_experts: int) -> None: ...

    def divide(self, num_slots: int) -> None:
        """Share so many slots among the layers from now on."""

    def quota(self, layer: int) -> int:
        """Slots the layer may fill at a time, at least one."""

    def touch(self, key: ExpertKey) -> None:
        """`key` was asked for and is, or is about to be, resident."""

    def forget(self, key: ExpertKey) -> None:
        """`key` is no longer resident."""

    def clear(self) -> None:
        """No key is resident."""

    def observe(
        self, layer: int, topk_ids: NDArray[np.int64], topk_weights: NDArray[np.float32]
    ) -> None:
        """The exact model's route at `layer`, before the visit: ids and weights, both [T, K]."""

    def visit(self, layer: int, experts: list[int]) -> None:
        """The exact model is at `layer` and wants these."""

    def hint_next_use(self, layer: int, experts: Iterable[int], known: float = 0.0) -> None:
        """These are wanted at the next visit to `layer`; known: the share of the visit's tokens
        of which that is all.
        """

    def candidates(self, layer: int | None, ahead: bool = False) -> Iterable[ExpertKey]:
        """Residents of a layer, or of all (None), in the order in which they may be evicted.

        ahead: for a prefetch, which evicts nothing that is known to be needed sooner.
        """


class KeepAllPolicy:
    """For as many slots as there are experts: nobody makes room."""

    keeps_all: ClassVar[bool] = True

    def __init__(self, num_slots: int, num_layers: int, num_experts: int) -> None:
        if num_slots < num_layers * num_experts:
            raise Broken(f"{num_slots} slots are to keep {num_layers * num_experts} experts")
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

    def observe(
        self, layer: int, topk_ids: NDArray[np.int64], topk_weights: NDArray[np.float32]
    ) -> None:
        pass

    def visit(self, layer: int, experts: list[int]) -> None:
        pass

    def hint_next_use(self, layer: int, experts: Iterable[int], known: float = 0.0) -> None:
        pass

    def candidates(self, layer: int | None, ahead: bool = False) -> Iterable[ExpertKey]:
        return ()


class LruPolicy:
    """An equal share of slots for each layer, least recently used out first.

    The policy of Mixtral-Offloading (arXiv:2312.17238). A single order over all layers would be
    useless below the experts of a whole pass: layers are visited in turn, so that each would find
    its experts evicted by the layers since.
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

    def observe(
        self, layer: int, topk_ids: NDArray[np.int64], topk_weights: NDArray[np.float32]
    ) -> None:
        pass

    def visit(self, layer: int, experts: list[int]) -> None:
        pass

    def hint_next_use(self, layer: int, experts: Iterable[int], known: float = 0.0) -> None:
        pass

    def candidates(self, layer: int | None, ahead: bool = False) -> Iterable[ExpertKey]:
        if layer is not None:
            return self._own[layer]
        # What another layer needs sooner is not to be told from the past.
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
        # Among equals the least recently used: the order of LRU, sorted stably.
        return sorted(super().candidates(layer, ahead), key=lambda key: self._frequency[key])


class EntropyPolicy(LruPolicy):
    """Least recently used out first, shares of slots by how many experts a layer's routing uses.

    That number is the exponential of the entropy of a layer's recent choices: a layer that keeps
    to a few experts lends its slots to those that use many. Shares change once a pass, and no layer
    has less than half an equal one.
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

    def candidates(self, layer: int | None, ahead: bool = False) -> Iterable[ExpertKey]:
        found = super().candidates(layer, ahead)
        if layer is not None:
            return found
        # Whoever has more than its share gives first.
        over = [len(own) > self.quota(at) for at, own in enumerate(self._own)]
        return sorted(found, key=lambda key: not over[key.layer])


class LookaheadPolicy:
    """All slots for all layers; whoever is expected to be needed last goes first.

    Time is counted in visits to layers, which take turns. An expert that was foretold is needed at
    that visit of its layer. Any other is expected to let as many of the visits that are not known
    pass as lay between those that wanted it (a running mean).
    """

    keeps_all: ClassVar[bool] = False

    def __init__(self, num_slots: int, num_layers: int, num_experts: int) -> None:
        self._num_layers = num_layers
        shape = (num_layers, num_experts)
        self._probability = np.full(shape, 1 / num_experts)
        self._foretold = np.zeros(shape, dtype=bool)  # of the layer's next visit
        self._known = np.zeros(num_layers)  # of the next visit's tokens, the share foretold
        self._recency = RECENCY  # of the next visit
        self._layer = num_layers - 1
        self.divide(num_slots)
        self.clear()

    def divide(self, num_slots: int) -> None:
        self._num_slots = num_slots

    def quota(self, layer: int) -> int:
        return self._num_slots

    def clear(self) -> None:
        self._resident = np.zeros(self._probability.shape, dtype=bool)
        self._order: list[tuple[float, ExpertKey]] | None = None

    def touch(self, key: ExpertKey) -> None:
        if not self._resident[key]:
            self._resident[key] = True
            self._order = None

    def forget(self, key: ExpertKey) -> None:
        self._resident[key] = False  # its place in the order is passed over

    def hint_next_use(self, layer: int, experts: Iterable[int], known: float = 0.0) -> None:
        """The layer's next visit wants these, and perhaps others; known: the share of its tokens of
        which all is foretold by now.
        """
        self._known[layer] = known
        self._foretold[layer, list(experts)] = True
        self._order = None

    def observe(
        self, layer: int, topk_ids: NDArray[np.int64], topk_weights: NDArray[np.float32]
    ) -> None:
        self._recency = min(1 - (1 - RECENCY) ** len(topk_ids), MOST_OF_A_VISIT)

    def visit(self, layer: int, experts: list[int]) -> None:
        """The layer is visited and wants these; what was foretold of it has come or has not."""
        self._layer = layer
        self._known[layer] = 0.0
        self._probability[layer] *= 1 - self._recency
        self._probability[layer, experts] += self._recency
        self._foretold[layer] = False
        self._order = None

    def candidates(self, layer: int | None, ahead: bool = False) -> Iterator[ExpertKey]:
        if ahead:
            yield from self._eviction_candidates()
            return
        if self._order is None:
            self._order = self._sorted()
        for expected, key in self._order:
            if expected <= 0:
                return
            if self._resident[key] and layer in (None, key.layer):
                yield key

    def _eviction_candidates(self) -> Iterator[ExpertKey]:
        """Residents that a prefetch may evict: not wanted in this pass, and among those that are
        needed last of all that are there or still come before it ends.

        Belady's choices made early (Cao et al., "A study of integrated prefetching and caching
        strategies", 1995: conservative prefetching).
        """
        count = 1 + math.ceil(DARING * (self._foretold & ~self._resident).sum())
        layers, experts = np.nonzero(self._resident | self._foretold)
        wanted = self._foretold[layers, experts]
        # Whoever is wanted in this pass is needed again in a later one, as is, the more the more is
        # known of this one, whoever was not foretold.
        passed = np.where(wanted, 1.0, self._known[layers])
        visits = 1 / self._probability[layers, experts] - 1 + passed
        order = np.argsort(-self._expected(layers, visits), kind="stable")[:count]
        for at in order[~wanted[order]]:
            key = ExpertKey(int(layers[at]), int(experts[at]))
            if self._resident[key]:  # it may have gone since
                yield key

    def _expected(
        self, layers: NDArray[np.int64], visits: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Visits of any layer until those layers have let so many of their own pass."""
        return (layers - self._layer - 1) % self._num_layers + 1 + self._num_layers * visits

    def _sorted(self) -> list[tuple[float, ExpertKey]]:
        layers, experts = np.nonzero(self._resident)
        unknown = 1 / self._probability[layers, experts] - 1
        visits = np.where(self._foretold[layers, experts], 0.0, unknown)
        expected = self._expected(layers, visits)
        order = np.argsort(-expected, kind="stable")
        return [(float(expected[at]), ExpertKey(int(layers[at]), int(experts[at]))) for at in order]
