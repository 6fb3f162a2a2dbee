"""A pass over several texts: their rows lie side by side, and each sees its own text alone.

Rows are packed, not padded: each computation of a row that is none of attention's depends on that
row alone, so a pass needs no row that stands for nothing, and no expert is asked for in its name.
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
    """Tokens of one text in a pass.

    cache  the text's; entries are written behind its length, which stays as it is
    tree   whose last nodes they are, with entries of the others kept; None: they are a chain
    """

    cache: KVCache
    token_ids: list[int]
    tree: Tree | None = None

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before it, and the first one the KV of the cache."""
        return self.tree is None or self.tree.is_chain


@dataclass(frozen=True, slots=True)
class BatchSpan:
    """Rows of one text among those of a pass.

    first, last  the first of them, and the one behind them
    tree         of a `SequenceTokens`, where that branches
    """

    cache: KVCache
    first: int
    last: int
    tree: Tree | None

    @property
    def rows(self) -> slice:
        return slice(self.first, self.last)


def spans_of(sequences: Sequence[SequenceTokens]) -> list[BatchSpan]:
    """The rows of each text, one behind another."""
    spans, first = [], 0
    for sequence in sequences:
        last = first + len(sequence.token_ids)
        check_rows(sequence.tree, last - first)
        spans.append(BatchSpan(sequence.cache, first, last, branching(sequence.tree)))
        first = last
    return spans


def check_rows(tree: Tree | None, count: int) -> None:
    """Raise Broken where a pass of so many tokens is of other nodes of a tree."""
    if tree is not None and tree.rows != count:
        raise Broken(f"{count} tokens are run as {tree.rows} nodes of a tree")


def branching(tree: Tree | None) -> Tree | None:
    """The tree, unless it is a chain, of which nothing needs to be said."""
    return None if tree is None or tree.is_chain else tree


class BatchKVLayer(CacheLayerMixin):
    """One layer of several texts."""

    is_sliding = False

    def __init__(self, layers: list[KVLayer], counts: list[int]) -> None:
        super().__init__()
        self._layers, self._counts = layers, counts
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, kwargs: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Write [1, heads, T, width] behind each text; return all entries, text behind text."""
        pieces = zip(
            self._layers,
            key_states.split(self._counts, dim=2),
            value_states.split(self._counts, dim=2),
            strict=True,
        )
        seen = [layer.update(keys, values) for layer, keys, values in pieces]
        return torch.cat([keys for keys, _ in seen], 2), torch.cat([each for _, each in seen], 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return sum(layer.get_seq_length() for layer in self._layers)

    def get_max_length(self) -> int:
        return sum(layer.get_max_length() for layer in self._layers)

    def get_max_cache_shape(self) -> int:
        return self.get_max_length()


def cache_of(spans: Sequence[BatchSpan]) -> Cache:
    """The entries of several texts as if they were one's, whose tokens do not see one another."""
    counts = [span.last - span.first for span in spans]
    layers = zip(*(span.cache.layers for span in spans), strict=True)

    def together(of_sequences: list[Any]) -> Any:
        kind = BatchKVLayer if isinstance(of_sequences[0], KVLayer) else BatchStateLayer
        return kind(of_sequences, counts)

    return Cache(layers=[together(list(of_sequences)) for of_sequences in layers])


def mask_of(masks: Sequence[Tensor]) -> Tensor:
    """Masks of texts [1, 1, T, end] as one over all their rows and entries."""
    return torch.block_diag(*(mask[0, 0] for mask in masks))[None, None].bool()
