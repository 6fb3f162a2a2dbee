"""Exact experts in an arena of expert slots, packed by a codec, as the exact backend runs them.

Shape letters: T tokens, K experts of each, E experts of a layer, S slots, H hidden.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
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
    """

    op: Callable[..., None]
    held: Callable[[int], tuple[Any, ...]]
    plain: Callable[[int], PlainWords]

    def has(self, layer: int, expert: int) -> bool:
        """True if `op` runs an expert out of its slot, so that passes may go without the host."""
        return True

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


@dataclass(frozen=True, slots=True)
class WideBesideSlots(SlotExperts):
    """Experts in slots, and those of them that were too large for theirs.

    wide   experts of a layer that are
    words  reads one of them
    """

    wide: Callable[[int], Collection[int]]
    words: Callable[[int, int], PlainExpert]

    def has(self, layer: int, expert: int) -> bool:
        return expert not in self.wide(layer)

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
        found = self.wide(layer)  # readers of other experts may add to it meanwhile
        wide = [expert for expert in slots if expert in found]
        if wide and grouping.index is None:
            slot_table = slot_table.clone()
            slot_table[wide] = -1
        given = layer, hidden_states, grouping, slots, slot_table, activation, out, biases
        SlotExperts.run(self, *given)
        if grouping.index is not None:  # `plain` has read them
            return
        for expert in wide:
            alone = torch.full_like(slot_table, -1)
            alone[expert] = 0
            words = self.words(layer, expert)
            matrices = words.gate_up_proj.unsqueeze(0), words.down_proj.unsqueeze(0)
            ops.moe_grouped(
                *(hidden_states, grouping.topk_ids, alone, *matrices, activation, out, biases)
            )
