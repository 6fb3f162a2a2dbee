"""Indexers of DeepSeek's sparse attention (DSA, arXiv:2512.02556): each chooses the cached tokens
that a token attends to.

transformers' own scores all tokens of a pass in one product, and which of equal scores it takes
depends on the rows beside. Here each row is scored alone, as transformers does in a step of one
token, so that its choice does not depend on the pass.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from speq.errors import present
from speq.kernels.decoder_ops import Positions
from speq.kernels.ops import linear
from speq.layers.arguments import find_cache

# Classes whose keys and queries have neighbouring columns that are rotated together.
INTERLEAVED = frozenset({"GlmMoeDsaIndexer"})


class Indexer:
    """Replacement of an indexer's forward. It holds the modules of transformers' own.

    chosen  what it chose in the last pass, sequence by sequence, for layers that use its choice
    """

    def __init__(self, module: Any) -> None:
        self._layer, self._name = module.layer_idx, type(module).__name__
        self._queries, self._keys, self._norm = module.wq_b, module.wk, module.k_norm
        self._weights, self._heads = module.weights_proj, module.n_heads
        self._scale, self.top_k = module.softmax_scale, module.index_topk
        self.chosen: list[Tensor | None] = []

    def __call__(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        **cache: Any,
    ) -> Tensor:
        """Choose for rows [1, T, H]: [1, T, N] bool, in place of the chosen tokens' numbers.

        q_resid         [1, T, L], the latents of their queries
        attention_mask  [1, T, N] bool, true where seen
        """
        cos, sin = (each[0] for each in position_embeddings)
        keys, kept = self.keys(hidden_states[0], cos, sin)[None], find_cache(self, cache)
        if kept is not None:
            keys = kept.update_indexer(keys, self._layer)
        seen = attention_mask[0]
        return self.choose(hidden_states[0], q_resid[0], cos, sin, keys[0], seen)[None]

    def choose_cached(
        self,
        hidden_states: Tensor,
        query_latents: Tensor,
        positions: Positions,
        start: int,
        cached: Tensor,
    ) -> Tensor | None:
        """Choose for rows [T, H] of a sequence: [T, start + T] bool; None: all that they see.

        query_latents  [T, L], of their queries
        positions      all but its start, which a recording lacks
        cached         [C, D], where the rows' keys are written
        """
        cos, sin, end = positions.cos, positions.sin, start + len(hidden_states)
        cached[start:end] = self.keys(hidden_states, cos, sin)
        if end <= self.top_k:
            return None
        seen = seen_by(len(hidden_states), start, positions.parents)
        return self.choose(hidden_states, query_latents, cos, sin, cached[:end], seen)

    def keys(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Keys [T, D] of rows [T, H]; cos and sin are [T, R]."""
        return self._rotated(self._norm(self._keys(hidden_states)), cos, sin)

    def choose(
        self,
        hidden_states: Tensor,
        query_latents: Tensor,
        cos: Tensor,
        sin: Tensor,
        keys: Tensor,
        seen: Tensor,
    ) -> Tensor:
        """Choose the best `top_k` tokens of those that each row sees: [T, N] bool.

        hidden_states  rows [T, H]; query_latents: [T, L] of their queries
        cos, sin       [T, R]
        keys           [N, D]
        seen           [T, N] bool
        """
        rows = [row for row, count in enumerate(seen.sum(1).tolist()) if count > self.top_k]
        if not rows:
            return seen
        heads = self._queries(query_latents).unflatten(1, (self._heads, -1)).transpose(0, 1)
        queries = self._rotated(heads, cos, sin).float()
        matrix = self._weights.weight
        weights = linear(hidden_states.to(matrix.dtype), matrix, None).float() * self._heads**-0.5
        chosen, keys = seen.clone(), keys.float()
        for row in rows:
            places = seen[row].nonzero()[:, 0]
            scores = (queries[:, row] @ rows_at(keys, places).mT * self._scale).relu_()
            best = (weights[row] @ scores).topk(self.top_k).indices
            chosen[row] = False
            chosen[row, places[best]] = True
        return chosen

    def _rotated(self, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first R columns of [..., T, D]."""
        turning, rest = rows.split([cos.shape[1], rows.shape[-1] - cos.shape[1]], -1)
        if self._name in INTERLEAVED:
            turning = torch.cat((turning[..., 0::2], turning[..., 1::2]), -1)
        first, second = turning.chunk(2, -1)
        return torch.cat((turning * cos + torch.cat((-second, first), -1) * sin, rest), -1)


def rows_at(rows: Tensor, places: Tensor) -> Tensor:
    """Rows at ascending places; a view where these follow one another."""
    first, last = int(places[0]), int(places[-1]) + 1
    return rows[first:last] if last - first == len(places) else rows[places]


def seen_by(rows: int, start: int, parents: Tensor | None) -> Tensor:
    """What rows of a sequence see, [rows, start + rows] bool: all before them, or before their tree
    and above them in it.

    parents  as `Positions` has them
    """
    seen = torch.ones(rows, start + rows, dtype=torch.bool).tril_(start)
    if parents is not None:
        nodes = len(parents)
        inside = torch.eye(nodes, dtype=torch.bool)
        for node, parent in enumerate(parents.tolist()[1:], start=1):
            inside[node] |= inside[parent]
        seen[:, -nodes:] = inside[-rows:]
    return seen


def uses_earlier_choice(layer: Any) -> bool:
    """True for a decoder layer that attends to what the indexer of a layer before it chose."""
    attention: Any = getattr(layer, "self_attn", None)
    return hasattr(attention, "indexer") and attention.indexer is None


def install_indexers(layers: Iterable[Any], replacing: bool) -> None:
    """Tell the attention of each decoder layer whose choice is its own.

    replacing  transformers' own passes use it as well
    """
    indexer: Indexer | None = None
    for layer in layers:
        attention: Any = getattr(layer, "self_attn", None)
        if not hasattr(attention, "indexer"):
            continue
        if not uses_earlier_choice(layer):
            indexer = Indexer(attention.indexer)
            if replacing:
                attention.indexer.forward = indexer
        attention.chooser = present(indexer, "the first layer of a part has no indexer")
