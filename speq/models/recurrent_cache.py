"""Cache of a recurrent layer for one sequence: a state, and the inputs of its last tokens.

A state cannot be truncated as KV can. So the cache holds the state after the settled tokens, and
the inputs of the tokens that may still be rolled back. Accepted ones are run again when the next
pass begins. That takes a few operations a token, where a copy of the state for each drafted token
would take megabytes. A second state follows a draft from token to token.
"""

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from speq.errors import present
from speq.kernels.ops import MAX_LINEAR_ROWS
from speq.kernels.recurrent import RecurrentSizes
from speq.models.conv_inputs import PENDING, ConvInputs, windows_in
from speq.models.length import Length


class RecurrentRows(NamedTuple):
    """Outputs of a layer's projections for the tokens of a pass.

    inputs  [T, channels] of the convolution
    decays  [T, value heads] float32: logarithms of what stays of the state; or of each of its rows,
            [T, value heads, key width]
    betas   [T, value heads] float32: strengths of what is added
    """

    inputs: Tensor
    decays: Tensor
    betas: Tensor

    def split(self, counts: list[int]) -> list["RecurrentRows"]:
        return [
            RecurrentRows(*each)
            for each in zip(*(part.split(counts) for part in self), strict=True)
        ]


class RecurrentParts(Protocol):
    """A layer's rule, which its weights are part of."""

    sizes: RecurrentSizes

    def steps(self, state: Tensor, windows: Tensor, decays: Tensor, betas: Tensor) -> Tensor:
        """Run a few tokens after a state, which becomes that after them. Return their outputs, each
        as if run alone.

        windows  [T, taps, channels] of their inputs
        """

    def prompt(self, windows: Tensor, rows: RecurrentRows, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run many tokens after a state. Return their outputs and the new state.

        windows  as `steps` has them
        """


class RecurrentLayer:
    """Cache of one layer for one sequence.

    State `base` is the one after the settled tokens, `ConvInputs.base_at`. State `tip` is the one
    after `tip_at` tokens, the last of which may be rolled back.
    """

    def __init__(
        self, sizes: RecurrentSizes, dtype: torch.dtype, device: torch.device, length: Length
    ) -> None:
        self.length = length
        self._base = torch.zeros(sizes.state, device=device)
        self._tip = torch.zeros(sizes.state, device=device)
        self._inputs = ConvInputs(sizes.taps, sizes.channels, dtype, device, length)
        self._decays = torch.zeros(PENDING, *sizes.decays, device=device)
        self._betas = torch.zeros(PENDING, sizes.value_heads, device=device)
        self._tip_at = -1
        # Of the last pass: what is settled after it is run when a state is copied.
        self._parts: RecurrentParts | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return self._own_tensors

    @property
    def _own_tensors(self) -> list[Tensor]:
        return [self._base, self._tip, self._inputs.tensor, self._decays, self._betas]

    def run(self, rows: RecurrentRows, parts: RecurrentParts) -> Tensor:
        """Run the tokens of a pass after the sequence's length; they are nodes of `Length.tree` if
        there is one. Return [T, value heads, value width] float32.
        """
        self._parts = parts
        self._begin(parts)
        start, count = self.length.count, len(rows.inputs)
        if self.length.reading and count > MAX_LINEAR_ROWS:
            return self._read(rows, parts)
        places = self._inputs.write(rows.inputs)
        at = slice(places.start, places.stop)
        self._decays[at], self._betas[at] = rows.decays, rows.betas
        if self.length.tree is not None:
            return self._branch(parts)
        self._have_tip(start, parts)
        self._tip_at = start + count
        return self._step(self._tip, places, parts)

    def output(self, rows: RecurrentRows, parts: RecurrentParts) -> Tensor:
        heads, width = parts.sizes.state[::2]
        return rows.decays.new_empty(len(rows.inputs), heads, width)

    def keep(self, start: int, nodes: Tensor) -> None:
        """Keep, of the tokens from `start` on, those at positions `nodes`."""
        self._inputs.keep(start, nodes)
        first = start - self._inputs.base_at
        for each in (self._decays, self._betas):
            each[first : first + len(nodes)] = each[nodes - self._inputs.base_at]
        self._tip_at = -1

    def new_snapshot(self) -> list[Tensor]:
        return [torch.zeros_like(self._base), self._inputs.new_snapshot()]

    def save(self, snapshot: list[Tensor]) -> None:
        """Copy the state after the sequence's tokens, which are all settled."""
        if self._inputs.newly_settled:
            self._begin(present(self._parts, "tokens are settled that never ran"))
        snapshot[0].copy_(self._base)
        self._inputs.save(snapshot[1])

    def restore(self, snapshot: list[Tensor]) -> None:
        """Go on from a copied state, which is the one after `Length.count` tokens."""
        self._base.copy_(snapshot[0])
        self._inputs.restore(snapshot[1])
        self._tip_at = -1

    def _begin(self, parts: RecurrentParts) -> None:
        """Forget another sequence, and move `base` past all settled tokens."""
        inputs = self._inputs
        if inputs.reset_if_new_sequence():
            for tensor in self._own_tensors:
                tensor.zero_()
            self._tip_at = -1
        settled, left = inputs.newly_settled, inputs.left
        if not settled:
            return
        if self._tip_at == self.length.settled:
            self._base, self._tip = self._tip, self._base
            self._tip_at = -1
        else:
            self._step(self._base, range(settled), parts)
        inputs.settle()
        for each in (self._decays, self._betas):
            each[:left] = each[settled : settled + left].clone()

    def _have_tip(self, count: int, parts: RecurrentParts) -> None:
        """Move `tip` past the first `count` tokens."""
        if self._tip_at != count:
            self._tip.copy_(self._base)
            self._step(self._tip, range(count - self._inputs.base_at), parts)
            self._tip_at = count

    def _step(self, state: Tensor, pending: range, parts: RecurrentParts) -> Tensor:
        """Run a chain of tokens, given their places after `base_at`."""
        if not pending:
            return state.new_empty(0, *parts.sizes.state[::2])
        places = slice(pending.start, pending.stop)
        return self._run(state, self._inputs.windows(pending), places, parts)

    def _run(
        self, state: Tensor, windows: Tensor, places: slice | list[int], parts: RecurrentParts
    ) -> Tensor:
        return parts.steps(state, windows, self._decays[places], self._betas[places])

    def _branch(self, parts: RecurrentParts) -> Tensor:
        """Run nodes of a tree whose inputs are written, each from its parent's state."""
        tree = present(self.length.tree, "a pass over a tree was given no tree")
        root = self.length.count - tree.first
        self._have_tip(root, parts)
        first = root - self._inputs.base_at
        visible = tree.visible().any(0).tolist()  # by the nodes that this pass runs
        last_child = {parent: node for node, parent in enumerate(tree.parents) if visible[node]}
        states, out = {-1: self._tip}, []
        for node, parent in enumerate(tree.parents):
            if not visible[node]:
                continue
            # The tip stays: it is the sequence's state before the root.
            own = states.pop(parent) if last_child[parent] == node and parent >= 0 else None
            state = states[parent].clone() if own is None else own
            window = self._inputs.node_windows(tree.parents, [node], first)
            made = self._run(state, window, [first + node], parts)
            if node in last_child:
                states[node] = state
            if node >= tree.first:
                out.append(made)
        return torch.cat(out)

    def _read(self, rows: RecurrentRows, parts: RecurrentParts) -> Tensor:
        """Run tokens of a prompt, which are never rolled back."""
        out, state = parts.prompt(self._inputs.read(rows.inputs), rows, self._base)
        self._base.copy_(state)
        self._tip_at = -1
        return out


class RecurrentMixer(ABC):
    """Replacement of a module's forward that uses the module's parameters.

    It holds the module weakly: a reference cycle would free memory late.
    """

    def __init__(self, module: Any, sizes: RecurrentSizes) -> None:
        self._module, self.sizes = weakref.proxy(module), sizes
        self._rates: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """Weight of the convolution: [channels, taps]."""
        weight: Tensor = self._module.conv1d.weight
        return weight[:, 0]

    @abstractmethod
    def steps(self, state: Tensor, windows: Tensor, decays: Tensor, betas: Tensor) -> Tensor:
        """Run a few tokens after a state; see `RecurrentParts`."""

    @abstractmethod
    def prompt(self, windows: Tensor, rows: RecurrentRows, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run many tokens after a state; see `RecurrentParts`."""

    def rates(self) -> Tensor:
        """-exp(A_log) [value heads] in float32, made at the first pass."""
        if self._rates is None:
            self._rates = -self._module.A_log.float().exp()
        return self._rates

    def run(self, rows: RecurrentRows, cache: Any) -> Tensor:
        """Run the rule over a cache; None: over a whole sequence that nothing is kept of."""
        if cache is not None:
            made: Tensor = cache.layers[self._module.layer_idx].run(rows, self)
            return made
        sizes, inputs = self.sizes, rows.inputs
        before = inputs.new_zeros(sizes.taps - 1, sizes.channels)
        windows = windows_in(torch.cat([before, inputs]), sizes.taps)
        return self.prompt(windows, rows, torch.zeros(sizes.state, device=inputs.device))[0]


class RecurrentState(NamedTuple):
    """Sizes of a recurrent layer's state.

    mixer  a decoder layer's name for the module that has it
    made   makes what stands in for such a module's forward
    """

    sizes: RecurrentSizes
    mixer: str
    made: Callable[[nn.Module], Callable[..., Tensor]]

    def sizes_of(self, dtype: torch.dtype) -> list[int]:
        sizes = self.sizes
        state = 4 * math.prod(sizes.state)
        inputs = ConvInputs.nbytes(sizes.taps, sizes.channels, dtype)
        strengths = PENDING * 4 * sizes.value_heads
        return [state, state, inputs, PENDING * 4 * math.prod(sizes.decays), strengths]

    def snapshot_sizes(self, dtype: torch.dtype) -> list[int]:
        inputs = (self.sizes.taps - 1) * self.sizes.channels * dtype.itemsize
        return [4 * math.prod(self.sizes.state), inputs]

    def layer(self, dtype: torch.dtype, device: torch.device, length: Length) -> RecurrentLayer:
        return RecurrentLayer(self.sizes, dtype, device, length)

    def stand_in(self, module: nn.Module) -> Callable[..., Tensor]:
        return self.made(module)
