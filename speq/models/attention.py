"""Sizes of what attention caches and computes for each token, by kind of attention."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from speq.kernels.decoder_ops import attend_with_sinks
from speq.layers.arguments import LAYER_ARGUMENTS, refuse_unknown

# (heads, width) of a layer's cached keys and of its cached values.
KVShapes = tuple[tuple[int, int], tuple[int, int]]

# Arguments of attention that are ignored: the mask already holds the window, and nothing is
# trained.
BESIDE_MASK = ("dropout", "sliding_window", *LAYER_ARGUMENTS)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of one layer's attention; of the widest layer where layers differ.

    kv_shapes       of the cached keys and values
    query_width     elements of a token's queries, of all heads
    expanded_width  elements one cached token takes where attention expands it to all heads
    score_heads     heads whose scores exist whole, [rows, context] each, twice over
    by_layer        kv_shapes of each layer, where they differ; empty: they are the same
    """

    kv_shapes: KVShapes
    query_width: int
    expanded_width: int
    score_heads: int
    by_layer: tuple[KVShapes, ...] = ()


def cached_heads(config: Any) -> AttentionShape:
    """Multi-head or grouped-query attention."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    # Shared heads are repeated for all queries; a head that is not shared is read in place.
    expanded_width = heads * 2 * width if kv_heads != heads else 0
    return AttentionShape(((kv_heads, width),) * 2, heads * width, expanded_width, score_heads=0)


def gated_heads(config: Any) -> AttentionShape:
    """`cached_heads` with a gate as wide as the query beside each query."""
    shape = cached_heads(config)
    return replace(shape, query_width=2 * shape.query_width)


def heads_by_layer(config: Any) -> AttentionShape:
    """`cached_heads` with head counts and widths that differ between kinds of layers."""
    layers = [cached_heads(each) for each in config.per_layer_config]
    return AttentionShape(
        kv_shapes=max((each.kv_shapes for each in layers), key=elements),
        query_width=max(each.query_width for each in layers),
        expanded_width=max(each.expanded_width for each in layers),
        score_heads=0,
        by_layer=tuple(each.kv_shapes for each in layers),
    )


def elements(kv_shapes: KVShapes) -> int:
    """Cached elements of one token in one layer."""
    return sum(heads * width for heads, width in kv_shapes)


def cached_latents(config: Any) -> AttentionShape:
    """Multi-head latent attention (MLA, arXiv:2405.04434)."""
    heads = config.num_attention_heads
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    return AttentionShape(
        kv_shapes=((1, config.kv_lora_rank), (1, config.qk_rope_head_dim)),
        query_width=heads * width,
        # kv_b_proj's output, the keys built from it and the values, all of them expanded.
        expanded_width=heads * (2 * width + 2 * config.v_head_dim),
        # torch has no flash attention on the CPU for values narrower than keys.
        score_heads=0 if width == config.v_head_dim else heads,
    )


def heads_with_sinks(config: Any) -> AttentionShape:
    """`cached_heads` computed by `attend_by_group`."""
    shape = cached_heads(config)
    (kv_heads, _), _ = shape.kv_shapes
    # Scores of the heads that share keys, in up to four copies.
    score_heads = 2 * config.num_attention_heads // kv_heads
    return AttentionShape(shape.kv_shapes, shape.query_width, 0, score_heads)


def attend_by_group(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    s_aux: Tensor,
    **others: Any,
) -> tuple[Tensor, None]:
    """Run gpt_oss's attention for any number of rows, one group of shared keys at a time.

    query, key, value  [B, heads or kv_heads, T or N, D]; the result is [B, T, heads, D]
    attention_mask     [B, 1, T, N] bool, true where seen
    s_aux              [heads], the sinks

    transformers' own takes additive masks and holds the scores of all heads at once.
    """
    refuse_unknown("attention of gpt_oss", others, BESIDE_MASK)
    group = query.shape[1] // key.shape[1]
    attended = [
        attend_with_sinks(
            query[:, head * group : (head + 1) * group],
            key[:, head : head + 1],
            value[:, head : head + 1],
            attention_mask,
            scaling,
            s_aux[head * group : (head + 1) * group],
        )
        for head in range(key.shape[1])
    ]
    return torch.cat(attended, dim=1).transpose(1, 2).contiguous(), None


def build_seen_mask(*sizes: Any, **others: Any) -> Tensor | None:
    """Build transformers' boolean mask and never skip it."""
    return sdpa_mask(*sizes, **(others | {"allow_is_causal_skip": False}))


# Name in transformers' tables of attention functions and of masks.
BESIDE_SINKS = "speq_beside_sinks"
AttentionInterface.register(BESIDE_SINKS, attend_by_group)
AttentionMaskInterface.register(BESIDE_SINKS, build_seen_mask)
