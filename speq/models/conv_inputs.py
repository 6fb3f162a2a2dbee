"""The last inputs of a convolution, with rollback of rejected tokens.

Inputs of tokens that may still be rolled back follow the inputs of the taps before them. When
tokens are settled, the few rows after them move to the front.
"""

import torch
from torch import Tensor

from speq.errors import Broken
from speq.kernels.ops import MAX_LINEAR_ROWS
from speq.models.length import Length

# Most tokens that may be rolled back: a draft or its verification, and some to spare.
PENDING = MAX_LINEAR_ROWS + 32


class ConvInputs:
    """Inputs of one layer for one sequence.

    tensor   [taps - 1 + PENDING, channels]: inputs of the taps before `base_at`, and of the tokens
             after it
    base_at  settled tokens of the sequence that this layer knows of
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

    def reset_if_new_sequence(self) -> bool:
        """Begin anew if the sequence has changed; return True if so."""
        if self._sequence == self.length.sequence:
            return False
        self.tensor.zero_()
        self._sequence, self.base_at = self.length.sequence, 0
        return True

    def new_snapshot(self) -> Tensor:
        return torch.zeros_like(self.tensor[: self._before])

    def save(self, snapshot: Tensor) -> None:
        """Copy the inputs that the next token looks back at."""
        snapshot.copy_(self.tensor[: self._before])

    def restore(self, snapshot: Tensor) -> None:
        """Go on after the sequence's tokens, which these inputs are the last of."""
        self.tensor[: self._before] = snapshot
        self._sequence, self.base_at = self.length.sequence, self.length.count

    @property
    def newly_settled(self) -> int:
        settled = self.length.settled - self.base_at
        if not 0 <= settled <= PENDING:
            raise Broken(
                f"a sequence has {self.length.settled} settled tokens after it had {self.base_at}: "
                "a settled token was rolled back, or one was settled that never ran"
            )
        return settled

    @property
    def left(self) -> int:
        """Tokens that may still be rolled back."""
        return self.length.count - self.length.settled

    def settle(self) -> None:
        """Move `base_at` past all settled tokens."""
        settled = self.newly_settled
        if settled:
            kept = self._before + self.left
            self.tensor[:kept] = self.tensor[settled : settled + kept].clone()
            self.base_at = self.length.settled

    def write(self, inputs: Tensor) -> range:
        """Write inputs of tokens [T, channels] after the sequence's length. Return their places
        after `base_at`.
        """
        first = self.length.count - self.base_at
        places = range(first, first + len(inputs))
        if first < 0 or places.stop > PENDING:
            raise Broken(
                f"{places.stop} tokens of a sequence may be rolled back; its states go back over "
                f"{PENDING}: settle tokens before so many follow"
            )
        self.tensor[self._before + places.start : self._before + places.stop] = inputs
        return places

    def keep(self, start: int, nodes: Tensor) -> None:
        """Keep, of the tokens from `start` on, those at positions `nodes`."""
        if start < self.base_at:
            raise Broken("keep() was given tokens that are settled already")
        first = self._before + start - self.base_at
        self.tensor[first : first + len(nodes)] = self.tensor[self._before + nodes - self.base_at]

    def windows(self, places: range) -> Tensor:
        """Return the inputs of each token of a chain, up to its own: [T, taps, channels]."""
        return windows_in(self.tensor[places.start : self._before + places.stop], self._before + 1)

    def node_windows(self, parents: tuple[int, ...], nodes: list[int], root: int) -> Tensor:
        """Return the same for nodes of a tree; the sequence's inputs come before the root's.

        root  its place after `base_at`; the other nodes follow
        """
        rows = [place for node in nodes for place in self._path_rows(parents, node, root)]
        return self.tensor[rows].unflatten(0, (len(nodes), -1))

    def _path_rows(self, parents: tuple[int, ...], node: int, root: int) -> list[int]:
        """Rows of `tensor` that hold the inputs up to a node's own."""
        found, at = [], node
        for _ in range(self._before + 1):
            found.append(self._before + root + at)
            at = parents[at] if at >= 0 else at - 1
        return found[::-1]

    def read(self, inputs: Tensor) -> Tensor:
        """Return the same for prompt tokens [T, channels], which are never rolled back. Only the
        inputs that the next tokens look back at are kept.
        """
        if self.base_at != self.length.count:
            raise Broken("a prompt follows tokens of its sequence that are not settled")
        taps = torch.cat([self.tensor[: self._before], inputs])
        self.tensor[: self._before] = taps[len(inputs) :]
        self.base_at = self.length.count + len(inputs)
        return windows_in(taps, self._before + 1)


def windows_in(inputs: Tensor, taps: int) -> Tensor:
    """[T + taps - 1, channels] to [T, taps, channels], without a copy."""
    return inputs.unfold(0, taps, 1).transpose(1, 2)
