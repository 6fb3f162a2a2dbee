"""The gated short convolution of lfm2_moe over a cache with rollback.

Its cache has only the last inputs of its convolution. So a token's result is the same in a chain,
in a tree and in a prompt of any length.
"""

import weakref
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from speq.errors import CheckpointError
from speq.kernels.convolution import convolve
from speq.kernels.ops import MAX_LINEAR_ROWS
from speq.layers.arguments import find_cache
from speq.models.conv_inputs import ConvInputs, windows_in
from speq.models.length import Length
from speq.models.states import StateShape, layers_of_kind

# Values of layer_types.
CONV, ATTENTION = "conv", "full_attention"


class ConvParts(Protocol):
    """Weights of a layer's convolution: weight [channels, taps], bias [channels] or None."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...


class ConvLayer:
    """Cache of one layer for one sequence."""

    def __init__(
        self, taps: int, channels: int, dtype: torch.dtype, device: torch.device, length: Length
    ) -> None:
        self._length = length
        self._inputs = ConvInputs(taps, channels, dtype, device, length)

    @property
    def tensors(self) -> list[Tensor]:
        return [self._inputs.tensor]

    def run(self, rows: Tensor, parts: ConvParts) -> Tensor:
        """Convolve the inputs [T, channels] of tokens after the sequence's length; they are nodes
        of `Length.tree` if there is one. Return [T, channels] of the same dtype.
        """
        return convolve(self.windows(rows), parts.weight, parts.bias)

    def windows(self, rows: Tensor) -> Tensor:
        """Keep such inputs, and return each with those before it: [T, taps, channels]."""
        inputs, tree = self._inputs, self._length.tree
        inputs.reset_if_new_sequence()
        inputs.settle()
        if self._length.reading and len(rows) > MAX_LINEAR_ROWS:
            return inputs.read(rows)
        places = inputs.write(rows)
        if tree is None:
            return inputs.windows(places)
        nodes = list(range(tree.first, tree.first + len(rows)))
        return inputs.node_windows(tree.parents, nodes, places.start - tree.first)

    def output(self, rows: Tensor, parts: ConvParts) -> Tensor:
        return torch.empty_like(rows)

    def keep(self, start: int, nodes: Tensor) -> None:
        """Keep, of the tokens from `start` on, those at positions `nodes`."""
        self._inputs.keep(start, nodes)

    def new_snapshot(self) -> list[Tensor]:
        return [self._inputs.new_snapshot()]

    def save(self, snapshot: list[Tensor]) -> None:
        """Copy the state after the sequence's tokens, which are all settled."""
        self._inputs.settle()
        self._inputs.save(snapshot[0])

    def restore(self, snapshot: list[Tensor]) -> None:
        """Go on from a copied state, which is the one after `Length.count` tokens."""
        self._inputs.restore(snapshot[0])


class ShortConv:
    """Replacement of a module's forward that uses the module's parameters.

    It holds the module weakly: a reference cycle would free memory late.
    """

    def __init__(self, module: Any) -> None:
        self._module = weakref.proxy(module)

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self._module.conv.weight
        return weight[:, 0]

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self._module.conv.bias
        return bias

    def __call__(self, hidden_states: Tensor, **given: Any) -> Tensor:
        """Map hidden_states [1, T, H] to [1, T, H].

        given  arguments that `find_cache` reads
        """
        module = self._module
        cache = find_cache(self, given)
        input_gate, output_gate, given = module.in_proj(hidden_states)[0].chunk(3, dim=-1)
        inputs = input_gate * given
        if cache is None:
            taps = module.conv_kernel_size
            padded = torch.cat([inputs.new_zeros(taps - 1, inputs.shape[1]), inputs])
            mixed = convolve(windows_in(padded, taps), self.weight, self.bias)
        else:
            mixed = cache.layers[module.layer_idx].run(inputs, self)
        out: Tensor = module.out_proj((output_gate * mixed)[None])
        return out


class ConvState(NamedTuple):
    """Sizes of a short convolution's cache."""

    taps: int
    channels: int
    mixer: str = "conv"

    def sizes_of(self, dtype: torch.dtype) -> list[int]:
        return [ConvInputs.nbytes(self.taps, self.channels, dtype)]

    def snapshot_sizes(self, dtype: torch.dtype) -> list[int]:
        return [(self.taps - 1) * self.channels * dtype.itemsize]

    def layer(self, dtype: torch.dtype, device: torch.device, length: Length) -> ConvLayer:
        return ConvLayer(self.taps, self.channels, dtype, device, length)

    def stand_in(self, module: nn.Module) -> ShortConv:
        return ShortConv(module)


def conv_states(config: Any) -> StateShape:
    """States of the layers that a config calls convolutions."""
    return StateShape(
        layers_of_kind(config, CONV), ConvState(config.conv_L_cache, config.hidden_size)
    )


def check_short_conv(config: Any, num_experts: int, where: object) -> None:
    """Raise SpeqError unless each layer is of a known kind, and convolutions have taps."""
    kinds, layers = config.layer_types, config.num_hidden_layers
    if not isinstance(kinds, list) or len(kinds) != layers or not {*kinds} <= {CONV, ATTENTION}:
        raise CheckpointError(
            f"{where} has layer_types {kinds!r:.80}; it must name each of {layers} layers "
            f"{CONV!r} or {ATTENTION!r}: download config.json again, or correct that value"
        )
    if not isinstance(config.conv_L_cache, int) or config.conv_L_cache < 1:
        raise CheckpointError(
            f"{where} has conv_L_cache {config.conv_L_cache!r}; it must be at least 1: download "
            "config.json again, or correct that value"
        )
