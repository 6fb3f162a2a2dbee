"""Tokens that an indexer selects for attention by blocks of them: Qwen4-Exp's (QSA), and how others
select so.

Complete blocks of tokens have one key each, made of their tokens' keys. A query sees the tokens of
the best blocks, and those after the last complete one. Keys of tokens are cached beside the KV. A
block is one of a query's own sequence, which its mask shows: so branches of a tree and sequences of
a batch have the blocks that they have alone. No key of a block is kept: a rollback of tokens is one
of their blocks.
"""

import importlib
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speq.kernels.decoder_ops import Positions
from speq.layers.indexer import seen_by
from speq.models.attention import SELECTED_ELEMENTS


def rotation_of(module: Any) -> Any:
    """transformers' function that rotates queries and keys in a module's file."""
    return vars(importlib.import_module(type(module).__module__))["apply_rotary_pos_emb"]


@dataclass(frozen=True, slots=True)
class BlockScores:
    """What the rows of a pass select blocks by.

    size        tokens of a block
    most        blocks that a row sees
    heads       scores of a row and a block on their way to one
    keys        [N, D] of all cached tokens
    block_keys  makes keys of blocks, of those of their tokens [B, size, D]: [B, ...] float32
    scores      of rows of these numbers [R], by keys of blocks: [R, B] float32
    """

    size: int
    most: int
    heads: int
    keys: Tensor
    block_keys: Callable[[Tensor], Tensor]
    scores: Callable[[Tensor, Tensor], Tensor]

    def select(self, visible: Tensor) -> Tensor:
        """Select of what a mask [T, N] bool shows: [T, N] bool."""
        selected, counts = visible.clone(), visible.sum(1)
        if int(counts.max()) // self.size <= self.most:
            return selected
        left = torch.ones(len(visible), dtype=torch.bool, device=visible.device)
        while bool(left.any()):
            # Of the rows that begin as the last one does: all of a chain, or above it in a tree.
            path = visible[int(left.nonzero()[-1])]
            places = path.cumsum(0) - 1
            above = left & (visible == (path & (places < counts[:, None]))).all(1)
            left &= ~above
            slots, rows = path.nonzero()[:, 0], above.nonzero()[:, 0]
            selected[rows[:, None], slots] &= self._seen(rows, self.keys[slots], counts[rows])
        return selected

    def _seen(self, rows: Tensor, keys: Tensor, counts: Tensor) -> Tensor:
        """Select for rows of one path: [R, N].

        keys    [N, D] of its tokens in order
        counts  [R] of them that a row follows, itself included
        """
        blocks, complete = len(keys) // self.size, counts // self.size
        of_blocks = self.block_keys(keys[: blocks * self.size].unflatten(0, (blocks, self.size)))
        seen = torch.ones(len(rows), len(keys), dtype=torch.bool, device=keys.device)
        # Many scores are 0. Which of these are chosen depends on how many scores there are, so rows
        # that have as many choose together.
        for count in complete.unique().tolist():
            if count <= self.most:
                continue
            step = max(SELECTED_ELEMENTS // (self.heads * count), 1)
            for some in (complete == count).nonzero()[:, 0].split(step):
                scores = self.scores(rows[some], of_blocks[:count])
                kept = torch.zeros_like(scores, dtype=torch.bool)
                kept.scatter_(1, scores.topk(self.most, 1).indices, True)
                seen[some, : count * self.size] = kept.repeat_interleave(self.size, 1)
        return seen


class TokenIndexer:
    """Replacement of Qwen4-Exp's indexer's forward, over caches with rollback.

    rotary  the model's rotary embedding
    """

    def __init__(self, module: Any, rotary: Any) -> None:
        self._module, self._rotary = weakref.proxy(module), rotary
        self._rotate = rotation_of(module)

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        cache: Any,
    ) -> Tensor:
        """Select for rows [1, T, H] of what a mask [1, 1, T, N] bool shows: a mask again."""
        queries, keys = self._project(hidden_states)
        if cache is not None:
            keys = cache.layers[self._module.layer_idx].update_indexer(keys)
        visible = attention_mask[0, 0]
        if self._sees_all(int(visible.sum(1).max())):
            return attention_mask
        queries = self._turned(queries, *position_embeddings)
        return self._by(queries, keys[0]).select(visible)[None, None]

    def choose_cached(
        self, hidden_states: Tensor, positions: Positions, start: int, cached: Tensor
    ) -> Tensor | None:
        """Select for rows [T, H] of a sequence, as `Indexer.choose_cached` does."""
        queries, keys = self._project(hidden_states[None])
        end = start + len(hidden_states)
        cached[start:end] = keys[0]
        if self._sees_all(end):
            return None
        queries = self._turned(queries, positions.cos[None], positions.sin[None])
        visible = seen_by(len(hidden_states), start, positions.parents)
        return self._by(queries, cached[:end]).select(visible)

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys of rows [1, T, H], neither normed nor rotated yet."""
        module, width = self._module, self._module.index_head_dim
        queries, keys = module.index_qk_proj(hidden_states).split(
            [module.index_n_heads * width, module.index_kv_heads * width], 2
        )
        return queries, keys

    def _sees_all(self, count: int) -> bool:
        """True if all of so many tokens are selected."""
        module = self._module
        return bool(count // module.compress_ratio <= module.block_topk)

    def _turned(self, queries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads of queries [1, T, heads * D], normed and rotated: [T, heads, D] float32."""
        module = self._module
        heads = module.q_layernorm(queries.unflatten(2, (-1, module.index_head_dim)))
        turned: Tensor = self._rotate(heads, cos=cos, sin=sin, unsqueeze_dim=2)[0]
        return turned.float()

    def _by(self, queries: Tensor, keys: Tensor) -> BlockScores:
        """What heads of queries [T, heads, D] select by, of keys [N, D]."""
        module = self._module

        def scores(rows: Tensor, blocks: Tensor) -> Tensor:
            return torch.relu(queries[rows] @ blocks.T).sum(1) / math.sqrt(module.index_head_dim)

        sizes = module.compress_ratio, module.block_topk, module.index_n_heads
        return BlockScores(*sizes, keys, self._block_keys, scores)

    def _block_keys(self, keys: Tensor) -> Tensor:
        """Keys of blocks, of those of their tokens [B, tokens, D]: [B, D]."""
        pooled = self._module.k_layernorm(keys.float().mean(1).to(keys.dtype))
        starts = torch.arange(len(keys), device=keys.device) * keys.shape[1]
        cos, sin = self._rotary(pooled, starts.expand(3, 1, -1))
        rotated: Tensor = self._rotate(pooled[:, None], cos=cos[0], sin=sin[0])
        return rotated[:, 0].float()
