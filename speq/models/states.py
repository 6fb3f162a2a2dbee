"""Layers that keep a state of a text in place of entries for each of its tokens."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from speq.models.length import Length


class StateLayer(Protocol):
    """One layer of one text, which goes back to any token behind those that are settled."""

    @property
    def tensors(self) -> list[Tensor]:
        """All that is kept."""

    def keep(self, start: int, nodes: Tensor) -> None:
        """Of tokens from `start` on keep those at `nodes`, which are places in the text."""

    def run(self, rows: Any, parts: Any) -> Tensor:
        """What the layer's rule makes of tokens of a pass behind the text's length, [T, ...], as
        nodes of `Length.tree` where that is one.

        rows   of these tokens, as the layer's projections have them; `rows.split` takes counts
        parts  what the layer computes them with
        """


class StateKind(Protocol):
    """What one layer keeps of one text.

    mixer  what a decoder layer calls the module that has a state in place of attention
    """

    @property
    def mixer(self) -> str: ...

    def sizes_of(self, dtype: torch.dtype) -> list[int]:
        """Bytes of each tensor, computing in `dtype`."""

    def layer(self, dtype: torch.dtype, device: torch.device, length: Length) -> StateLayer: ...

    def stand_in(self, module: nn.Module) -> Callable[..., Tensor]:
        """What stands in for the forward of a mixer, over caches that go back."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """Layers of a model that keep states: their numbers, and what each keeps."""

    layers: frozenset[int] = frozenset()
    kind: StateKind | None = None

    def sizes_of(self, dtype: torch.dtype) -> list[int]:
        """Bytes of each tensor of one text, in all of them."""
        return [] if self.kind is None else self.kind.sizes_of(dtype) * len(self.layers)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Of one text, in all of them."""
        return sum(self.sizes_of(dtype))

    def among(self, layers: range) -> "StateShape":
        """Of those layers alone."""
        return StateShape(self.layers.intersection(layers), self.kind)

    def mixer(self, layer: nn.Module) -> nn.Module | None:
        """The module of a decoder layer that has a state; None: it has none."""
        return None if self.kind is None else getattr(layer, self.kind.mixer, None)

    def hold(self, layers: Iterable[nn.Module]) -> None:
        """Have those of a model's layers that keep states run over caches that go back."""
        for layer in layers:
            module = self.mixer(layer)
            if self.kind is not None and module is not None:
                module.forward = self.kind.stand_in(module)


NO_STATES = StateShape()


def layers_of_kind(config: Any, kind: str) -> frozenset[int]:
    """Those that `layer_types` of a config calls so."""
    kinds = config.layer_types[: config.num_hidden_layers]
    return frozenset(at for at, each in enumerate(kinds) if each == kind)


class BatchStateLayer:
    """One layer of several texts, whose tokens lie side by side."""

    def __init__(self, layers: list[StateLayer], counts: list[int]) -> None:
        self._layers, self._counts = layers, counts

    def run(self, rows: Any, parts: Any) -> Tensor:
        """As `StateLayer.run`, text by text."""
        pieces = zip(self._layers, rows.split(self._counts), strict=True)
        return torch.cat([layer.run(each, parts) for layer, each in pieces])
