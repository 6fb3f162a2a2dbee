"""Rows of verifications that are given up for no reason."""

import random
from collections.abc import Callable

from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.row_pruning import RowValues


class RandomRows:
    """Lets a subtree die in some layers, at random."""

    def __init__(self, seed: int, chance: float = 0.3) -> None:
        self._rng = random.Random(seed)
        self._chance = chance
        self.died = 0

    def active_rows(
        self,
        row_values: RowValues,
        rows: list[int],
        layer: int,
        missing: list[set[ExpertKey]],
        named: Callable[[int], bool],
    ) -> list[int]:
        if self._rng.random() > self._chance:
            return rows
        dead = {self._rng.choice([node for node in rows if row_values.parents[node] >= 0])}
        for node in rows:
            if row_values.parents[node] in dead:
                dead.add(node)
        self.died += len(dead)
        return [node for node in rows if node not in dead]
