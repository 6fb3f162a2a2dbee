"""What a layer of the gated delta rule keeps of a text: a state, and inputs of its last tokens.

A state cannot be cut back as entries can. So the state is kept that belongs to the tokens which are
settled, and behind it the inputs of all tokens that may yet be given up. What is kept of these is
run again when the next pass begins: a few operations a token, where a copy of the state for each
drafted token would take megabytes. A second state follows a draft from token to token.
"""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from speq.kernels.delta_rule import DeltaSizes, convolved, delta_steps, heads_of
from speq.kernels.ops import MAX_LINEAR_ROWS
from speq.models.length import Length

# Tokens that may be given up, at most: a draft, or a verification of it, and some to spare.
PENDING = MAX_LINEAR_ROWS + 32


class DeltaShape(NamedTuple):
    """Layers of a model that keep states: their numbers, and the sizes of each."""

    layers: frozenset[int]
    sizes: DeltaSizes

    def sizes_of(self, dtype: torch.dtype) -> list[int]:
        """Bytes of each tensor of one text, in all of them."""
        sizes = self.sizes
        state = 4 * math.prod(sizes.state)
        inputs = (sizes.taps - 1 + PENDING) * sizes.channels * dtype.itemsize
        strengths = PENDING * 4 * sizes.value_heads
        return [state, state, inputs, strengths, strengths] * len(self.layers)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Of one text, in all of them."""
        return sum(self.sizes_of(dtype))


NO_STATES = DeltaShape(frozenset(), DeltaSizes(1, 1, 1, 1, 1))


class DeltaRows(NamedTuple):
    """Tokens of a pass as a layer's projections have them.

    inputs  [T, channels] of the convolution
    decays, betas  [T, value heads] float32
    """

    inputs: Tensor
    decays: Tensor
    betas: Tensor

    def split(self, counts: list[int]) -> list["DeltaRows"]:
        return [
            DeltaRows(*each) for each in zip(*(part.split(counts) for part in self), strict=True)
        ]


class DeltaParts(Protocol):
    """What a layer computes its tokens with.

    weight  of the convolution, [channels, taps]
    """

    sizes: DeltaSizes

    @property
    def weight(self) -> Tensor: ...

    def prompt(self, windows: Tensor, rows: DeltaRows, state: Tensor) -> tuple[Tensor, Tensor]:
        """Many tokens behind a state, and the state behind them. windows: [T, taps, channels]"""


class DeltaLayer:
    """One layer of one text.

    State `base` is that behind `base_at` tokens, which are settled; `tip` is that behind `tip_at`
    tokens, of which the last ones may be given up. Inputs of the taps before `base_at` and of the
    tokens behind it lie side by side.
    """

    def __init__(
        self, sizes: DeltaSizes, dtype: torch.dtype, device: torch.device, length: Length
    ) -> None:
        self.length, self._before = length, sizes.taps - 1
        self._base = torch.zeros(sizes.state, device=device)
        self._tip = torch.zeros(sizes.state, device=device)
        self._inputs = torch.zeros(
            self._before + PENDING, sizes.channels, dtype=dtype, device=device
        )
        self._decays = torch.zeros(PENDING, sizes.value_heads, device=device)
        self._betas = torch.zeros(PENDING, sizes.value_heads, device=device)
        self._text = length.text
        self._base_at, self._tip_at = 0, -1

    @property
    def tensors(self) -> list[Tensor]:
        return [self._base, self._tip, self._inputs, self._decays, self._betas]

    def run(self, rows: DeltaRows, parts: DeltaParts) -> Tensor:
        """Tokens of a pass behind the text's length, as nodes of `Length.tree` where that is one:
        [T, value heads, value width] float32.
        """
        self._begin(parts)
        start, count = self.length.count, len(rows.inputs)
        if count > MAX_LINEAR_ROWS:
            return self._read(rows, parts)
        first = start - self._base_at
        assert first + count <= PENDING, "tokens must be settled before so many follow"
        last = first + count
        self._inputs[self._before + first : self._before + last] = rows.inputs
        self._decays[first:last], self._betas[first:last] = rows.decays, rows.betas
        if self.length.tree is not None:
            return self._branch(parts)
        self._have_tip(start, parts)
        self._tip_at = start + count
        return self._step(self._tip, range(first, last), parts)

    def keep(self, start: int, nodes: Tensor) -> None:
        """Of tokens from `start` on keep those at `nodes`, which are places in the text."""
        first = start - self._base_at
        last = first + len(nodes)
        places = nodes - self._base_at
        self._inputs[self._before + first : self._before + last] = self._inputs[
            self._before + places
        ]
        self._decays[first:last] = self._decays[places]
        self._betas[first:last] = self._betas[places]
        self._tip_at = -1

    def _begin(self, parts: DeltaParts) -> None:
        """Forget another text, and have `base` behind all tokens that are settled by now."""
        if self._text != self.length.text:
            for tensor in self.tensors:
                tensor.zero_()
            self._text, self._base_at, self._tip_at = self.length.text, 0, -1
        settled = self.length.settled - self._base_at
        assert settled >= 0, "settled tokens stay"
        if not settled:
            return
        if self._tip_at == self.length.settled:
            self._base, self._tip = self._tip, self._base
            self._tip_at = -1
        else:
            self._step(self._base, range(settled), parts)
        left = self.length.count - self.length.settled
        kept = slice(settled, self._before + settled + left)
        self._inputs[: self._before + left] = self._inputs[kept].clone()
        for each in (self._decays, self._betas):
            each[:left] = each[settled : settled + left].clone()
        self._base_at = self.length.settled

    def _have_tip(self, count: int, parts: DeltaParts) -> None:
        """Have `tip` behind so many tokens."""
        if self._tip_at != count:
            self._tip.copy_(self._base)
            self._step(self._tip, range(count - self._base_at), parts)
            self._tip_at = count

    def _step(self, state: Tensor, pending: range, parts: DeltaParts) -> Tensor:
        """Run tokens that lie one behind another, by their places behind `base_at`."""
        if not pending:
            return state.new_empty(0, *parts.sizes.state[::2])
        taps = self._inputs[pending.start : self._before + pending.stop]
        windows = taps.unfold(0, self._before + 1, 1).transpose(1, 2)
        places = slice(pending.start, pending.stop)
        return self._run(state, windows, places, parts)

    def _run(
        self, state: Tensor, windows: Tensor, places: slice | list[int], parts: DeltaParts
    ) -> Tensor:
        """Each token by itself: torch's sums and functions of several rows have other last bits."""
        out, weight = [], parts.weight
        decays, betas = self._decays[places], self._betas[places]
        for window, decay, beta in zip(windows, decays, betas, strict=True):
            mixed = convolved(window[None], weight)
            tokens = heads_of(mixed, decay[None], beta[None], parts.sizes)
            out.append(delta_steps(state, tokens))
        return torch.cat(out)

    def _branch(self, parts: DeltaParts) -> Tensor:
        """Nodes of a tree, whose inputs are there: each behind its parent."""
        tree = self.length.tree
        assert tree is not None
        root = self.length.count - tree.first
        self._have_tip(root, parts)
        first = root - self._base_at
        visible = tree.visible().any(0).tolist()  # by those that are asked for
        last_child = {parent: node for node, parent in enumerate(tree.parents) if visible[node]}
        states, out = {-1: self._tip}, []
        for node, parent in enumerate(tree.parents):
            if not visible[node]:
                continue
            # The tip stays: it is the state of the text in front of the root.
            own = states.pop(parent) if last_child[parent] == node and parent >= 0 else None
            state = states[parent].clone() if own is None else own
            window = self._inputs[self._taps_of(tree.parents, node, first)][None]
            made = self._run(state, window, [first + node], parts)
            if node in last_child:
                states[node] = state
            if node >= tree.first:
                out.append(made)
        return torch.cat(out)

    def _taps_of(self, parents: tuple[int, ...], node: int, first: int) -> list[int]:
        """Where the inputs up to a node's own lie, of which the text's come before the root's."""
        found, at = [], node
        for _ in range(self._before + 1):
            found.append(self._before + first + at)
            at = parents[at] if at >= 0 else at - 1
        return found[::-1]

    def _read(self, rows: DeltaRows, parts: DeltaParts) -> Tensor:
        """Tokens of a prompt, all of which stay."""
        assert self._base_at == self.length.count, "a prompt follows settled tokens"
        taps = torch.cat([self._inputs[: self._before], rows.inputs])
        windows = taps.unfold(0, self._before + 1, 1).transpose(1, 2)
        out, state = parts.prompt(windows, rows, self._base)
        self._base.copy_(state)
        self._inputs[: self._before] = taps[len(rows.inputs) :]
        self._base_at, self._tip_at = self.length.count + len(rows.inputs), -1
        return out


class DeltaTexts:
    """One layer of several texts, whose tokens lie side by side."""

    def __init__(self, layers: list[DeltaLayer], counts: list[int]) -> None:
        self._layers, self._counts = layers, counts

    def run(self, rows: DeltaRows, parts: DeltaParts) -> Tensor:
        pieces = zip(self._layers, rows.split(self._counts), strict=True)
        return torch.cat([layer.run(each, parts) for layer, each in pieces])
