"""A small set of cells in which every pair of values of any two factors occurs."""

from itertools import combinations, product
from typing import Any, TypeVar

import pytest

Value = TypeVar("Value")


def pairwise(*factors: tuple[Value, ...]) -> list[tuple[Value, ...]]:
    """Cells of the product, chosen greedily: each adds as many pairs not yet seen as any can."""
    # A set of pairs is a number with a bit for each: factors have many cells together.
    bits: dict[tuple[int, Value, int, Value], int] = {}

    def pairs(cell: tuple[Value, ...]) -> int:
        seen = 0
        for i, j in combinations(range(len(cell)), 2):
            seen |= bits.setdefault((i, cell[i], j, cell[j]), 1 << len(bits))
        return seen

    cells = [(pairs(cell), cell) for cell in product(*factors)]
    missing = (1 << len(bits)) - 1
    chosen = []
    while missing:
        seen, best = max(cells, key=lambda each: (each[0] & missing).bit_count())
        chosen.append(best)
        missing &= ~seen
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
