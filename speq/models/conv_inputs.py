"""The last inputs of a convolution, of which those of tokens that are given up can be taken back.

Inputs of all tokens that may yet be given up lie behind those of the taps before them. When tokens
are settled, what lies behind them moves to the front: a few rows.
"""

import torch
from torch import Tensor

from speq.errors import Broken
from speq.kernels.ops import MAX_LINEAR_ROWS
from speq.models.length import Length

# Tokens that may be given up, at most: a draft, or a verification of it, and some to spare.
PENDING = MAX_LINEAR_ROWS + 32


class ConvInputs:
    """Of one layer of one text.

    tensor   [taps - 1 + PENDING, channels]: inputs of the taps before `base_at`, and of the tokens
             behind it
    base_at  tokens of the text that are settled, as far as this layer has heard
    """

    def __init__(
        self, taps: int, channels: int, dtype: torch.dtype, device: torch.device, length: Length
    ) -> None:
        self.length, self.base_at = length, 0
        self.tensor = torch.zeros(taps - 1 + PENDING, channels, dtype=dtype, device=device)
        self._before, self._sequence = taps - 1, length.sequence

    @staticmethod
    def nbytes(taps: int, channels: int, dtype: torch.dtype) -> int:
        return (taps - 1 + PENDING) * channels * dtype.itemsize

    def forget_other_text(self) -> bool:
        """Begin anew where the text is another one; tell whether it is."""
        if self._sequence == self.length.sequence:
            return False
        self.tensor.zero_()
        self._sequence, self.base_at = self.length.sequence, 0
        return True

    @property
    def newly_settled(self) -> int:
        """Tokens behind `base_at` that will not be given up."""
        settled = self.length.settled - self.base_at
        if not 0 <= settled <= PENDING:
            raise Broken(
                f"a text has {self.length.settled} settled tokens behind {self.base_at} that were: "
                "settled tokens are given up, or tokens settled that never were run"
            )
        return settled

    @property
    def left(self) -> int:
        """Tokens of the text that may be given up."""
        return self.length.count - self.length.settled

    def settle(self) -> None:
        """Have `base_at` behind all tokens that are settled by now."""
        settled = self.newly_settled
        if settled:
            kept = self._before + self.left
            self.tensor[:kept] = self.tensor[settled : settled + kept].clone()
            self.base_at = self.length.settled

    def write(self, inputs: Tensor) -> range:
        """Put inputs of tokens [T, channels] behind the text's length; their places behind
        `base_at`.
        """
        first = self.length.count - self.base_at
        places = range(first, first + len(inputs))
        if first < 0 or places.stop > PENDING:
            raise Broken(
                f"{places.stop} tokens of a text may be given up, and its states go back over "
                f"{PENDING}; tokens must be settled before so many follow"
            )
        self.tensor[self._before + places.start : self._before + places.stop] = inputs
        return places

    def keep(self, start: int, nodes: Tensor) -> None:
        """Of tokens from `start` on keep those at `nodes`, which are places in the text."""
        if start < self.base_at:
            raise Broken("a path of tokens is kept that are settled already")
        first = self._before + start - self.base_at
        self.tensor[first : first + len(nodes)] = self.tensor[self._before + nodes - self.base_at]

    def windows(self, places: range) -> Tensor:
        """Of tokens that lie one behind another the inputs up to their own: [T, taps, channels]."""
        return windows_in(self.tensor[places.start : self._before + places.stop], self._before + 1)

    def node_windows(self, parents: tuple[int, ...], nodes: list[int], root: int) -> Tensor:
        """The same of nodes of a tree, of which the text's inputs come before the root's.

        root  its place behind `base_at`; those of other nodes follow
        """
        rows = [place for node in nodes for place in self._reached(parents, node, root)]
        return self.tensor[rows].unflatten(0, (len(nodes), -1))

    def _reached(self, parents: tuple[int, ...], node: int, root: int) -> list[int]:
        """Where the inputs up to a node's own lie in `tensor`."""
        found, at = [], node
        for _ in range(self._before + 1):
            found.append(self._before + root + at)
            at = parents[at] if at >= 0 else at - 1
        return found[::-1]

    def read(self, inputs: Tensor) -> Tensor:
        """The same of tokens [T, channels] behind the text, all of which stay: only those are kept
        that the next tokens look back at.
        """
        if self.base_at != self.length.count:
            raise Broken("a prompt follows tokens of its text that are not settled")
        taps = torch.cat([self.tensor[: self._before], inputs])
        self.tensor[: self._before] = taps[len(inputs) :]
        self.base_at = self.length.count + len(inputs)
        return windows_in(taps, self._before + 1)


def windows_in(inputs: Tensor, taps: int) -> Tensor:
    """[T + taps - 1, channels] to [T, taps, channels], without a copy."""
    return inputs.unfold(0, taps, 1).transpose(1, 2)
