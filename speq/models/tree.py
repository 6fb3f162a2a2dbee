"""A tree of tokens in a pass, and what each of them sees."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes after a sequence. Node 0 is the root and follows the sequence; each other node follows
    its parent. The KV of nodes is contiguous in the KV cache, in node order.

    parents  parent of each node, parents first; the root's is -1
    rows     number of nodes that a pass runs, the last ones; the KV of the others is cached
    """

    parents: tuple[int, ...]
    rows: int

    @classmethod
    def of(cls, parents: Sequence[int], rows: int | None = None) -> "Tree":
        """Build a tree from the parents of nodes after the root. rows None: all nodes are run."""
        nodes = len(parents) + 1
        return cls((-1, *parents), nodes if rows is None else rows)

    @property
    def nodes(self) -> int:
        return len(self.parents)

    @property
    def first(self) -> int:
        """The first node that is run."""
        return self.nodes - self.rows

    @property
    def is_chain(self) -> bool:
        """True if each node follows the one before it."""
        return self.parents == tuple(range(-1, self.nodes - 1))

    def depths(self) -> list[int]:
        """Distance of each node from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    def visible(self) -> Tensor:
        """[rows, N] bool: true at a node itself and at every node above it."""
        visible = torch.eye(self.nodes, dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            visible[node] |= visible[parent]
        return visible[self.first :]
