"""Attention over near tokens and over compressed keys of windows of all tokens: DeepSeek-V4's.

A layer makes one entry of each complete window of tokens (of 4 with an indexer, which selects the
best entries, or of 128 without one), and a query sees these entries beside the last tokens. All is
cached by token, so that it is cut back, kept and moved as KV is: a token's keys, the entry of the
window that it completes, and its projections that entries are made of. Windows count from the
beginning of a sequence, and are found by the mask: so branches of a tree and sequences of a batch
have the entries that they have alone.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from speq.layers.arguments import find_cache
from speq.layers.indexer import rows_at
from speq.models.attention import (
    SELECTED_ELEMENTS,
    AttentionShape,
    KVShapes,
    attend_in_blocks,
    elements,
)
from speq.models.packed_batch import BatchKVLayer
from speq.models.token_selection import rotation_of

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


def compressed_heads(config: Any) -> AttentionShape:
    """Heads that share one key, which is the value too, with what entries of windows take.

    In place of values a layer caches entries, and beside them projections.
    """
    heads, width, of_index = config.num_attention_heads, config.head_dim, config.index_head_dim

    def shapes(kind: str) -> KVShapes:
        if kind == SPARSE:
            return (1, width), (1, width + of_index), (1, 4 * (width + of_index))
        if kind == HEAVY:
            return (1, width), (1, width), (1, 2 * width)
        return (1, width), (1, 0)

    by_layer = tuple(map(shapes, config.layer_types))
    return AttentionShape(
        kv_shapes=max(by_layer, key=elements),
        query_width=heads * width + config.index_n_heads * of_index,
        group=heads,
        copied_width=3 * width + 2 * of_index,
        expanded_width=0,
        score_heads=heads,
        index_heads=config.index_n_heads,
        by_layer=by_layer,
    )


class Windows(NamedTuple):
    """Windows that rows of a pass complete.

    rows    [W] of the pass
    starts  [W] positions of their first tokens
    slots   [W, series * size] of their tokens and of those of the windows before, in order; -1:
            there is none
    """

    rows: Tensor
    starts: Tensor
    slots: Tensor


def windows_in(visible: Tensor, counts: Tensor, size: int, series: int) -> Windows:
    """Find the windows of `size` tokens that rows complete, with `series - 1` windows before each.

    visible  [T, N] bool
    counts   [T] of tokens that a row sees, itself included
    """
    rows = (counts % size == 0).nonzero()[:, 0]
    slots = torch.full((len(rows), series * size), -1, device=visible.device)
    columns = torch.arange(visible.shape[1], device=visible.device)
    taken = min(slots.shape[1], len(columns))
    step = max(SELECTED_ELEMENTS // len(columns), 1)
    for first in range(0, len(rows), step):
        block = slice(first, first + step)
        last = torch.where(visible[rows[block]], columns, -1).topk(taken, 1).values
        slots[block, slots.shape[1] - taken :] = last.flip(1)
    return Windows(rows, counts[rows] - size, slots)


class CompressedAttention:
    """Replacement of a layer's attention, over caches with rollback."""

    def __init__(self, module: Any, rotary: Any) -> None:
        self._module: Any = weakref.proxy(module)
        self._rotate = rotation_of(module)

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: dict[str, tuple[Tensor, Tensor]],
        position_ids: Tensor,
        attention_mask: Tensor,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attention of rows [1, T, H], each of which sees what a mask [1, 1, T, N] bool shows."""
        module, cache = self._module, find_cache(self, others)
        layer = None if cache is None else cache.layers[module.layer_idx]
        cos, sin = position_embeddings[module.rope_layer_type]
        latents = module.q_a_norm(module.q_a_proj(hidden_states))
        queries = module.q_b_norm(module.q_b_proj(latents).unflatten(2, (-1, module.head_dim)))
        queries = self._rotate(queries, cos, sin, unsqueeze_dim=2).transpose(1, 2)
        keys = module.kv_norm(module.kv_proj(hidden_states))[:, None]
        keys = self._rotate(keys, cos, sin)
        visible = attention_mask[0, 0]
        out = queries.new_empty(1, len(visible), *queries.shape[1::2])
        whole = [(layer, slice(None), slice(None))]
        # Sequence by sequence: a cache of all of them together would be a copy.
        for own, rows, columns in layer.parts if isinstance(layer, BatchKVLayer) else whole:
            asked = hidden_states[:, rows], latents[:, rows], position_ids[:, rows]
            seen = visible[rows, columns]
            out[:, rows] = self._mixed(queries[:, :, rows], asked, keys[:, :, rows], seen, own)
        out = self._rotate(out, cos, -sin, unsqueeze_dim=2)
        grouped = module.o_a_proj(out.reshape(*out.shape[:2], module.config.o_groups, -1))
        return module.o_b_proj(grouped.flatten(2)), None

    def _mixed(
        self,
        queries: Tensor,
        asked: tuple[Tensor, Tensor, Tensor],
        keys: Tensor,
        visible: Tensor,
        layer: Any,
    ) -> Tensor:
        """What heads see for the rows of a sequence: [1, T, heads, D].

        asked    as `_seen` has it
        visible  [T, N] bool, of the sequence's own tokens
        layer    its cache; None: there is none
        """
        counts = visible.sum(1)
        entries = self._entries(asked[0], layer, visible, counts)
        if layer is not None:
            keys, entries = layer.update(keys, entries)
        out = queries.new_empty(1, len(counts), *queries.shape[1::2])
        step = max(SELECTED_ELEMENTS // visible.shape[1], 1)
        for first in range(0, len(counts), step):
            rows = slice(first, first + step)
            of_rows = asked[0][:, rows], asked[1][:, rows], asked[2][:, rows]
            seen = self._seen(of_rows, visible[rows], counts[rows], keys[0, 0], entries[0, 0])
            cached, mask = (each[None, None] for each in seen)
            out[:, rows], _ = attend_in_blocks(
                *(self._module, queries[:, :, rows], cached, cached, mask, self._module.scaling),
                s_aux=self._module.sinks.to(queries.dtype),
                native=queries.device.type == "cpu",
            )
        return out

    def _makers(self) -> list[Any]:
        """What makes entries: the compressor, and its indexer if it has one."""
        own = self._module.compressor
        both = () if own is None else (own, getattr(own, "indexer", None))
        return [each for each in both if each is not None]

    def _entries(
        self, hidden_states: Tensor, layer: Any, visible: Tensor, counts: Tensor
    ) -> Tensor:
        """Entries of the windows that rows complete, at these rows: [1, 1, T, width]. Other rows
        have zeros.
        """
        makers = self._makers()
        if not makers:
            return hidden_states.new_empty(1, 1, len(counts), 0)
        parts = [
            each(hidden_states) for maker in makers for each in (maker.kv_proj, maker.gate_proj)
        ]
        projected = torch.cat(parts, 2)
        if layer is not None:
            projected = layer.update_indexer(projected)
        size, width = makers[0].position_bias.shape
        windows = windows_in(visible, counts, size, width // makers[0].head_dim)
        entries = hidden_states.new_zeros(1, 1, len(counts), sum(each.head_dim for each in makers))
        if len(windows.rows):
            pairs = projected[0].split([2 * each.shape[2] for each in parts[::2]], 1)
            made = [self._pooled(*each, windows) for each in zip(makers, pairs, strict=True)]
            entries[0, 0, windows.rows] = torch.cat(made, 1)
        return entries

    def _pooled(self, maker: Any, projected: Tensor, windows: Windows) -> Tensor:
        """Entries [W, D] of windows, given what tokens [N, 2 * series * D] contribute."""
        size, width = len(maker.position_bias), maker.head_dim
        kv, gates = projected.chunk(2, 1)
        parts = []
        # The first series is of the window before.
        for at, slots in enumerate(windows.slots.split(size, 1)):
            own = slice(at * width, (at + 1) * width)
            gate = gates[:, own][slots] + maker.position_bias[:, own]
            parts.append((kv[:, own][slots], gate.masked_fill_(slots[..., None] < 0, -torch.inf)))
        rows, gate = (torch.cat(each, 1) for each in zip(*parts, strict=True))
        weights = gate.softmax(1, dtype=torch.float32).to(rows.dtype)
        pooled = maker.kv_norm((rows * weights).sum(1))[None]
        cos, sin = maker.rotary_emb(
            pooled, position_ids=windows.starts[None], layer_type=maker.rope_layer_type
        )
        rotated: Tensor = self._rotate(pooled[:, None], cos, sin)
        return rotated[0, 0]

    def _seen(
        self,
        asked: tuple[Tensor, Tensor, Tensor],
        visible: Tensor,
        counts: Tensor,
        keys: Tensor,
        entries: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Keys [M, D] that some rows see, and which of them each row sees: [T, M] bool.

        asked          hidden states [1, T, H] of the rows, latents [1, T, L] of their queries, and
                       their positions [1, T]
        keys, entries  [N, D] of all cached tokens
        """
        module = self._module
        places = visible.cumsum(1, dtype=torch.int32)  # from 1 on
        near = visible & (places > counts[:, None] - module.sliding_window)
        at = near.any(0).nonzero()[:, 0]
        found, masks = [rows_at(keys, at)], [near[:, at]]
        makers = self._makers()
        if makers:
            own = makers[0]
            last = visible & (places % len(own.position_bias) == 0)
            at = last.any(0).nonzero()[:, 0]
            last, width = last[:, at], own.head_dim
            found.append(entries[at, :width])
            if len(makers) > 1 and int(last.sum(1).max()) > makers[1].index_topk:
                last = self._selected(makers[1], asked, entries[at, width:].float(), last)
            masks.append(last)
        return torch.cat(found), torch.cat(masks, 1)

    def _selected(
        self,
        indexer: Any,
        asked: tuple[Tensor, Tensor, Tensor],
        keys: Tensor,
        seen: Tensor,
    ) -> Tensor:
        """Select entries, whose keys are [M, D], of those that a mask [T, M] shows: [T, M].

        Each row is scored alone, as transformers does in a step of one token: which of equal scores
        are taken depends on what is scored beside.
        """
        hidden_states, latents, positions = asked
        scorer = indexer.scorer
        cos, sin = indexer.rotary_emb(
            hidden_states, position_ids=positions, layer_type=indexer.rope_layer_type
        )
        queries = indexer.q_b_proj(latents).unflatten(2, (-1, indexer.head_dim))
        queries = self._rotate(queries, cos, sin, unsqueeze_dim=2)[0].float()
        weights = scorer.weights_proj(hidden_states)[0].float() * scorer.weights_scaling
        chosen = seen.clone()
        for row in (seen.sum(1) > indexer.index_topk).nonzero()[:, 0].tolist():
            places = seen[row].nonzero()[:, 0]
            scores = functional.relu(queries[row] @ rows_at(keys, places).T) * scorer.softmax_scale
            scores = (scores * weights[row, :, None]).sum(0)
            chosen[row] = False
            chosen[row, places[scores.topk(indexer.index_topk).indices]] = True
        return chosen
