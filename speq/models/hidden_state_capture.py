"""Capture of the inputs of some layers during a pass, for drafters that read them."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from speq.errors import Broken


class HiddenStateCapture:
    """Inputs of layers in the last pass.

    body     all of a model but its head
    layers   layer numbers, in rising order
    streams  rows that a token has between layers, of which their mean is captured
    """

    def __init__(self, body: nn.Module, layers: tuple[int, ...], streams: int = 1) -> None:
        self._streams = streams
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._states: list[Tensor | None] = [None] * len(layers)
        modules: Any = body.layers
        for layer in layers:
            watch = modules[layer].register_forward_pre_hook
            watch(partial(self._enter, layer), with_kwargs=True)

    def _enter(self, layer: int, module: nn.Module, args: tuple[Any, ...], others: Any) -> None:
        self.see(layer, (args[0] if args else others["hidden_states"])[0])

    def reads(self, layer: int) -> bool:
        """True if the input of a layer is captured."""
        return layer in self._places

    def see(self, layer: int, hidden_states: Tensor) -> None:
        """Record the input of a layer: [T, streams * H] or [T, streams, H]."""
        place = self._places.get(layer)
        if place is None:
            return
        if self._streams > 1:
            hidden_states = hidden_states.reshape(len(hidden_states), self._streams, -1).mean(1)
        self._states[place] = hidden_states

    def take(self) -> Tensor:
        """Return the captured inputs side by side, [T, N * H], and forget them."""
        states = [state for state in self._states if state is not None]
        if len(states) != len(self._states):
            raise Broken("the features of a pass were requested before any pass ran")
        self._states = [None] * len(states)
        return torch.cat(states, -1)
