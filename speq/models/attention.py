"""Sizes of what attention caches and computes for each token, by kind of attention."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from speq.kernels import decoder_ops
from speq.layers.arguments import LAYER_ARGUMENTS, refuse_unknown

# (heads, width) of a layer's cached keys, of its cached values, and of its indexer's keys if it has
# an indexer.
KVShapes = tuple[tuple[int, int], ...]

# Arguments of attention that are ignored: the mask already holds the window, and nothing is
# trained.
BESIDE_MASK = ("dropout", "sliding_window", "output_attentions", *LAYER_ARGUMENTS)
# Of a block of attention: rows, and elements of its mask unless one row has more.
BLOCK_ROWS, BLOCK_ELEMENTS = 256, 1 << 22
# Of a selection of tokens: elements of the scores of a block of rows, unless one row has more, and
# bytes that each of them takes on its way to a mask.
SELECTED_ELEMENTS, SELECTED_BYTES = 1 << 20, 32
# What the native attention computes in; float64 takes torch's.
NATIVE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Columns of queries with a sink are a multiple of so many.
SINK_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of one layer's attention; of the widest layer where layers differ.

    kv_shapes       of what is cached
    query_width     elements of a token's queries, of all heads
    group           query heads that share a key head
    copied_width    elements that attention in blocks copies of each token that it sees
    expanded_width  the same of torch's attention, which expands tokens to all heads
    score_heads     heads whose scores exist whole on a GPU, [rows, context] each, twice over
    index_heads     heads whose scores select the tokens that are seen
    by_layer        kv_shapes of each layer, where they differ; empty: they are the same
    """

    kv_shapes: KVShapes
    query_width: int
    group: int
    copied_width: int
    expanded_width: int
    score_heads: int = 0
    index_heads: int = 0
    by_layer: tuple[KVShapes, ...] = ()

    @property
    def shares_choices(self) -> bool:
        """True if layers attend to what the indexer of a layer before them chose."""
        return not self.index_heads and len({len(each) for each in self.by_layer}) > 1

    def block_bytes(self, rows: int, context: int, dtype: torch.dtype) -> int:
        """Bytes of attention in blocks of `rows` rows over `context` tokens: what is copied, and a
        block's mask and rows.
        """
        size = dtype.itemsize
        mask = min(max(BLOCK_ELEMENTS, self.group * context), self.group * rows * context)
        block = 3 * min(rows, BLOCK_ROWS) * self.query_width
        scores = self.index_heads * context
        scores = min(max(SELECTED_ELEMENTS, scores), scores * rows) * SELECTED_BYTES
        return (self.copied_width * context + block) * size + mask * (2 + size) + scores


