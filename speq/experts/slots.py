"""Exact experts in an arena of slots, as each codec keeps them: what the exact bank runs.

Shape letters: T tokens, K experts of each, E experts of a layer, S slots, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from speq.kernels import ops
from speq.kernels.grouping import Grouping
from speq.kernels.ops import ExpertBiases, PlainExpert

# Called with an expert of a layer and its slot. What it returns is good until the next call.
PlainWords = Callable[[int, int], PlainExpert]


@dataclass(frozen=True, slots=True)
class SlotExperts:
    """The experts that lie in slots.

    op     multiplies rows by them: called with hidden_states, topk_ids and slot_table, then what
           `held` gives, then activation and out, and biases where experts have them
    held   what the op takes of the experts of a layer: the arena, and what it takes to read it
    plain  takes memory for the words of one expert where they are not read out of the slot itself,
           and reads experts of a layer into it, one after another
    """

    op: Callable[..., None]
    held: Callable[[int], tuple[Any, ...]]
    plain: Callable[[int], PlainWords]

    def run(
        self,
        layer: int,
        hidden_states: Tensor,
        grouping: Grouping,
        slots: dict[int, int],
        slot_table: Tensor,
        activation: str,
        out: Tensor,
        biases: ExpertBiases | None = None,
    ) -> None:
        """Run the rows of a layer whose experts are in slots. Nothing waits for the device.

        hidden_states  [T, H]; grouping: of their routes
        slots          the slot of each expert that is in one
        slot_table     [E] int64: the same on the device, negative for nowhere
        out            [T, K, H]: the unweighted output of each place of a route; rows whose expert
                       is in no slot are left as they are
        biases         of the layer's experts, if they have any
        """
        if grouping.index is None:
            held = self.held(layer)
            added = () if biases is None else (biases,)
            self.op(hidden_states, grouping.topk_ids, slot_table, *held, activation, out, *added)
        else:
            words = self.plain(layer)
            ops.moe_by_expert(hidden_states, grouping, slots, words, activation, out, biases)
