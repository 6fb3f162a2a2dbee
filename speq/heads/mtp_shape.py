"""The sizes of a checkpoint's layer that predicts tokens ahead (MTP)."""

from dataclasses import dataclass

import torch

from speq.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class MtpShape:
    """What memory is planned by.

    model      whose layers with attention are like this one
    words      elements of each tensor that is held in the compute dtype
    own_bytes  of each that is held in a dtype of its own: buffers, and the arena of its experts
    """

    model: ModelShape
    words: tuple[int, ...]
    own_bytes: tuple[int, ...]

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """None: it reads the model's last hidden states."""
        return ()

    @property
    def window(self) -> None:
        """It looks all the way back."""

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(heads, width) of keys and of values."""
        return self.model.attention.kv_shapes

    @property
    def kv_elements_per_token(self) -> int:
        return sum(heads * width for heads, width in self.kv_shapes)

    def sizes(self, dtype: torch.dtype) -> list[int]:
        """Bytes of each tensor."""
        return [elements * dtype.itemsize for elements in self.words] + [*self.own_bytes]

    def nbytes(self, dtype: torch.dtype) -> int:
        return sum(self.sizes(dtype))

    def workspace_bytes(self, rows: int, vocab_size: int, context: int, dtype: torch.dtype) -> int:
        """As `HeadSizes.workspace_bytes`: what the model's own pass takes is more."""
        return self.model.workspace_bytes(rows, 1, context, dtype)

    def features_bytes(self, rows: int, dtype: torch.dtype) -> int:
        """None: a pass has its last hidden states anyway."""
        return 0
