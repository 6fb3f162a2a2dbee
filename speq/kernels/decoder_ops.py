"""What decoder layers do between their products, each in one call.

Few rows spend most of their time on the way to such operations, not in them. So arguments are not
checked here: the kernels themselves refuse what does not fit together, and torch does otherwise.
`speq.kernels.reference_decoder` says what they compute.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from speq.kernels import library, reference
from speq.kernels.checks import EXACT_DTYPES
from speq.kernels.reference_decoder import beside_sinks

__all__ = [
    "Heads",
    "Positions",
    "RMSNorm",
    "add_rms_norm",
    "attention",
    "beside_sinks",
    "combine",
    "rms_norm",
    "route",
    "takes",
]

# More than any text has entries.
NO_WINDOW = 1 << 40


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """weight [n], which takes n neighbouring columns together, and what keeps the root from 0."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Heads:
    """What one layer's attention does with queries and keys.

    query_norm, key_norm  before their positions are put in; both or neither
    scale                 of the scores
    sinks                 [heads]: of each a score of no entry; None: there are none
    """

    scale: float
    query_norm: RMSNorm | None = None
    key_norm: RMSNorm | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Positions:
    """Where T tokens stand.

    start    the place of the first one's entry
    cos, sin [T, R]
    parents  [N] int64 of the tree whose last nodes they are; None: they follow one another
    """

    start: int
    cos: Tensor
    sin: Tensor
    parents: Tensor | None = None


def takes(tensor: Tensor) -> bool:
    """Tell whether these ops run rows on this device and in this dtype as torch itself would."""
    return tensor.is_cpu and tensor.dtype in EXACT_DTYPES


def rms_norm(inputs: Tensor, norm: RMSNorm) -> Tensor:
    """The RMS norm of inputs [R, H], rounded as transformers rounds it."""
    out = torch.empty_like(inputs)
    library.call("rms_norm", inputs, None, norm.weight, norm.eps, None, out)
    return out


def add_rms_norm(inputs: Tensor, added: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """inputs + added, both [R, H], and the RMS norm of that."""
    sums, out = torch.empty_like(inputs), torch.empty_like(inputs)
    library.call("rms_norm", inputs, added, norm.weight, norm.eps, sums, out)
    return sums, out


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: Heads,
    positions: Positions,
    window: int | None,
    cached: tuple[Tensor, Tensor],
    out: Tensor,
) -> None:
    """`reference_decoder.attention_out` into out [T, heads * D]; shapes there.

    A row's result does not depend on the rows beside it: a node of a tree comes out, bit for bit,
    as it does at the end of a chain of the nodes above it.

    window  positions that a row looks back at most, its own included; None: all
    cached  keys and values [kv_heads, C, D], which take the rows' entries
    """
    query_norm, key_norm = heads.query_norm, heads.key_norm
    library.call(
        "attention",
        queries,
        keys,
        values,
        None if query_norm is None else query_norm.weight,
        None if key_norm is None else key_norm.weight,
        0.0 if query_norm is None else query_norm.eps,
        positions.cos,
        positions.sin,
        *cached,
        positions.start,
        NO_WINDOW if window is None else window,
        heads.scale,
        positions.parents,
        out,
        heads.sinks,
    )


def route(
    logits: Tensor, top_k: int, normalised: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The `top_k` likeliest experts by logits [T, E]: weights [T, K] in `dtype`, ids [T, K] int64.

    normalised  whether a row's weights are divided by their sum
    """
    topk_weights = logits.new_empty(logits.shape[0], top_k, dtype=dtype)
    topk_ids = logits.new_empty(logits.shape[0], top_k, dtype=torch.int64)
    library.call("route", logits, normalised, topk_weights, topk_ids)
    return topk_weights, topk_ids


def combine(outputs: Tensor, topk_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """`reference.combine`, in one call where there is one."""
    if not takes(outputs) or outputs.dtype != dtype or topk_weights.dtype not in EXACT_DTYPES:
        return reference.combine(outputs, topk_weights, dtype)
    out = outputs.new_empty(outputs.shape[0], outputs.shape[2])
    library.call("combine", outputs, topk_weights, out)
    return out