def cached_heads(config: Any) -> AttentionShape:
    """Multi-head or grouped-query attention."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return shape_of_heads(heads, config.num_key_value_heads, width)


def shape_of_heads(heads: int, kv_heads: int, width: int) -> AttentionShape:
    """Attention of so many query heads over so many heads of keys and values."""
    # torch repeats shared heads for all queries; a head that is not shared is read in place.
    expanded_width = heads * 2 * width if kv_heads != heads else 0
    kv_shapes = ((kv_heads, width),) * 2
    return AttentionShape(kv_shapes, heads * width, heads // kv_heads, 0, expanded_width)


def gated_heads(config: Any) -> AttentionShape:
    """`cached_heads` with a gate as wide as the query beside each query."""
    shape = cached_heads(config)
    return replace(shape, query_width=2 * shape.query_width)


def gated_heads_by_tokens(config: Any) -> AttentionShape:
    """`gated_heads` that see tokens which heads of an indexer select."""
    shape, width = gated_heads(config), config.indexer_head_dim
    indexed = (*shape.kv_shapes, (1, width))
    # Keys of blocks are means, in float32, of copies.
    return replace(
        shape, kv_shapes=indexed, copied_width=3 * width, index_heads=config.indexer_n_heads
    )


def heads_of_layers(config: Any) -> AttentionShape:
    """`cached_heads` with more query heads in some layers."""
    heads = max(config.num_attention_heads_per_layer)
    return shape_of_heads(heads, config.num_key_value_heads, config.head_dim)


def heads_by_layer(config: Any) -> AttentionShape:
    """`cached_heads` with head counts and widths that differ between kinds of layers."""
    layers = [cached_heads(each) for each in config.per_layer_config]
    return AttentionShape(
        kv_shapes=max((each.kv_shapes for each in layers), key=elements),
        query_width=max(each.query_width for each in layers),
        group=max(each.group for each in layers),
        copied_width=0,
        expanded_width=max(each.expanded_width for each in layers),
        by_layer=tuple(each.kv_shapes for each in layers),
    )


def heads_of_some_layers(config: Any) -> AttentionShape:
    """`cached_heads`, in models with layers that have neither KV nor a state."""
    shape, nothing = cached_heads(config), ((0, 0), (0, 0))
    attends = (kind == "full_attention" for kind in config.layer_types)
    return replace(shape, by_layer=tuple(shape.kv_shapes if each else nothing for each in attends))


def heads_by_blocks(config: Any) -> AttentionShape:
    """`cached_heads` that see blocks of tokens which heads of an indexer select, in some layers."""
    shape = cached_heads(config)
    indexed = (*shape.kv_shapes, (1, config.index_head_dim))
    selects = (kind == "minimax_m3_sparse" for kind in config.layer_types)
    return replace(
        shape,
        copied_width=2 * config.index_head_dim,  # in float32
        index_heads=config.index_n_heads,
        by_layer=tuple(indexed if each else shape.kv_shapes for each in selects),
    )


def elements(kv_shapes: KVShapes) -> int:
    """Cached elements of one token in one layer."""
    return sum(heads * width for heads, width in kv_shapes)


def cached_latents(config: Any) -> AttentionShape:
    """Multi-head latent attention (MLA, arXiv:2405.04434)."""
    heads = config.num_attention_heads
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    # kv_b_proj's output, the keys built from it and the values, all of them expanded.
    expanded_width = heads * (2 * width + 2 * config.v_head_dim)
    return AttentionShape(
        kv_shapes=((1, config.kv_lora_rank), (1, config.qk_rope_head_dim)),
        query_width=heads * width,
        group=1,
        copied_width=expanded_width + heads * width,
        expanded_width=expanded_width,
    )


def indexed_latents(config: Any) -> AttentionShape:
    """`cached_latents` of tokens that an indexer chooses; layers without one use the choice of the
    layer before.
    """
    shape, heads = cached_latents(config), config.index_n_heads
    indexed = (*shape.kv_shapes, (1, config.index_head_dim))
    types = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    return replace(
        shape,
        kv_shapes=indexed,
        query_width=shape.query_width + heads * config.index_head_dim,
        # The indexer's keys in float32, and scores of a row on their way to one number.
        copied_width=shape.copied_width + 4 * config.index_head_dim + 6 * heads,
        score_heads=heads,
        by_layer=tuple(indexed if kind == "full" else shape.kv_shapes for kind in types),
    )


def pooled_latents(config: Any) -> AttentionShape:
    """Latent attention over pools of tokens that an indexer selects; layers without one use the
    selection of the layer before. Latents are not expanded: all heads read them.
    """
    heads, width = config.num_attention_heads, config.index_head_dim
    latents = ((1, config.kv_lora_rank), (1, 0))
    indexed = (*latents, (1, 2 * width))  # a token's key, and its weights in its pool's
    return AttentionShape(
        kv_shapes=indexed,
        query_width=heads * (config.qk_nope_head_dim + config.kv_lora_rank)
        + config.index_n_heads * width,
        group=heads,
        copied_width=6 * width,  # keys of pools are sums, in float32, of copies
        expanded_width=0,
        index_heads=config.index_n_heads,
        by_layer=tuple(indexed if kind == "full" else latents for kind in config.indexer_types),
    )


def heads_with_sinks(config: Any) -> AttentionShape:
    """`cached_heads` with sinks."""
    shape = cached_heads(config)
    (kv_heads, width), _ = shape.kv_shapes
    # Keys and values with columns added, twice: there is one token more.
    copied_width = 2 * 2 * kv_heads * (width + SINK_ALIGNMENT)
    # On a GPU torch may hold the scores of all heads.
    return replace(shape, copied_width=copied_width, score_heads=config.num_attention_heads)


def heads_of_windows(config: Any) -> AttentionShape:
    """`heads_with_sinks` with values of their own width, and twice the heads of keys and values in
    layers with windows.
    """

    def shapes(kind: str) -> KVShapes:
        heads = config.num_key_value_heads * (2 if kind == "sliding_attention" else 1)
        return (heads, config.head_dim), (heads, config.v_head_dim)

    shape, by_layer = heads_with_sinks(config), tuple(map(shapes, config.layer_types))
    widest = max(by_layer, key=elements)
    return replace(shape, kv_shapes=widest, copied_width=2 * shape.copied_width, by_layer=by_layer)


class Selection(Protocol):
    """Which tokens the rows of a pass see, of those that their mask shows.

    groups  selections of a row; each is of as many heads
    """

    groups: int

    def seen(self, visible: Tensor, first: int) -> Tensor:
        """Select for the rows from `first` on, of a mask [T, N] bool: [groups, T, N] bool."""


def attend_in_blocks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    native: bool = True,
    block_indices: Selection | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Run attention of any number of rows, a block of them at a time, in transformers' place.

    query, key         [B, heads or kv_heads, T or N, D]
    value              [B, kv_heads, N, V]; the result is [B, T, heads, V]
    attention_mask     [B, 1, T, N] bool, true where seen
    s_aux              [heads], sinks: scores that take their share of a row's weights
    indices            [B, T, N] bool, what an `Indexer` chose of what is seen
    native             in 16 and 32 bits the blocks are a native op's, which reads what a row sees
                       alone; False on a GPU, which has none
    block_indices      selects among what the mask shows; None: all of it

    Queries that share keys are rows of one product, so that no keys are repeated.
    """
    refuse_unknown("attention", others, BESIDE_MASK)
    if indices is not None:
        attention_mask = indices[:, None]
    batch, heads, count, _ = query.shape
    kv_heads, width = key.shape[1], value.shape[3]
    group = heads // kv_heads
    if block_indices is not None:
        attend = partial(attend_in_blocks, module, scaling=scaling, native=native)
        return attend_to_selected(attend, query, key, value, attention_mask, block_indices), None
    if native and query.dtype in NATIVE_DTYPES:
        out = query.new_empty(batch, count, heads, width)
        for at in range(batch):
            sequence = query[at], key[at], value[at], attention_mask[at, 0].contiguous()
            decoder_ops.masked_attention(*sequence, scaling, s_aux, out[at])
        return out, None
    # torch has no flash attention on the CPU for values of another width than keys.
    wide = max(query.shape[3], width)
    if s_aux is not None:
        wide = -(-(query.shape[3] + 1) // SINK_ALIGNMENT) * SINK_ALIGNMENT
    query, key, value = (
        functional.pad(each, (0, wide - each.shape[3])) if each.shape[3] < wide else each
        for each in (query, key, value)
    )
    if s_aux is not None:
        # The column after a query's own is the score of a token that is added to all.
        query[..., wide - 1] = (s_aux / scaling)[:, None]
        key, value = (functional.pad(each, (0, 0, 0, 1)) for each in (key, value))
        key[:, :, -1, -1] = 1
    out = query.new_empty(batch, count, heads, width)
    step = min(max(BLOCK_ELEMENTS // (group * attention_mask.shape[3]), 1), BLOCK_ROWS)
    for first in range(0, count, step):
        last = min(first + step, count)
        mask = attention_mask[:, :, first:last].expand(batch, group, -1, -1).flatten(1, 2)[:, None]
        if s_aux is not None:
            mask = functional.pad(mask, (0, 1), value=True)
        rows = query[:, :, first:last].reshape(batch, kv_heads, -1, wide)
        made = functional.scaled_dot_product_attention(rows, key, value, mask, scale=scaling)
        made = made.view(batch, heads, last - first, wide)[..., :width]
        out[:, first:last] = made.transpose(1, 2)
    return out, None


def attend_to_selected(
    attend: Callable[..., tuple[Tensor, None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    selection: Selection,
) -> Tensor:
    """Run attention, each group of heads over the tokens that are selected for it. Shapes are those
    of `attend_in_blocks`, of one sequence or several packed ones.

    attend  runs it, given queries, keys, values and their mask
    """
    count, groups = query.shape[2], selection.groups
    out = query.new_empty(1, count, query.shape[1], value.shape[3])
    parts = [each.chunk(groups, 1) for each in (query, key, value)]
    step = max(SELECTED_ELEMENTS // (groups * mask.shape[3]), 1)
    for first in range(0, count, step):
        rows = slice(first, first + step)
        seen = selection.seen(mask[0, 0, rows], first)
        made = [
            attend(queries[:, :, rows], keys, values, each[None, None])[0]
            for queries, keys, values, each in zip(*parts, seen, strict=True)
        ]
        out[:, rows] = torch.cat(made, 2)
    return out


def build_seen_mask(*sizes: Any, **others: Any) -> Tensor | None:
    """Build transformers' boolean mask and never skip it."""
    return sdpa_mask(*sizes, **(others | {"allow_is_causal_skip": False}))


# Names in transformers' tables of attention functions and of masks: on the CPU, and on a GPU where
# torch's own knows no sinks.
IN_BLOCKS, BESIDE_SINKS = "speq_in_blocks", "speq_beside_sinks"
AttentionInterface.register(IN_BLOCKS, attend_in_blocks)
AttentionInterface.register(BESIDE_SINKS, partial(attend_in_blocks, native=False))
for each in (IN_BLOCKS, BESIDE_SINKS):
    AttentionMaskInterface.register(each, build_seen_mask)
