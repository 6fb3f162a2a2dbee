"""A model whose experts are none, for tests of all else in a pass."""

from pathlib import Path

import torch
from torch import Tensor

from speq.devices.device import Processor
from speq.models import moe_model
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel
from speq.models.opened import open_model
from speq.routing import Route

# Tokens of a text.
PROMPT = 29


class SomeExperts:
    """Experts that are no experts, but differ from row to row and with the route. rows: of each
    layer's pass.
    """

    drafts = False

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        self.rows.append(len(route.topk_ids))
        weighed = (route.topk_ids + 1) * route.topk_weights.to(hidden_states.dtype)
        return hidden_states * weighed.sum(1, keepdim=True).sin() + layer


def loaded(path: Path, dtype: torch.dtype) -> tuple[MoEModel, KVCache]:
    opened = open_model(path)
    model = moe_model.load(opened.family, opened.checkpoint, dtype, Processor())
    shape = opened.shape
    device = torch.device("cpu")
    cache = shape.cache(64, dtype, device)
    opened.close()
    return model, cache
