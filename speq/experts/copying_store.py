"""Published experts in lossless slots, while a packed copy of them is being made.

An expert whose record is in the copy is read from there. All others are read as published and
encoded into their slots, so that slots hold as many experts as in later runs.

Slots are made for the largest of some experts that are encoded at load, and a little more. An
expert that turns out larger comes into no slot: its weights are read whenever it is computed.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from speq.errors import NoRoom
from speq.experts.codec import ExpertCodec
from speq.experts.encoding_store import EncodingStore
from speq.experts.expert_store import ExpertStore, expert_slot
from speq.experts.packed_copy import PackedCopy
from speq.experts.slots import PlainWords, SlotExperts
from speq.files.alignment import align, allocate_aligned
from speq.kernels import ops
from speq.kernels.grouping import Grouping
from speq.kernels.ops import Activation, ExpertBiases, PlainExpert

logger = logging.getLogger("speq")

# Experts that are encoded to find the size of slots: as many as have so many bytes of weights,
# within these bounds.
SAMPLED_BYTES, LEAST_SAMPLED, MOST_SAMPLED = 256 << 20, 8, 32
# Slots are larger than the largest of them by this share: a bit less than a third of a bit per
# weight, or 3 of 100 weights more that have no class.
SLOT_MARGIN = 0.02


def copied_slot_bytes(words: ExpertStore, codec: ExpertCodec) -> int:
    """Bytes of a slot for the experts of a copy that does not exist yet, by encoding some of them.

    Raises SpeqError for experts that cannot be read.
    """
    count = words.num_layers * words.num_experts
    fits = SAMPLED_BYTES // words.codec.slot_bytes
    sampled = min(max(fits, LEAST_SAMPLED), MOST_SAMPLED, count)
    slot, room = expert_slot(words), allocate_aligned(1, codec.slot_bytes)[0]
    largest = 0
    for at in range(sampled):
        words.read(*divmod(at * count // sampled, words.num_experts), slot)
        largest = max(largest, codec.encode(words.codec.decode(slot), None, room))
    return align(min(int((1 + SLOT_MARGIN) * largest), codec.record_range[1]))


class CopyingStore(EncodingStore):
    """Store that fills slots from a copy in the making, or by encoding published weights.

    codec  of the copy, with the slots of this run
    """

    def __init__(self, words: ExpertStore, codec: ExpertCodec, copy: PackedCopy) -> None:
        super().__init__(words, codec)
        self._codec = codec
        self._copy = copy
        self.verified = copy.verified
        count = words.num_layers * words.num_experts
        # Of each expert when it was last read: bytes in its slot, and bytes moved.
        self._sizes, self._moved = [0] * count, [words.moved_bytes(0, 0)] * count
        # By layer, experts that fit no slot.
        self._wide: list[set[int]] = [set() for _ in range(words.num_layers)]
        self._wide_words: Tensor | None = None

    def moved_bytes(self, layer: int, expert: int) -> int:
        return self._moved[layer * self.num_experts + expert]

    def read(self, layer: int, expert: int, slot: Tensor) -> int:
        at = layer * self.num_experts + expert
        if expert in self._wide[layer]:
            self._moved[at] = 0
            return 0
        record = self._copy.read(at, slot)
        if record is not None:
            self._sizes[at] = self._moved[at] = record.nbytes
            return record.nbytes
        self._moved[at] = self.words.moved_bytes(layer, expert)
        try:
            self._sizes[at], read_bytes = self._fill(at, slot)
        except NoRoom:
            self._set_wide(layer, expert)
            read_bytes = self._moved[at]
        return read_bytes

    def _set_wide(self, layer: int, expert: int) -> None:
        if not any(self._wide):  # the first of perhaps many
            logger.warning(
                "expert %d in MoE layer %d is larger than the slots, which were made for the "
                "largest of some others: it is read from disk whenever it is computed, until a "
                "later run has the whole packed copy; codec raw has slots for all",
                *(expert, layer),
            )
        self._wide[layer].add(expert)

    def experts(self, slots: Tensor) -> SlotExperts:
        """Wrap the experts in slots [S, slot_bytes] uint8, with those that fit none."""
        held = self._codec.experts(slots, None)

        def plain(layer: int) -> PlainWords:
            read, wide = held.plain(layer), self._wide[layer]
            return lambda expert, slot: (
                self._plain(layer, expert) if expert in wide else read(expert, slot)
            )

        return WideBesideSlots(held.op, held.held, plain, self._wide.__getitem__, self._plain)

    def _plain(self, layer: int, expert: int) -> PlainExpert:
        """Read an expert's weights, valid until the next call. The computing thread alone calls."""
        if self._wide_words is None:
            self._wide_words = expert_slot(self.words)
        self.words.read(layer, expert, self._wide_words)
        return PlainExpert(*self.words.codec.decode(self._wide_words))


@dataclass(frozen=True, slots=True)
class WideBesideSlots(SlotExperts):
    """Experts in slots, and those of them that were too large for theirs.

    wide   experts of a layer that are
    words  reads one of them
    """

    fixed: ClassVar[bool] = False
    wide: Callable[[int], Collection[int]]
    words: Callable[[int, int], PlainExpert]

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
