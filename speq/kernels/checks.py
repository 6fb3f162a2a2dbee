"""Checks of the ops' arguments."""

import math

import torch
from torch import Tensor

from speq.kernels import library
from speq.kernels.reference import ACTIVATIONS, Activation

FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
EXACT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    strided: bool = False,
) -> None:
    """Raise ValueError for another shape, dtype, device or layout; None in shape is any size.

    strided  whether the first dimension may have any stride, as in slots of an arena
    """
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; it must be on {device}")
    given = tensor.shape
    if len(given) != len(shape) or not _matches(given, shape):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(given)}; it must be [{sizes}]")
    contiguous = tensor.is_contiguous()
    if not contiguous and not (strided and _is_contiguous(given[1:], tensor.stride()[1:])):
        raise ValueError(f"{name} has strides {list(tensor.stride())}; it must be contiguous")


def _is_contiguous(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    wanted = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != wanted:
            return False
        wanted *= size
    return True


def _matches(given: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    # A plain loop takes half the time of `all`, and each kernel call makes several checks.
    for size, wanted in zip(given, shape, strict=True):
        if wanted is not None and size != wanted:
            return False
    return True


def check_int4(name: str, qweight: Tensor, scales: Tensor, rows: int, columns: int) -> None:
    """Raise ValueError unless codes and scales describe matrices [..., rows, columns]."""
    prefix = f"{name}_" if name else ""
    if qweight.shape[-2:] != (rows, columns // 2) or columns % 2:
        raise ValueError(
            f"{prefix}qweight has shape {list(qweight.shape)}; of a matrix [{rows}, {columns}] it "
            f"must be [{rows}, {columns} / 2]"
        )
    groups = scales.shape[-1]
    if scales.shape[-2] != rows or not groups or columns % groups or (columns // groups) % 2:
        raise ValueError(
            f"{prefix}scales has shape {list(scales.shape)}; of a matrix [{rows}, {columns}] it "
            f"must be [{rows}, {columns} / group_size] with an even group_size"
        )


def check_expert(gate_up_proj: Tensor, down_proj: Tensor) -> tuple[int, int, bool]:
    """Return hidden size and expert width of bfloat16 matrices gate_up [2F, H] or [F, H] and down
    [H, F], and whether they have a gate. Raises ValueError for others.
    """
    dtypes, device = (torch.bfloat16,), down_proj.device
    check_tensor("down_proj", down_proj, (None, None), dtypes, device)
    hidden_size, width = down_proj.shape
    gated = gate_up_proj.shape[0] != width
    shape = (2 * width if gated else width, hidden_size)
    check_tensor("gate_up_proj", gate_up_proj, shape, dtypes, device)
    return hidden_size, width, gated


def check_rows(hidden_states: Tensor, topk_ids: Tensor, slot_table: Tensor, out: Tensor) -> None:
    """Raise ValueError unless these are rows [T, H], their routes [T, K], a table of experts and an
    output [T, K, H].
    """
    rows, hidden_size = hidden_states.shape
    device = hidden_states.device
    check_tensor("hidden_states", hidden_states, (None, None), FLOAT_DTYPES, device)
    check_tensor("topk_ids", topk_ids, (rows, None), (torch.int64,), device)
    check_tensor("slot_table", slot_table, (None,), (torch.int64,), device)
    shape = (rows, topk_ids.shape[1], hidden_size)
    check_tensor("out", out, shape, (hidden_states.dtype,), device)


def activation_numbers(activation: Activation) -> tuple[int, float]:
    """An activation as ops take it. Raises ValueError if it is unknown, or cannot end there."""
    name, limit = activation
    code = library.ACTIVATION_CODES.get(name)
    if code is None:
        raise ValueError(f"activation {name!r} must be one of {', '.join(ACTIVATIONS)}")
    if not limit > 0:
        raise ValueError(f"activation {name!r} has the limit {limit}; it must be above 0")
    if not activation.gated and limit < math.inf:
        raise ValueError(
            f"activation {name!r} has the limit {limit}; without a gate there is none: leave it out"
        )
    return code, limit
