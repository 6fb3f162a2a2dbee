"""The name of an expert."""

from typing import NamedTuple


class ExpertKey(NamedTuple):
    """An expert of the model: its MoE layer (counted among MoE layers) and its index there."""

    layer: int
    expert: int
