"""The kernels as torch ops: schemas, checks, and the choice between native and reference.

Each op is declared once, here. The reference is its default implementation on every device; a
native library, where there is one, registers faster ones for its device and wins.
"""

import logging
from pathlib import Path

import torch
from torch import Tensor

from speq import reference
from speq.reference import ACTIVATIONS, combine, moe_grouped, quantize_int4

__all__ = [
    "ACTIVATIONS",
    "backend_of",
    "combine",
    "moe_grouped",
    "moe_int4",
    "quantize_int4",
    "unpack_int4",
]

logger = logging.getLogger("speq")

NATIVE_LIBRARY = Path(__file__).parent / "libspeq_cpu.so"
OPS = ("unpack_int4_out",)
FLOAT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_library = torch.library.Library("speq", "DEF")
_library.define("unpack_int4_out(Tensor qweight, Tensor scales, Tensor(a!) out) -> ()")
_library.impl("unpack_int4_out", reference.unpack_int4_out, "CompositeExplicitAutograd")


@torch.library.register_fake("speq::unpack_int4_out")
def _(qweight: Tensor, scales: Tensor, out: Tensor) -> None:
    return None


def load_native(path: Path = NATIVE_LIBRARY) -> str | None:
    """Load the compiled kernels; the reason why not, where they cannot be."""
    if not path.exists():
        return f"{path} was not built"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path} does not load: {error}"
    return None


NATIVE_MISSING = load_native()


def backend_of(op: str, device: str) -> str:
    """What runs `op` on "cpu" or "cuda": that name for a native kernel, else "reference"."""
    key = {"cpu": "CPU", "cuda": "CUDA"}[device]
    native = torch._C._dispatch_has_kernel_for_dispatch_key(f"speq::{op}", key)
    return device if native else "reference"


def report_backends(device: str) -> None:
    """Say which ops run on the slow reference, so that nobody takes it for our speed."""
    slow = [op for op in OPS if backend_of(op, device) == "reference"]
    if slow:
        reason = NATIVE_MISSING or f"no native kernel for {device} yet"
        logger.warning("slow reference kernels in use for %s (%s)", ", ".join(slow), reason)


def unpack_int4(qweight: Tensor, scales: Tensor, out: Tensor) -> None:
    """Dequantise a symmetric INT4 matrix into `out`.

    qweight  [N, K / 2] uint8, two codes per byte, low nibble first, zero point 8
    scales   [N, K / group_size] float16
    out      [N, K] float32, float64, bfloat16 or float16: code * scale, rounded once

    Raises ValueError, naming the argument, for any other dtype, shape, device or layout.
    """
    for name, tensor, dtypes in (
        ("qweight", qweight, (torch.uint8,)),
        ("scales", scales, (torch.float16,)),
        ("out", out, FLOAT_DTYPES),
    ):
        if tensor.dim() != 2 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} and strides {list(tensor.stride())}; it "
                "must be a contiguous matrix"
            )
        if tensor.dtype not in dtypes:
            raise ValueError(
                f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}"
            )
        if tensor.device != out.device:
            raise ValueError(f"{name} is on {tensor.device} and out on {out.device}")
    rows, columns = out.shape
    if qweight.shape != (rows, columns // 2) or columns % 2:
        raise ValueError(
            f"qweight has shape {list(qweight.shape)}; for out {list(out.shape)} it must be "
            f"[{rows}, {columns} / 2]"
        )
    groups = scales.shape[1]
    if scales.shape[0] != rows or not groups or columns % groups or (columns // groups) % 2:
        raise ValueError(
            f"scales has shape {list(scales.shape)}; for out {list(out.shape)} it must be "
            f"[{rows}, {columns} / group_size] with an even group_size"
        )
    torch.ops.speq.unpack_int4_out(qweight, scales, out)


def moe_int4(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    base_slots: Tensor,
    gate_up: tuple[Tensor, Tensor],
    down: tuple[Tensor, Tensor],
    activation: str,
) -> Tensor:
    """`reference.moe_int4` over the native unpacking; shapes there."""
    return reference.moe_int4(
        hidden_states, topk_ids, topk_weights, base_slots, gate_up, down, activation, unpack_int4
    )
