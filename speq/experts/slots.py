"""Exact experts in an arena of expert slots, packed by a codec, as the exact backend runs them.

Shape letters: T tokens, K experts of each, E experts of a layer, S slots, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from speq.kernels import ops
from speq.kernels.grouping import Grouping
from speq.kernels.ops import Activation, ExpertBiases, PlainExpert

# Decodes an expert of a layer from its slot; the result is valid until the next call.
PlainWords = Callable[[int, int], PlainExpert]


@dataclass(frozen=True, slots=True)
class SlotExperts:
    """The experts in slots.

    op     kernel that runs them: called with hidden_states, topk_ids and slot_table, then the
           output of `held`, then activation and out, and biases if experts have them
    held   returns the op's arguments for a layer's experts: the arena, and what decoding it needs
    plain  returns a function that decodes a layer's experts, one after another, into one buffer if
           the slot does not hold plain weights
    fixed  whether `op` alone runs experts, so that passes may go without the host
    """

    fixed: ClassVar[bool] = True
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
        activation: Activation,
        out: Tensor,
        biases: ExpertBiases | None = None,
    ) -> None:
        """Run the rows of a layer whose experts are in slots. The host does not wait for the
        device.

        hidden_states  [T, H]; grouping: of their routes
        slots          the slot of each expert that is in one
        slot_table     [E] int64: the same on the device, negative if not in a slot
        out            [T, K, H]: unweighted output of each place of a route; rows whose expert is
                       in no slot are not written
        biases         biases of the layer's experts, if they have any
        """
        if grouping.index is None:
            held = self.held(layer)
            added = () if biases is None else (biases,)
            self.op(hidden_states, grouping.topk_ids, slot_table, *held, activation, out, *added)
        else:
            words = self.plain(layer)
            ops.moe_by_expert(hidden_states, grouping, slots, words, activation, out, biases)
