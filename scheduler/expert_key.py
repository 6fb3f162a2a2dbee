"""An expert's identity."""

from typing import NamedTuple


class ExpertKey(NamedTuple):
    """An expert: its MoE layer (counted among MoE layers) and its index there."""

    layer: int
    expert: int
