"""Exact experts in an arena of slots, as each codec keeps them: what the exact bank runs.

Shape letters: T tokens, K experts of each, E experts of a layer, S slots, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotExperts:
    """The experts that lie in slots.

    op    multiplies rows by them: called with hidden_states, topk_ids and slot_table, then what
          `held` gives, then activation and out
    held  what the op takes of the experts of a layer: the arena, and what it takes to read it
    """

    op: Callable[..., None]
    held: Callable[[int], tuple[Any, ...]]

    def run(
        self,
        layer: int,
        hidden_states: Tensor,
        topk_ids: Tensor,
        slot_table: Tensor,
        activation: str,
        out: Tensor,
    ) -> None:
        """Run the rows of a layer whose experts are in slots.

        hidden_states  [T, H]; topk_ids [T, K] int64; slot_table [E] int64, negative for nowhere
        out            [T, K, H]: the unweighted output of each place of a route; rows whose expert
                       is in no slot are left as they are
        """
        self.op(hidden_states, topk_ids, slot_table, *self.held(layer), activation, out)
