"""Exact experts in an arena of slots, as each codec keeps them: what the exact bank runs.

Shape letters: T tokens, K experts of each, E experts of a layer, S slots, H hidden, F expert width.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from speq.kernels import compact_ops, ops
from speq.kernels.ops import Int4Bank


class SlotExperts(Protocol):
    """The experts that lie in slots."""

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


@dataclass(frozen=True, slots=True)
class RawExperts:
    """Plain words: gate_up_proj [S, 2F, H] and down_proj [S, H, F], views of the arena."""

    gate_up_proj: Tensor
    down_proj: Tensor

    def run(
        self,
        layer: int,
        hidden_states: Tensor,
        topk_ids: Tensor,
        slot_table: Tensor,
        activation: str,
        out: Tensor,
    ) -> None:
        matrices = self.gate_up_proj, self.down_proj
        ops.moe_grouped(hidden_states, topk_ids, slot_table, *matrices, activation, out)


@dataclass(frozen=True, slots=True)
class LosslessExperts:
    """Lossless records in slots [S, slot_bytes] uint8."""

    slots: Tensor
    expert_width: int

    def run(
        self,
        layer: int,
        hidden_states: Tensor,
        topk_ids: Tensor,
        slot_table: Tensor,
        activation: str,
        out: Tensor,
    ) -> None:
        compact_ops.moe_grouped_lossless(
            hidden_states, topk_ids, slot_table, self.slots, self.expert_width, activation, out
        )


@dataclass(frozen=True, slots=True)
class ResidualExperts:
    """Residual records in slots [S, slot_bytes] uint8, over the INT4 codes of `bank`.

    base_slots  of each layer, [E] int64: where an expert's codes lie
    """

    slots: Tensor
    bank: Int4Bank
    base_slots: tuple[Tensor, ...]

    def run(
        self,
        layer: int,
        hidden_states: Tensor,
        topk_ids: Tensor,
        slot_table: Tensor,
        activation: str,
        out: Tensor,
    ) -> None:
        compact_ops.moe_grouped_residual(
            hidden_states,
            topk_ids,
            slot_table,
            self.slots,
            self.base_slots[layer],
            self.bank,
            activation,
            out,
        )
