"""How an exact expert is laid out in a record, in a file or in a slot: the ExpertCodec seam.

`raw` keeps the checkpoint's words; codes that take fewer bytes fit behind the same names.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from speq.store.alignment import aligned


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """One expert's matrices: gate_up_proj [2F, H], gate over up, and down_proj [H, F]."""

    hidden_size: int
    expert_width: int
    dtype: torch.dtype

    @property
    def gate_up_shape(self) -> tuple[int, int]:
        return (2 * self.expert_width, self.hidden_size)

    @property
    def down_shape(self) -> tuple[int, int]:
        return (self.hidden_size, self.expert_width)

    @property
    def weights(self) -> int:
        return 3 * self.hidden_size * self.expert_width

    @property
    def nbytes(self) -> int:
        return self.weights * self.dtype.itemsize


class ExpertCodec(Protocol):
    """Bytes of a record and of the slot it fills, and the matrices in an arena of slots."""

    @property
    def record_bytes(self) -> int: ...

    @property
    def slot_bytes(self) -> int:
        """A record's bytes in whole blocks, as reads past the page cache fill them."""

    def matrices(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """gate_up_proj [S, 2F, H] and down_proj [S, H, F] of slots [S, slot_bytes] uint8."""


@dataclass(frozen=True, slots=True)
class RawCodec:
    """Plain words in the checkpoint's dtype: gate, up, down, each row after row."""

    shape: ExpertShape

    @property
    def record_bytes(self) -> int:
        return self.shape.nbytes

    @property
    def slot_bytes(self) -> int:
        return aligned(self.record_bytes)

    def matrices(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.shape
        words = slots.view(shape.dtype)[:, : shape.weights]
        split = 2 * shape.expert_width * shape.hidden_size
        gate_up_proj = words[:, :split].unflatten(1, shape.gate_up_shape)
        return gate_up_proj, words[:, split:].unflatten(1, shape.down_shape)
