"""Names of routed experts and their routers in checkpoints."""

import re
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple

from speq.files.published_format import BLOCKS, words_name

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Of experts without a gate.
UNGATED_PROJECTIONS = PROJECTIONS[1:]
# transformers' name for a tensor of all experts of a layer, with gate above up.
GATE_UP = "gate_up_proj"
FUSED = (GATE_UP, "down_proj")


class Stacked(Enum):
    """How the experts of a layer lie in FUSED on disk.

    ROWS         [E, 2F, H], gate above up, and [E, H, F], as a linear layer's weight
    COLUMNS      [E, H, 2F], gate beside up, and [E, F, H]; transformers may save them as ROWS
    INTERLEAVED  [E, H, 2F], gate and up in turns, and [E, F, H]; transformers holds them so too
    """

    ROWS = auto()
    COLUMNS = auto()
    INTERLEAVED = auto()


class ExpertMatrix(NamedTuple):
    """A matrix of experts: its model layer, its expert, and one of PROJECTIONS.

    If the expert is None, it is one of FUSED, [E, ...] of all experts of the layer.
    """

    layer: int
    expert: int | None
    projection: str


@dataclass(frozen=True)
class ExpertNames:
    """Names in a family's checkpoints; those of transformers come first.

    An expert's matrix is `layers.L.BLOCK.EXPERTS.E.PROJECTION.weight`, that of all experts of a
    layer `layers.L.BLOCK.EXPERTS.FUSED` or `layers.L.APART.PROJECTION.weight`, a router's
    `layers.L.BLOCK.ROUTER.weight`. Quantised checkpoints use the same names; MXFP4 appends
    `_blocks` or `_scales`, INT4 has `weight_packed` or `qweight` for codes.

    blocks       names of a layer's block with the router and the experts; empty: the layer itself
                 has them
    routers      names of the router in the block; on disk, of the module with its weight
    experts      name of the experts in the block
    projections  names of PROJECTIONS in an expert, in order
    mlp          name of a layer's dense MLP, or of the block with its shared experts
    parent       prefix of `layers`; empty: anything but `mtp`
    apart        name of the block on disk where all experts of a layer have a tensor of each
                 projection; empty: there is none
    """

    blocks: tuple[str, ...] = ("mlp",)
    routers: tuple[str, ...] = ("gate",)
    experts: str = "experts"
    projections: tuple[tuple[str, str, str], ...] = (PROJECTIONS,)
    mlp: str = "mlp"
    parent: str = ""
    apart: str = ""

    @cached_property
    def projection_of(self) -> dict[str, str]:
        """Map names on disk to PROJECTIONS."""
        return {
            name: projection
            for names in self.projections
            for name, projection in zip(names, PROJECTIONS, strict=True)
        }

    def is_up(self, name: str) -> bool:
        """True if a tensor is the weight of an up projection."""
        *_, module, parameter = ["", *name.split(".")]
        return parameter == "weight" and self.projection_of.get(module) == PROJECTIONS[1]

    @cached_property
    def within_layer(self) -> str:
        """Pattern of the experts' prefix, from a layer's number on, which is group `layer`."""
        return rf"{self._layer}{self._block}{re.escape(self.experts)}\."

    @property
    def _layer(self) -> str:
        """Pattern of a layer's prefix, whose number is group `layer`."""
        # Layers below `mtp` are MTP layers with numbers of their own.
        above = rf"{re.escape(self.parent)}\." if self.parent else r"(?<!mtp\.)"
        return rf"{above}layers\.(?P<layer>\d{{1,9}})\."

    @cached_property
    def router(self) -> re.Pattern[str]:
        """Pattern of a router's weight; group 1 is its model layer."""
        routers = _any(self.routers)
        return re.compile(rf"(?:^|\.)layers\.(\d+)\.{self._block}{routers}\.weight$")

    @cached_property
    def _block(self) -> str:
        """Pattern of a block's name, with a final dot."""
        return _any(tuple(name and f"{name}." for name in self.blocks))

    @cached_property
    def _expert_pattern(self) -> re.Pattern[str]:
        projection = _any(tuple(self.projection_of))
        return re.compile(
            rf"(?:^|\.){self.within_layer}(?P<expert>\d+)\.(?P<projection>{projection})\.(?:weight|weight_packed|qweight)$"
        )

    @cached_property
    def _fused_pattern(self) -> re.Pattern[str]:
        ways = [rf"{self._block}{re.escape(self.experts)}\.(?P<fused>{_any(FUSED)})(?:{BLOCKS})?$"]
        if self.apart:
            ways.append(rf"{re.escape(self.apart)}\.(?P<apart>{_any(PROJECTIONS)})\.weight$")
        return re.compile(rf"(?:^|\.){self._layer}(?:{'|'.join(ways)})")

    def matrix(self, name: str) -> ExpertMatrix | None:
        """Find the expert matrix that a tensor is; None: it is not of a routed expert."""
        match = self._expert_pattern.search(name)
        if match is not None:
            projection = self.projection_of[match["projection"]]
            return ExpertMatrix(int(match["layer"]), int(match["expert"]), projection)
        match = self._fused_pattern.search(name)
        if match is None:
            return None
        projection = match["fused"] or match["apart"]
        return ExpertMatrix(int(match["layer"]), None, projection)

    def is_expert(self, name: str) -> bool:
        """True if a tensor is a matrix of routed experts, or its scales."""
        return self.matrix(words_name(name)) is not None

    def module(self, layer: int, expert: int, projection: str) -> str:
        """transformers' name for an expert's matrix, without `.weight`."""
        name = self.projections[0][PROJECTIONS.index(projection)]
        block = f"{self.blocks[0]}." if self.blocks[0] else ""
        parent = self.parent or "model"
        return f"{parent}.layers.{layer}.{block}{self.experts}.{expert}.{name}"


USUAL_NAMES = ExpertNames()


def _any(names: tuple[str, ...]) -> str:
    return f"(?:{'|'.join(re.escape(name) for name in names)})"
