"""The sizes of a checkpoint's MTP layer."""

from dataclasses import dataclass

import torch

from speq.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class MtpShape:
    """Sizes of the MTP layer, for planning memory.

    model      the model, whose attention layers have the same sizes
    words      elements of each tensor in the compute dtype
    own_bytes  bytes of each tensor with a dtype of its own: buffers, and the arena of its experts
    window     tokens that a row looks back, its own included; None: all
    """

    model: ModelShape
    words: tuple[int, ...]
    own_bytes: tuple[int, ...]
    window: int | None = None

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """No layers: it reads the model's last hidden states."""
        return ()

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        keys, values = self.model.attention.kv_shapes
        return keys, values

    @property
    def kv_elements_per_token(self) -> int:
        return sum(heads * width for heads, width in self.kv_shapes)

    def sizes(self, dtype: torch.dtype) -> list[int]:
        return [elements * dtype.itemsize for elements in self.words] + [*self.own_bytes]

    def nbytes(self, dtype: torch.dtype) -> int:
        return sum(self.sizes(dtype))

    def workspace_bytes(self, rows: int, vocab_size: int, context: int, dtype: torch.dtype) -> int:
        """Workspace of the model's own pass, which takes more."""
        return self.model.workspace_bytes(rows, 1, context, dtype)

    def features_bytes(self, rows: int, dtype: torch.dtype) -> int:
        """No bytes: a pass has its last hidden states anyway."""
        return 0
