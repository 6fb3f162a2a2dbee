"""Divides the experts of each layer between a GPU and further ones of its kind."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peers:
    """Further GPUs that hold experts for good, and compute them.

    slots_bytes  what each has for slots
    rows         rows of a layer that all of them have room for
    covers       [E + 1] share of what tokens choose that is of so many experts of a layer, those
                 that are used most
    top_k        experts of a row; row_bytes: of its hidden state
    """

    slots_bytes: tuple[int, ...] = ()
    rows: int = 0
    covers: tuple[float, ...] = (0.0, 1.0)
    top_k: int = 0
    row_bytes: int = 0

    def room(self, slot_bytes: int, num_layers: int) -> tuple[int, ...]:
        """Experts of each layer that fit each GPU; together they leave the first one an expert."""
        found = [max(size // slot_bytes // num_layers, 0) for size in self.slots_bytes]
        most = len(self.covers) - 2
        found = [min(count, most) for count in found]
        while sum(found) > most:
            found[found.index(max(found))] -= 1
        return tuple(found)

    def most_rows(self, held: Sequence[int], moved_bytes: int) -> int:
        """Most rows of a layer that have their experts computed there: rows and results then move
        fewer bytes, over the links of both GPUs, than the experts over that of the first.

        held  experts of each layer on each GPU; moved_bytes: of one that is loaded
        """
        count = sum(held)
        moved_row = 2 * self.row_bytes * (1 + self.top_k * self.covers[count])
        return min(int(count * moved_bytes / moved_row), self.rows)


ALONE = Peers()


def dealt(held: Sequence[int], ranked: Sequence[int]) -> list[list[int]]:
    """Experts of a layer for each GPU, as many as it holds, of all ranks alike.

    ranked  the layer's experts, those that are used most first
    """
    turns = sorted(
        ((at + 0.5) / count, gpu) for gpu, count in enumerate(held) for at in range(count)
    )
    found: list[list[int]] = [[] for _ in held]
    for (_, gpu), expert in zip(turns, ranked, strict=False):
        found[gpu].append(expert)
    return found
