"""GLM-5.3's attention over pools of tokens that an indexer selects, from latents.

A pool's key is a mean of its tokens' keys, weighted channel by channel. Keys and weights of
tokens are cached beside the KV.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from speq.errors import present
from speq.layers.arguments import find_cache
from speq.models.token_selection import BlockScores


class PoolIndexer:
    """GLM-5.3's indexer over caches with rollback."""

    def __init__(self, module: Any) -> None:
        self._module = weakref.proxy(module)

    def select(
        self, hidden_states: Tensor, query_latents: Tensor, visible: Tensor, layer: Any
    ) -> Tensor:
        """Select for rows [1, T, H] of what a mask [T, N] bool shows: a mask again.

        query_latents  [1, T, L], of their queries
        layer          cache of the indexer's keys
        """
        module, heads = self._module, self._module.n_heads
        # A token's key, and what it weighs in its pool's.
        weights = functional.linear(hidden_states, module.index_kpool_compress_gate)
        keys = torch.cat([module.k_norm(module.wk(hidden_states)), weights], 2)
        keys = layer.update_indexer(keys)[0]
        queries = module.wq_b(query_latents)[0].unflatten(1, (heads, -1)).float()
        rows_of = hidden_states.to(module.weights_proj.weight.dtype)
        of_heads = module.weights_proj(rows_of)[0].float() * heads**-0.5

        def scores(rows: Tensor, pools: Tensor) -> Tensor:
            by_head = torch.relu(queries[rows] @ pools.T * module.softmax_scale)
            return (of_heads[rows, None] @ by_head)[:, 0]

        size = module.index_kpool
        sizes = size, module.index_topk // size, heads
        return BlockScores(*sizes, keys, self._pool_keys, scores).select(visible)

    def _pool_keys(self, keys: Tensor) -> Tensor:
        """Keys of pools, of those of their tokens [B, tokens, 2 * D]: [B, D]."""
        keys, weights = keys.chunk(2, 2)
        shares = (weights.float() + self._module.index_kpool_compress_ape.float()).softmax(1)
        return (shares.to(keys.dtype) * keys).sum(1).float()


class PooledAttention:
    """Replacement of the forward of GLM-5.3's latent attention, over caches with rollback. Latents
    are not expanded: queries and results are multiplied by the expansion.
    """

    def __init__(self, module: Any) -> None:
        self._module = weakref.proxy(module)
        self._indexer = None if module.indexer is None else PoolIndexer(module.indexer)

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        prev_topk_indices: Tensor | None = None,
        **given: Any,
    ) -> tuple[Tensor, None, Tensor]:
        """Map hidden_states [1, T, H] to [1, T, H]. Also return a mask [T, N] bool of what was
        selected, which the next layer may be given as `prev_topk_indices`.

        attention_mask  [1, 1, T, N] bool, true where seen
        given           arguments that `find_cache` reads
        """
        module, heads = self._module, self._module.num_heads
        layer = find_cache(self, given).layers[module.layer_idx]
        query_latents = module.q_a_layernorm(module.q_a_proj(hidden_states))
        latents = module.kv_a_layernorm(module.kv_a_proj_with_mqa(hidden_states))[:, None]
        latents, _ = layer.update(latents, latents[..., :0])
        if self._indexer is None:
            seen = present(prev_topk_indices, "a layer without an indexer was given no selection")
        else:
            seen = self._indexer.select(hidden_states, query_latents, attention_mask[0, 0], layer)
        # In each head, what makes keys and then values of a latent.
        expansion = module.kv_b_proj.exact.words().unflatten(0, (heads, -1))
        of_keys, of_values = expansion.split([module.qk_nope_head_dim, module.v_head_dim], 1)
        queries = module.q_b_proj(query_latents)[0].unflatten(1, (heads, -1)).transpose(0, 1)
        attend = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
        mask, scaling = seen[None, None], module.scaling
        mixed, _ = attend(
            module, (queries @ of_keys)[None], latents, latents, mask, scaling=scaling
        )
        made = (mixed[0].transpose(0, 1) @ of_values.mT).transpose(0, 1)
        return module.o_proj(made.flatten(1)[None]), None, seen


def pooled_attention(module: Any, rotary: None) -> PooledAttention | None:
    """Make what stands in for an attention's forward; None for layers that keep states."""
    return PooledAttention(module) if hasattr(module, "indexer") else None
