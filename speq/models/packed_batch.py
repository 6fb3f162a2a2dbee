"""A packed batch: rows of several sequences in one pass, each of which sees only its own sequence.

Rows are packed, not padded: outside attention each row is computed independently. So a pass has no
padding rows, and no expert is loaded for one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from speq.errors import Broken
from speq.models.kv_cache import KVCache, KVLayer
from speq.models.states import BatchStateLayer
from speq.models.tree import Tree


@dataclass(frozen=True, slots=True)
class SequenceTokens:
    """Tokens of one sequence in a pass.

    cache  the sequence's cache; KV is written after its length, which does not change
    tree   the tokens are its last nodes, and the KV of the others is cached; None: a chain
    """

    cache: KVCache
    token_ids: list[int]
    tree: Tree | None = None

    @property
    def is_chain(self) -> bool:
        """True if each token follows the one before it, and the first one the cached tokens."""
        return self.tree is None or self.tree.is_chain


@dataclass(frozen=True, slots=True)
class BatchSpan:
    """Rows of one sequence among those of a pass.

    first, last  the first row and the row after the last
    tree         tree of the `SequenceTokens`, if it branches
    """

    cache: KVCache
    first: int
    last: int
    tree: Tree | None

    @property
    def rows(self) -> slice:
        return slice(self.first, self.last)


def spans_of(sequences: Sequence[SequenceTokens]) -> list[BatchSpan]:
    """Assign rows to each sequence, one after another."""
    spans, first = [], 0
    for sequence in sequences:
        last = first + len(sequence.token_ids)
        check_rows(sequence.tree, last - first)
        spans.append(BatchSpan(sequence.cache, first, last, branching_tree(sequence.tree)))
        first = last
    return spans


def check_rows(tree: Tree | None, count: int) -> None:
    """Raise Broken if a pass has another number of tokens than the tree has nodes to run."""
    if tree is not None and tree.rows != count:
        raise Broken(f"{count} tokens are run as {tree.rows} nodes of a tree")


def branching_tree(tree: Tree | None) -> Tree | None:
    """Return the tree; None for a chain."""
    return None if tree is None or tree.is_chain else tree


class BatchKVLayer(CacheLayerMixin):
    """KV of one layer of several sequences."""

    is_sliding = False
    # As KVLayer has it.
    indexer_position_ids: Tensor | None = None

    def __init__(self, layers: list[Any], counts: list[int]) -> None:
        super().__init__()
        self._layers, self._counts = layers, counts
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, kwargs: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Write [1, heads, T, width] after each sequence's length. Return all KV, sequence after
        sequence.
        """
        pieces = zip(
            self._layers,
            key_states.split(self._counts, dim=2),
            value_states.split(self._counts, dim=2),
            strict=True,
        )
        seen = [layer.update(keys, values) for layer, keys, values in pieces]
        return torch.cat([keys for keys, _ in seen], 2), torch.cat([each for _, each in seen], 2)

    def update_indexer(self, index_keys: Tensor) -> Tensor:
        """Write an indexer's keys [1, T, width] as `update` does."""
        pieces = zip(self._layers, index_keys.split(self._counts, dim=1), strict=True)
        return torch.cat([layer.update_indexer(each) for layer, each in pieces], 1)

    @property
    def parts(self) -> list[tuple[Any, slice, slice]]:
        """Each sequence's layer, its rows in the pass, and the columns of its KV in a mask."""
        found, row, column = [], 0, 0
        for layer, count in zip(self._layers, self._counts, strict=True):
            rows = slice(row, row + count)
            columns = slice(column, column + layer.get_seq_length() + count)
            found.append((layer, rows, columns))
            row, column = rows.stop, columns.stop
        return found

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return sum(layer.get_seq_length() for layer in self._layers)

    def get_max_length(self) -> int:
        return sum(layer.get_max_length() for layer in self._layers)

    def get_max_cache_shape(self) -> int:
        return self.get_max_length()


def cache_of(spans: Sequence[BatchSpan]) -> Cache:
    """View the caches of several sequences as one cache."""
    counts = [span.last - span.first for span in spans]
    layers = zip(*(span.cache.layers for span in spans), strict=True)

    def together(of_sequences: list[Any]) -> Any:
        kind = BatchKVLayer if isinstance(of_sequences[0], KVLayer) else BatchStateLayer
        return kind(of_sequences, counts)

    return Cache(layers=[together(list(of_sequences)) for of_sequences in layers])


def states_of(spans: Sequence[BatchSpan]) -> Cache:
    """The cache of a pass, for layers that keep states."""
    return spans[0].cache if len(spans) == 1 else cache_of(spans)


def mask_of(masks: Sequence[Tensor]) -> Tensor:
    """Combine the masks of sequences [1, 1, T, end] into one over all their rows and KV."""
    return torch.block_diag(*(mask[0, 0] for mask in masks))[None, None].bool()
