"""Tokens of a pass that branch: which of them each of them sees."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes behind a text. Node 0 is the root, and follows the text; each other node lies behind
    its parent. Entries of nodes lie together in the KV cache, in their order.

    parents  of all nodes, each before its children; the root's is -1
    rows     nodes that a pass runs, the last ones; entries of the others are there already
    """

    parents: tuple[int, ...]
    rows: int

    @classmethod
    def of(cls, parents: Sequence[int], rows: int | None = None) -> "Tree":
        """parents  of the nodes behind the root; rows None: all nodes are run"""
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
        """Whether each node follows the one before it, which then needs no more to be said."""
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
