"""Sizes of compact records: losslessly or residually packed experts and dense matrices.

csrc/compact.h has their layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LINE_BYTES = 64
QUAD_ROWS = 4
BLOCK_COLUMNS = 64
# Bytes of an index entry.
INDEX_BYTES = 4
# Index entries hold positions below it, so the streams of a record end below it too.
STREAMS_END = 1 << 31
# Decoders read whole vectors, and so up to this far past the streams.
SLACK_BYTES = 128


def expert_matrices(
    hidden_size: int, expert_width: int, gated: bool
) -> tuple[tuple[int, int], ...]:
    """Rows and columns of gate, up and down, or of up and down without a gate."""
    up = expert_width, hidden_size
    return (*((up,) if gated else ()), up, (hidden_size, expert_width))


@dataclass(frozen=True, slots=True)
class CompactLayout:
    """Sections of a record.

    matrices  rows and columns of each of its matrices
    lossless  True for a record that is complete in itself, False for a residual over INT4 codes
    """

    matrices: tuple[tuple[int, int], ...]
    lossless: bool

    @classmethod
    def of_expert(
        cls, hidden_size: int, expert_width: int, lossless: bool, gated: bool = True
    ) -> "CompactLayout":
        """Layout of an expert's gate and up [F, H] and down [H, F]."""
        return cls(expert_matrices(hidden_size, expert_width, gated), lossless)

    @classmethod
    def of_matrix(cls, shape: Sequence[int], lossless: bool) -> "CompactLayout":
        """Layout of one dense matrix of rows and columns."""
        rows, columns = shape
        return cls(((rows, columns),), lossless)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a record without its streams."""
        quads = sum(-(-rows // QUAD_ROWS) for rows, _ in self.matrices)
        sections = [INDEX_BYTES * (quads + 1)] + [rows * columns for rows, columns in self.matrices]
        if self.lossless:
            sections += [8 * len(self.matrices)]
            sections += [rows * -(-columns // 8) * 3 for rows, columns in self.matrices]
        return sum(-(-size // LINE_BYTES) * LINE_BYTES for size in sections) + SLACK_BYTES

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest record that any weights and codes can have."""
        escapes = sum(rows * columns for rows, columns in self.matrices)
        if self.lossless:
            return self.fixed_bytes + escapes
        # Each block of each row has three bits per code 0, and the number and columns of its
        # exceptions, which have other codes.
        blocks = sum(rows * -(-columns // BLOCK_COLUMNS) for rows, columns in self.matrices)
        return self.fixed_bytes + 2 * escapes + 2 * blocks
