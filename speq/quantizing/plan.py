"""Memory plan of quantising, item by item, and the place of activations."""

from dataclasses import dataclass

import torch

from speq.errors import NoRoom
from speq.experts.expert_store import ExpertStore
from speq.files.alignment import ALIGNMENT
from speq.models.dense_parts import DenseShape
from speq.models.shape import ModelShape
from speq.quantizing.expert import EXPERT_ROWS
from speq.quantizing.lanes import Lanes
from speq.units import format_bytes

# Square matrices of the inputs' dimension that exist while a Hessian's inverse is factored.
FACTORING_MATRICES = 5
# Float32 copies of each weight of an expert: exact, rounded, quantised, updated by GPTQ, and codes
# during dequantization.
EXPERT_COPIES = 6
# Float32 rows of H and of F per token in a block of an expert's tokens.
HIDDEN_COPIES = 6
INNER_COPIES = 6
# Tokens whose logits are evaluated at a time.
SCORED_ROWS = 64


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """Memory plan. items: bytes by purpose. in_memory: whether activations are in memory."""

    items: dict[str, int]
    in_memory: bool


def plan_of(
    shape: ModelShape,
    store: ExpertStore,
    dtype: torch.dtype,
    lanes: Lanes,
    dense: tuple[DenseShape, ...],
    loading_bytes: int,
    budget: int,
) -> QuantizePlan:
    """Plan activations in memory if they fit, otherwise in files.

    dense          dense layers that are quantised as well
    loading_bytes  extra memory for loading the weights
    Raises SpeqError, with the items, if the budget is too small even then.
    """
    hidden, width = shape.experts.hidden_size, shape.experts.expert_width
    weights = shape.experts.weights
    squares = hidden**2 + width**2 + FACTORING_MATRICES * max(hidden, width) ** 2
    length = lanes.length
    items = {
        "non_expert_weights": shape.resident_bytes(dtype),
        "workspace": shape.workspace_bytes(length, SCORED_ROWS, length, dtype),
        "expert": store.codec.slot_bytes + store.reading_bytes + ALIGNMENT,
        "expert_in_float32": EXPERT_COPIES * weights * 4,
        "expert_rows": EXPERT_ROWS * 4 * (HIDDEN_COPIES * hidden + INNER_COPIES * width),
        "hessians": squares * 4,
        "routes": lanes.rows * (shape.top_k * 12 + 32),
    }
    if dense:
        items["dense_layers"] = max(
            dense_bytes([each for each in dense if each.layer == layer])
            for layer in {each.layer for each in dense}
        )
    kept = lanes.rows * hidden * (4 + dtype.itemsize)
    whole = items | {"activations": kept}
    if sum(whole.values()) <= budget:
        return QuantizePlan(whole, True)
    needed = max(sum(items.values()), items["non_expert_weights"] + loading_bytes)
    if needed > budget:
        listed = ", ".join(f"{n.replace('_', ' ')} {format_bytes(b)}" for n, b in items.items())
        raise NoRoom(
            f"memory budget {format_bytes(budget)} is too small to quantise this model, which "
            f"takes {listed}; the smallest workable budget is {needed} bytes "
            f"({format_bytes(needed)}), or less with fewer samples or shorter ones"
        )
    return QuantizePlan(items, False)


def dense_bytes(layers: list[DenseShape]) -> int:
    """Bytes for quantising one decoder layer's dense layers: at most a Hessian each, their codes
    and weights, and work memory of the largest.
    """
    kept = sum(4 * each.columns**2 + 3 * each.outputs * each.columns for each in layers)
    work = max(EXPERT_COPIES * each.outputs * each.columns for each in layers)
    factoring = FACTORING_MATRICES * max(each.columns for each in layers) ** 2
    return kept + 4 * (work + factoring)
