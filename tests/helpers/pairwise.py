"""A small set of cells in which every pair of values of any two factors occurs."""

from itertools import combinations, product
from typing import Any, TypeVar

import pytest

Value = TypeVar("Value")


def pairwise(*factors: tuple[Value, ...]) -> list[tuple[Value, ...]]:
    """Cells of the product, chosen greedily: each adds as many pairs not yet seen as any can."""

    def pairs(cell: tuple[Value, ...]) -> set[tuple[int, Value, int, Value]]:
        return {(i, cell[i], j, cell[j]) for i, j in combinations(range(len(cell)), 2)}

    cells = list(product(*factors))
    missing = set().union(*(pairs(cell) for cell in cells))
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs(cell) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def covering(*factors: tuple[Any, ...]) -> list[Any]:
    """The product as parameters of a test: its pairwise cells always run, the others are `full`."""
    always = set(pairwise(*factors))
    return [
        pytest.param(
            *cell,
            id="-".join(map(str, cell)).replace(" ", ""),
            marks=() if cell in always else pytest.mark.full,
        )
        for cell in product(*factors)
    ]
