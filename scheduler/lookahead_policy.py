"""Eviction by the next use: Belady's rule on what is known, and expectation beyond."""

import math
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from speq.scheduler.expert_cache import ExpertKey

# Of the probability that a visit to its layer wants an expert, so much is the last visit's.
RECENCY = 0.1
# Prefetches may evict so many times what will have gone by the end of the pass anyway, as far as
# can be told. Replaying recorded routes, 1 keeps to the bytes of fetching on demand and leaves the
# link idle while the draft computes; 3 has it busy, and moves a fifth more.
DARING = 1.75


class LookaheadPolicy:
    """All slots for all layers; whoever is expected to be needed last goes first.

    Time is counted in visits to layers, which take turns. An expert that was foretold is needed at
    that visit of its layer. Any other is expected to let as many of the visits that are not known
    pass as lay between those that wanted it (a running mean).
    """

    def __init__(self, num_slots: int, num_layers: int, num_experts: int) -> None:
        self._num_layers = num_layers
        shape = (num_layers, num_experts)
        self._probability = np.full(shape, 1 / num_experts)
        # By layer: what its coming visits want, the next one first, as far as that is known.
        self._coming: list[deque[set[int]]] = [deque() for _ in range(num_layers)]
        self._whole = [0] * num_layers  # of them, so many are known to the last expert
        self._foretold = np.full(shape, np.inf)  # visits of the layer until the one foretold
        self._known = np.zeros(num_layers)  # of the next visit's tokens, the share foretold
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

    def foretell(self, layer: int, experts: Iterable[int], known: float = 0.0) -> None:
        """The layer's next visit wants these, and perhaps others; known: the share of its tokens of
        which all is foretold by now.
        """
        self._known[layer] = known
        if not self._coming[layer]:
            self._coming[layer].append(set())
        wanted = list(experts)
        self._coming[layer][0].update(wanted)
        self._foretold[layer, wanted] = 0
        self._order = None

    def foresee(self, layer: int, experts: Iterable[int]) -> None:
        """The visit after those of the layer that are known wants these and no others."""
        self._foretold[layer, [e for e in experts if np.isinf(self._foretold[layer, e])]] = len(
            self._coming[layer]
        )
        self._coming[layer].append(set(experts))
        self._whole[layer] += 1
        self._order = None

    def visit(self, layer: int, experts: list[int]) -> None:
        """The layer is visited and wants these; what was foretold of it has come or has not."""
        self._layer = layer
        self._known[layer] = 0.0
        self._probability[layer] *= 1 - RECENCY
        self._probability[layer, experts] += RECENCY
        if self._coming[layer]:
            self._coming[layer].popleft()
            self._whole[layer] = max(self._whole[layer] - 1, 0)
            self._foretold[layer] = np.inf
            for visits, wanted in reversed(list(enumerate(self._coming[layer]))):
                self._foretold[layer, list(wanted)] = visits
        self._order = None

    def candidates(self, layer: int | None, ahead: bool = False) -> Iterator[ExpertKey]:
        if ahead:
            yield from self._doomed()
            return
        if self._order is None:
            self._order = self._sorted()
        for expected, key in self._order:
            if expected <= 0:
                return
            if self._resident[key] and layer in (None, key.layer):
                yield key

    def _doomed(self) -> Iterator[ExpertKey]:
        """Residents that a prefetch may evict: not wanted in this pass, and among those that are
        needed last of all that are there or still come before it ends.

        Belady's choices made early (Cao et al., "A study of integrated prefetching and caching
        strategies", 1995: conservative prefetching).
        """
        wanted = self._foretold == 0
        count = 1 + math.ceil(DARING * (wanted & ~self._resident).sum())
        layers, experts = np.nonzero(self._resident | wanted)
        wanted = wanted[layers, experts]
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
        foretold = self._foretold[layers, experts]
        unknown = np.array(self._whole)[layers] + 1 / self._probability[layers, experts] - 1
        visits = np.where(np.isinf(foretold), unknown, foretold)
        expected = self._expected(layers, visits)
        order = np.argsort(-expected, kind="stable")
        return [(float(expected[at]), ExpertKey(int(layers[at]), int(experts[at]))) for at in order]
