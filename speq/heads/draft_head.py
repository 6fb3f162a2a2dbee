"""The seam: what a head is to those who draft with it and to those who plan for it.

A head makes entries out of a text that it hears, one for each token whose features are known, and
says of each entry what follows. `HeadContext` keeps the entries, the drafter chooses.
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
    """What memory is planned by.

    tapped  layers of the exact model whose inputs are the head's features, in rising order; none:
            its features are last hidden states
    window  entries that a row looks back, its own included; None: all the way
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
        """Bytes of each tensor that is held, computing in `dtype`."""

    def nbytes(self, dtype: torch.dtype) -> int: ...

    def workspace_bytes(self, rows: int, vocab_size: int, context: int, dtype: torch.dtype) -> int:
        """An upper estimate of what a pass over so many rows takes, and of what one row says of
        every token.
        """

    def features_bytes(self, rows: int, dtype: torch.dtype) -> int:
        """What a pass of the exact model over so many rows keeps for the head."""


class HeadState(Protocol):
    """What a head makes of rows.

    feature  [T, H], in the place of the features of the next tokens
    """

    @property
    def feature(self) -> Tensor: ...

    def row(self, at: int) -> "HeadState":
        """One row of [T, ...], as [1, ...]."""


@dataclass(frozen=True, slots=True)
class FeatureState:
    """All that many heads make of rows: feature [T, H], mostly in front of their last norm."""

    feature: Tensor

    def row(self, at: int) -> "FeatureState":
        """One row, as [1, H]."""
        return FeatureState(self.feature[at:][:1])


class VisibleKV:
    """The entries that the rows of a pass see, their own among them.

    layer   where entries lie; those of the rows go behind its length
    mask    [1, 1, T, E] bool of T rows, true where seen; None: all that `slices` say
    slices  the entries that one row sees; None: all
    """

    def __init__(
        self, layer: KVLayer, mask: Tensor | None = None, slices: list[slice] | None = None
    ) -> None:
        self._layer, self.mask, self._slices = layer, mask, slices

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int | None = None, kwargs: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Write the entries of rows [1, heads, T, width]; return those that they see.

        layer_idx, kwargs  as transformers tells caches; there is one layer here
        """
        keys, values = self._layer.update(keys, values)
        if self._slices is None:
            return keys, values
        parts = ([each[:, :, s] for s in self._slices] for each in (keys, values))
        keys, values = (p[0] if len(p) == 1 else torch.cat(p, dim=2) for p in parts)
        return keys, values

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[1, heads, T, width] of each, of keys and values perhaps fewer heads that share."""
        keys, values = self.update(keys, values)
        shared = queries.shape[1] != keys.shape[1]
        return functional.scaled_dot_product_attention(
            queries, keys, values, self.mask, enable_gqa=shared
        )


class DraftHead(Protocol):
    """What drafts out of the exact model's hidden states.

    shape   its sizes
    beyond  whether a state says the token after the next as well
    """

    @property
    def shape(self) -> HeadSizes: ...

    @property
    def beyond(self) -> bool: ...

    @property
    def nbytes(self) -> int: ...

    def kept(self, features: Tensor) -> Tensor:
        """What it keeps [T, H] of what the exact model hands over [T, F]."""

    def embedded(self, token_ids: list[int], model: MoEModel) -> Tensor:
        """Tokens as it reads them: [T, H]."""

    def run(self, embedded: Tensor, features: Tensor, places: Tensor, seen: VisibleKV) -> Any:
        """Rows of one pass to a `HeadState` of them.

        embedded  [T, H] of tokens; features: [T, H] of those before them, as `kept` gives them
        places    [T] int64, of the entries in their text
        """

    def next_scores(self, state: Any, model: MoEModel) -> Tensor:
        """Logits [1, V] of the next token, by a state of one row. No token is infinitely far
        behind: that is what a damaged head's logits are known by.
        """

    def after_scores(self, state: Any, model: MoEModel) -> Tensor:
        """The same of the token after the next, of a head that says it."""


@runtime_checkable
class ExpertPredictor(Protocol):
    """A head that names experts of tokens before the exact model has run them.

    named_layers  MoE layers of which it does, ascending; perhaps none
    """

    @property
    def predicted_layers(self) -> tuple[int, ...]: ...

    def routes(self, embedded: Tensor, features: Tensor) -> list[Route]:
        """Of each of these layers the routes of tokens, in host memory, as nobody trusts them.

        embedded  [T, H] of the tokens; features: [T, H] of those before them, as for `run`
        """


class HeadSource(Protocol):
    """A head that was checked and sized, before it is known what it will be held in."""

    @property
    def shape(self) -> HeadSizes: ...

    @property
    def stand(self) -> tuple[float, ...]:
        """By depth, the share of its tokens that stood where it was trained, of those behind a
        token that stands; empty: nobody says.
        """

    def held(self, dtype: torch.dtype, device: torch.device) -> DraftHead:
        """The head to draft with."""
