"""Ops of decoder layers between matrix products, one call each.

For few rows most time goes into calling such ops, not into computing. So arguments are not checked
here: the kernels, or torch, refuse inconsistent ones. `speq.kernels.reference_decoder` defines what
they compute.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from speq.kernels import library, reference
from speq.kernels.checks import EXACT_DTYPES

__all__ = [
    "Heads",
    "Latents",
    "Positions",
    "RMSNorm",
    "RouterRule",
    "add_rms_norm",
    "add_streams",
    "attention",
    "combine",
    "latent_attention",
    "masked_attention",
    "mix_streams",
    "rms_norm",
    "rotate",
    "route",
    "takes",
]

# More than any context length.
NO_WINDOW = 1 << 40


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """An RMS norm over groups of n neighbouring columns: weight [n], or [G * n] of G groups that
    differ, and epsilon.

    A weight of float32 has rows of 16 bits rounded once, at the end, and not before as well.
    """

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Heads:
    """Parameters of one layer's attention heads.

    query_norm, key_norm  applied before rotary embeddings; both or neither
    scale                 factor of the scores
    sinks                 [heads]: each head's sink score; None: there are none
    """

    scale: float
    query_norm: RMSNorm | None = None
    key_norm: RMSNorm | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Latents:
    """Parameters of one layer's latent attention.

    norm         of the latents
    expansion    [heads * (D + V), L]: makes keys, and then values, of a latent
    scale        factor of the scores
    interleaved  the columns that are rotated together are neighbours
    """

    norm: RMSNorm
    expansion: Tensor
    scale: float
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of T tokens.

    start    position where the first one's KV is written
    cos, sin [T, R], or as `reference_decoder.latent_attention_out` has them
    parents  [N] int64 of the tree of which they are the last nodes; None: a chain
    query_scale  [T, 1]: what the caller multiplies queries of latent attention by; None: nothing
    """

    start: int
    cos: Tensor
    sin: Tensor
    parents: Tensor | None = None
    query_scale: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RouterRule:
    """How a router chooses by its logits, as `reference_decoder.route_out` has it.

    bias, factors  [E] float32
    """

    sigmoid: bool = False
    divided: bool = False
    scale: float = 1.0
    bias: Tensor | None = None
    added: float = 0.0
    factors: Tensor | None = None
    rounded: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 1


def takes(tensor: Tensor) -> bool:
    """True if these ops run rows on this device and in this dtype as torch would."""
    return tensor.is_cpu and tensor.dtype in EXACT_DTYPES


def rms_norm(inputs: Tensor, norm: RMSNorm) -> Tensor:
    """RMS norm of inputs [R, H], rounded as in transformers."""
    out = torch.empty_like(inputs)
    library.call("rms_norm", inputs, None, norm.weight, norm.eps, None, out)
    return out


def add_rms_norm(inputs: Tensor, added: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """Return inputs + added, both [R, H], and its RMS norm."""
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
    chosen: Tensor | None = None,
) -> None:
    """Run `reference_decoder.attention_out` into out [T, heads * V]; see there for shapes.

    A row's result does not depend on other rows: a node of a tree is bit-identical to the end of a
    chain of its ancestors.

    window  most positions that a row looks back, its own included; None: no limit
    cached  keys [kv_heads, C, D] and values [kv_heads, C, V], where the rows' KV is written
    chosen  [T, N] bool, N at least start + T: what a row attends to, of what it sees; None: all
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
        chosen,
    )


def latent_attention(
    queries: Tensor,
    latents: Tensor,
    parameters: Latents,
    positions: Positions,
    window: int | None,
    cached: tuple[Tensor, Tensor],
    out: Tensor,
    chosen: Tensor | None = None,
) -> None:
    """Run `reference_decoder.latent_attention_out` into out [T, heads * V]; see there for shapes.

    The cached latents are not expanded: queries and results are multiplied by the expansion, in
    another order of the same sums. A row's result does not depend on other rows.

    window  as `attention` has it
    cached  latents [1, C, L] and rotated keys [1, C, R], where the rows' KV is written
    chosen  as `attention` has it
    """
    library.call(
        "latent_attention",
        queries,
        latents,
        parameters.norm.weight,
        parameters.norm.eps,
        parameters.expansion,
        positions.cos,
        positions.sin,
        parameters.interleaved,
        *cached,
        positions.start,
        NO_WINDOW if window is None else window,
        parameters.scale,
        positions.parents,
        out,
        chosen,
    )


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Run `reference_decoder.masked_attention_out` into out [T, heads, V]; see there for shapes.

    Entries are read in blocks; those that no row of a block sees are not read. A row's result does
    not depend on other rows.
    """
    library.call("masked_attention", query, key, value, mask, scale, sinks, out)


def rotate(rows: Tensor, width: int, positions: Positions, interleaved: bool) -> None:
    """Run `reference_decoder.rotate_out` over rows [T, heads * width], in place."""
    library.call("rotate", rows, width, positions.cos, positions.sin, interleaved)


def route(
    logits: Tensor, top_k: int, rule: RouterRule, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts by logits [T, E]: weights [T, K] in `dtype`, ids [T, K] int64."""
    topk_weights = logits.new_empty(logits.shape[0], top_k, dtype=dtype)
    topk_ids = logits.new_empty(logits.shape[0], top_k, dtype=torch.int64)
    library.call(
        "route",
        logits,
        rule.bias,
        rule.factors,
        rule.sigmoid,
        rule.rounded,
        rule.divided,
        rule.groups,
        rule.kept_groups,
        rule.group_best,
        rule.added,
        rule.scale,
        topk_weights,
        topk_ids,
    )
    return topk_weights, topk_ids


def combine(outputs: Tensor, topk_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `reference.combine`, in one native call if there is one."""
    if not takes(outputs) or outputs.dtype != dtype or topk_weights.dtype not in EXACT_DTYPES:
        return reference.combine(outputs, topk_weights, dtype)
    out = outputs.new_empty(outputs.shape[0], outputs.shape[2])
    library.call("combine", outputs, topk_weights, out)
    return out


def mix_streams(normed: Tensor, gates: Tensor, streams: int) -> Tensor:
    """Mix the rows of tokens, as `reference_decoder.mix_streams_out` does: [T, H]."""
    if streams < 1 or normed.shape[1] % streams:
        raise ValueError(
            f"normed has {normed.shape[1]} columns; they must be of {streams} rows of equal width"
        )
    out = normed.new_empty(normed.shape[0], normed.shape[1] // streams)
    library.call("mix_streams", normed, gates, out)
    return out


def add_streams(hidden: Tensor, update: Tensor, gates: Tensor) -> Tensor:
    """Add to the rows of tokens, as `reference_decoder.add_streams_out` does: [T, N * H]."""
    out = torch.empty_like(hidden)
    library.call("add_streams", hidden, update, gates, out)
    return out
