"""What goes into some of a model's layers, kept while a pass runs, for drafters that read it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from speq.errors import Broken


class HiddenStateCapture:
    """Hidden states in front of layers, of the pass that ran last.

    body    all of a model but its head
    layers  their numbers, in rising order
    """

    def __init__(self, body: nn.Module, layers: tuple[int, ...]) -> None:
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._states: list[Tensor | None] = [None] * len(layers)
        modules: Any = body.layers
        for layer in layers:
            watch = modules[layer].register_forward_pre_hook
            watch(partial(self._enter, layer), with_kwargs=True)

    def _enter(self, layer: int, module: nn.Module, args: tuple[Any, ...], others: Any) -> None:
        self.see(layer, (args[0] if args else others["hidden_states"])[0])

    def see(self, layer: int, hidden_states: Tensor) -> None:
        """[T, H] are about to go into a layer, of which nobody else need ask."""
        place = self._places.get(layer)
        if place is not None:
            self._states[place] = hidden_states

    def take(self) -> Tensor:
        """Of all of them side by side: [T, N * H]."""
        states = [state for state in self._states if state is not None]
        if len(states) != len(self._states):
            raise Broken("features of a pass are asked for, and none has run")
        self._states = [None] * len(states)
        return torch.cat(states, -1)
