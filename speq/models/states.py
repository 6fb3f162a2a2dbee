"""Layers that keep a state of a sequence in place of KV for each token."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from speq.models.length import Length

# Snapshots of a sequence's states: at the last two places from which a longer prompt may go on.
SNAPSHOTS = 2


class StateLayer(Protocol):
    """Cache of one layer for one sequence, with rollback to any token after the settled ones."""

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the cache."""

    def keep(self, start: int, nodes: Tensor) -> None:
        """Keep, of the tokens from `start` on, those at positions `nodes`."""

    def new_snapshot(self) -> list[Tensor]:
        """Allocate what `save` fills."""

    def save(self, snapshot: list[Tensor]) -> None:
        """Copy the state after the sequence's tokens, which are all settled."""

    def restore(self, snapshot: list[Tensor]) -> None:
        """Go on from a copied state, which is the one after `Length.count` tokens."""

    def run(self, rows: Any, parts: Any) -> Tensor:
        """Run the layer's rule over tokens after the sequence's length; they are nodes of
        `Length.tree` if there is one. Return [T, ...].

        rows   outputs of the layer's projections for these tokens; `rows.split` takes counts
        parts  weights and functions of the layer
        """

    def output(self, rows: Any, parts: Any) -> Tensor:
        """Allocate a tensor as `run` returns it."""


class StateKind(Protocol):
    """Kind and sizes of one layer's state.

    mixer  a decoder layer's name for the module that has a state in place of attention
    """

    @property
    def mixer(self) -> str: ...

    def sizes_of(self, dtype: torch.dtype) -> list[int]:
        """Bytes of each tensor, computing in `dtype`."""

    def snapshot_sizes(self, dtype: torch.dtype) -> list[int]:
        """Bytes of each tensor of a snapshot, computing in `dtype`."""

    def layer(self, dtype: torch.dtype, device: torch.device, length: Length) -> StateLayer: ...

    def stand_in(self, module: nn.Module) -> Callable[..., Tensor]:
        """Build a replacement of a mixer's forward over caches with rollback."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """The layers of a model that keep states, by number, and the state's kind.

    own  kinds of layers that have one of their own
    """

    layers: frozenset[int] = frozenset()
    kind: StateKind | None = None
    own: tuple[tuple[int, StateKind], ...] = ()

    def kind_of(self, layer: int) -> StateKind | None:
        """Kind of a layer's state; None: it has none."""
        return dict(self.own).get(layer, self.kind) if layer in self.layers else None

    def sizes_of(self, dtype: torch.dtype, snapshots: int = 0) -> list[int]:
        """Bytes of each tensor of one sequence with so many snapshots, in all of them."""
        kinds = [kind for layer in sorted(self.layers) if (kind := self.kind_of(layer)) is not None]
        return [
            nbytes
            for kind in kinds
            for nbytes in kind.sizes_of(dtype) + snapshots * kind.snapshot_sizes(dtype)
        ]

    def nbytes(self, dtype: torch.dtype, snapshots: int = 0) -> int:
        """Bytes of one sequence with so many snapshots, in all of them."""
        return sum(self.sizes_of(dtype, snapshots))

    def among(self, layers: range) -> "StateShape":
        """The states of some layers only."""
        return StateShape(self.layers.intersection(layers), self.kind, self.own)

    def mixer(self, layer: nn.Module) -> nn.Module | None:
        """The module of a decoder layer that has a state; None: there is none."""
        found = None if self.kind is None else getattr(layer, self.kind.mixer, None)
        # Layers of one part call each of them so. All that keep states have a convolution.
        return found if hasattr(found, "conv1d") or hasattr(found, "conv") else None

    def hold(self, layers: Iterable[nn.Module]) -> None:
        """Make layers that keep states run over caches with rollback."""
        for layer in layers:
            module = self.mixer(layer)
            if self.kind is not None and module is not None:
                module.forward = self.kind.stand_in(module)


NO_STATES = StateShape()


@dataclass(slots=True)
class StateSnapshot:
    """Copies of the states of a sequence after its first `count` tokens; 0: of none.

    tensors  by layer number
    """

    tensors: dict[int, list[Tensor]]
    count: int = 0


def layers_of_kind(config: Any, kind: str) -> frozenset[int]:
    """Numbers of the layers that a config's `layer_types` gives this kind."""
    kinds = config.layer_types[: config.num_hidden_layers]
    return frozenset(at for at, each in enumerate(kinds) if each == kind)


class BatchStateLayer:
    """Caches of one layer for several sequences of a packed batch."""

    def __init__(self, layers: list[StateLayer], counts: list[int]) -> None:
        self._layers, self._counts = layers, counts

    def __getattr__(self, name: str) -> "BatchStateLayer":
        """The same of a part of each cache."""
        return BatchStateLayer([getattr(each, name) for each in self._layers], self._counts)

    def run(self, rows: Any, parts: Any) -> Tensor:
        pieces = zip(self._layers, rows.split(self._counts), strict=True)
        return torch.cat([layer.run(each, parts) for layer, each in pieces])

    def output(self, rows: Any, parts: Any) -> Tensor:
        return self._layers[0].output(rows, parts)
