"""Blocks of tokens that an indexer selects for attention: MiniMax-M3's.

An indexer scores each token by small heads. The best token of a block stands for it, and a query
sees the tokens of the best blocks and of those just before it. Its keys are cached beside the KV.
Places in a block count from the beginning of a sequence, and are found by the mask: so branches of
a tree and sequences of a batch have the blocks that they have alone.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speq.models.token_selection import rotation_of


class BlockSelection(NamedTuple):
    """Selection of a pass's rows.

    queries  [groups, T, D], each group's own
    keys     [N, D] of all cached tokens, float32
    size     tokens of a block
    most     blocks that a row sees
    local    of them, blocks up to the row's own that are always seen
    """

    queries: Tensor
    keys: Tensor
    size: int
    most: int
    local: int

    @property
    def groups(self) -> int:
        return len(self.queries)

    def seen(self, visible: Tensor, first: int) -> Tensor:
        """Select for the rows from `first` on, of a mask [T, N] bool: [groups, T, N] bool."""
        places = visible.cumsum(1) - 1  # of a visible token in its sequence
        last = places[:, -1:] // self.size
        blocks = int(last.max()) + 1
        if blocks <= self.most:
            return visible.expand(self.groups, -1, -1)
        # What is not visible belongs to a block that is left out.
        block = torch.where(visible, places // self.size, blocks).expand(self.groups, -1, -1)
        queries = self.queries[:, first : first + len(visible)].float()
        scores = (queries @ self.keys.T).masked_fill_(~visible, float("-inf"))
        best = scores.new_full((*scores.shape[:2], blocks + 1), float("-inf"))
        best = best.scatter_reduce(2, block, scores, "amax")[..., :blocks]
        for before in range(self.local):
            at = (last - before).clamp(min=0).expand(self.groups, -1, -1)
            best.scatter_(2, at, float("inf"))
        found = best.topk(self.most, 2)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(2, found.indices, found.values > float("-inf"))
        kept = torch.nn.functional.pad(kept, (0, 1))
        return kept.gather(2, block)


class BlockIndexer:
    """Replacement of an indexer's forward, over caches with rollback."""

    def __init__(self, module: Any, rotary: Any) -> None:
        self._module = weakref.proxy(module)
        self._rotate = rotation_of(module)

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Any,
        position_ids: Tensor,
    ) -> BlockSelection:
        """Select for rows [1, T, H]. position_ids: not looked at; the mask has them"""
        module, width = self._module, self._module.head_dim
        queries = module.q_norm(module.q_proj(hidden_states).unflatten(2, (-1, width)))
        keys = module.k_norm(module.k_proj(hidden_states).unflatten(2, (-1, width)))
        cos, sin = (each[..., :width] for each in position_embeddings)
        queries, keys = self._rotate(queries.transpose(1, 2), keys.transpose(1, 2), cos, sin)
        keys = keys[0]
        if cache is not None:
            keys = cache.layers[module.layer_idx].update_indexer(keys)
        sizes = module.block_size, module.topk_blocks, module.local_blocks
        return BlockSelection(queries[0], keys[0].float(), *sizes)
