"""Protocols of draft heads, for drafting with a head and for planning its memory.

A head computes KV for each token whose features are known, and predicts what follows it.
`HeadContext` keeps the KV; the drafter chooses tokens.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from speq.models.kv_cache import KVLayer
from speq.models.moe_model import MoEModel
from speq.routing import Route


class HeadSizes(Protocol):
    """Sizes of a head, for planning memory.

    captured_layers  layers of the exact model whose inputs are the head's features, in rising
                     order; none: its features are last hidden states
    window           tokens that a row looks back, its own included; None: no limit
    """

    @property
    def captured_layers(self) -> tuple[int, ...]: ...

    @property
    def window(self) -> int | None: ...

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(heads, width) of keys and of values."""

    @property
    def kv_elements_per_token(self) -> int: ...

    def sizes(self, dtype: torch.dtype) -> list[int]:
        """Bytes of each tensor, computing in `dtype`."""

    def nbytes(self, dtype: torch.dtype) -> int: ...

    def workspace_bytes(self, rows: int, vocab_size: int, context: int, dtype: torch.dtype) -> int:
        """Upper estimate of the memory of a pass over `rows` rows, and of one row's logits."""

    def features_bytes(self, rows: int, dtype: torch.dtype) -> int:
        """Bytes of features that a pass of the exact model over `rows` rows keeps for the head."""


class HeadState(Protocol):
    """Output of a head for some rows.

    feature  [T, H], used in place of the next tokens' features
    """

    @property
    def feature(self) -> Tensor: ...

    def row(self, at: int) -> "HeadState":
        """Select one row of [T, ...] as [1, ...]."""


@dataclass(frozen=True, slots=True)
class FeatureState:
    """Output of most heads: feature [T, H], usually before their last norm."""

    feature: Tensor

    def row(self, at: int) -> "FeatureState":
        """Select one row as [1, H]."""
        return FeatureState(self.feature[at:][:1])


class VisibleKV:
    """KV that the rows of a pass see, their own included.

    layer   storage of KV; that of the rows is written after its length
    mask    [1, 1, T, E] bool of T rows, true where seen; None: all of `slices`
    slices  parts of the KV that one row sees; None: all
    """

    def __init__(
        self, layer: KVLayer, mask: Tensor | None = None, slices: list[slice] | None = None
    ) -> None:
        self._layer, self.mask, self._slices = layer, mask, slices

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int | None = None, kwargs: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Write the KV of rows [1, heads, T, width]. Return what they see.

        layer_idx, kwargs  arguments that transformers passes to caches; there is one layer here
        """
        keys, values = self._layer.update(keys, values)
        if self._slices is None:
            return keys, values
        parts = ([each[:, :, s] for s in self._slices] for each in (keys, values))
        keys, values = (p[0] if len(p) == 1 else torch.cat(p, dim=2) for p in parts)
        return keys, values

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend with queries, keys and values [1, heads, T, width]; keys and values may have fewer
        heads.
        """
        keys, values = self.update(keys, values)
        shared = queries.shape[1] != keys.shape[1]
        return functional.scaled_dot_product_attention(
            queries, keys, values, self.mask, enable_gqa=shared
        )


class DraftHead(Protocol):
    """A draft head: predicts tokens from the exact model's hidden states.

    shape         its sizes
    predicts_two  whether a state also predicts the token after the next
    """

    @property
    def shape(self) -> HeadSizes: ...

    @property
    def predicts_two(self) -> bool: ...

    @property
    def nbytes(self) -> int: ...

    def reduce(self, features: Tensor) -> Tensor:
        """Reduce the exact model's features [T, F] to what the head keeps [T, H]."""

    def embed(self, token_ids: list[int], model: MoEModel) -> Tensor:
        """Embed tokens: [T, H]."""

    def run(self, embedded: Tensor, features: Tensor, places: Tensor, seen: VisibleKV) -> Any:
        """Run rows of one pass; return their `HeadState`.

        embedded  [T, H] of tokens; features: [T, H] of those before them, as `reduce` gives them
        places    [T] int64, positions in the sequence
        """

    def next_scores(self, state: Any, model: MoEModel) -> Tensor:
        """Logits [1, V] of the next token, from a state of one row. Finite, unless the head is
        damaged.
        """

    def after_scores(self, state: Any, model: MoEModel) -> Tensor:
        """Logits of the token after the next, from a head that predicts it."""


@runtime_checkable
class ExpertPredictor(Protocol):
    """A head that predicts experts of tokens before the exact model has run them.

    predicted_layers  MoE layers of which it does, ascending; may be empty
    """

    @property
    def predicted_layers(self) -> tuple[int, ...]: ...

    def routes(self, embedded: Tensor, features: Tensor) -> list[Route]:
        """Predict the routes of tokens in each of these layers, in host memory; not exact.

        embedded  [T, H] of the tokens; features: [T, H] of those before them, as for `run`
        """


class HeadSource(Protocol):
    """A checked head with known sizes, before it is loaded to a dtype and device."""

    @property
    def shape(self) -> HeadSizes: ...

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """Acceptance rate by depth, given that the tokens before were accepted, as measured in
        training; empty: unknown.
        """

    def load(self, dtype: torch.dtype, device: torch.device) -> DraftHead:
        """Load the head for drafting."""
