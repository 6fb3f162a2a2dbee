"""An INT4 draft of a widened model that errs as its source's draft does.

A weight of the source lies in many copies in the wide model, and what rounding does to them mostly
cancels in a sum over the copies. So a rounded draft of a widened model is nearly always right. No
draft of a real model of that size is. Here some codes move by one step, so that the copies of a
weight together err as the source's own code errs. A code moves only to where its window still holds
the exact word (`speq.kernels.windows`), so residual records have about the bits that they had.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from speq.drafts.draft_source import gptq_path
from speq.errors import OptionError
from speq.experts.int4 import group_size_of
from speq.files.checkpoint import INDEX
from speq.files.json_file import read_json
from speq.kernels.ops import quantize_int4
from speq.kernels.windows import codes_and_scales, escapes, words_of
from speq.models.dense_parts import HEAD
from speq.models.families import family_of
from speq.models.shape import config_in, shape_of
from speq.quantizing.checkpoint_folder import LayerShards, pack_matrix, quantization_config
from speq.quantizing.gptq import MAX_CODE, ZERO_POINT, QuantisedMatrix
from speq.quantizing.settings import GROUP_SIZES, QuantizeSettings
from speq.version import __version__

# Rows at a time: what is worked on stays in a cache.
ROWS = 64
PARTS = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the copies of a source's matrix [N, K] lie in the wide one.

    rows     [wide N] int64: the source's row of each
    columns  [K, copies] int64: the wide columns of each of the source's
    """

    rows: Tensor
    columns: Tensor


@dataclass(slots=True)
class Moves:
    """What moving codes came to.

    weights, moved   codes, and those of them that are not the nearest
    wanted, reached  the sum of squares of the errors wanted, and of their products with those made
    """

    weights: int = 0
    moved: int = 0
    wanted: float = 0.0
    reached: float = 0.0

    def add(self, codes: Tensor, nearest: Tensor, made: Tensor, wanted: Tensor) -> None:
        self.weights += codes.numel()
        self.moved += int((codes != nearest).sum())
        self.wanted += float(wanted.double().square().sum())
        self.reached += float((wanted.double() * made).sum())

    def as_json(self) -> dict[str, float]:
        """moved: of all codes; reached: of the errors wanted, the share that was made."""
        return {
            "moved": self.moved / max(self.weights, 1),
            "reached": self.reached / self.wanted if self.wanted else 0.0,
        }


def rounding_error(weight: Tensor) -> Tensor:
    """[N, K] float32: what rounding to INT4, as the draft of the source does, adds to a matrix."""
    codes, steps = codes_and_scales(*quantize_int4(weight, group_size_of(weight.shape[1])))
    return codes * steps.float() - weight.float()


def moved_codes(
    wide: Tensor, group_size: int, error: Tensor, placed: Placed, moves: Moves
) -> tuple[Tensor, Tensor]:
    """Codes [wide N, wide K] int32, -8 to 7, and scales [wide N, groups] of a wide matrix.

    wide   [wide N, wide K] bfloat16
    error  [N, K] float32: what the copies of each weight are to err by, together

    Each copy is rounded as if it were larger by its share of the error.
    """
    qweight, scales = quantize_int4(wide, group_size)
    copies = placed.columns.shape[1]
    source = torch.empty(wide.shape[1], dtype=torch.int64)
    source[placed.columns.flatten()] = torch.arange(len(placed.columns)).repeat_interleave(copies)
    parts = []
    for rows in torch.arange(len(wide)).split(ROWS):
        nearest, steps = codes_and_scales(qweight[rows], scales[rows])
        exact, width = wide[rows], steps.float()
        share = error[placed.rows[rows]][:, source] / copies
        places = (exact.float() + share) / width.where(width > 0, torch.inf)
        codes = places.round().clamp(-ZERO_POINT, MAX_CODE).to(torch.int32)
        codes = codes.where(~escapes(words_of(exact), codes, steps), nearest)
        moves.add(codes, nearest, codes * width - exact.float(), share)
        parts.append(codes)
    return torch.cat(parts), scales


def group_size_for(widths: set[int]) -> int:
    """The largest group that divides all of these dimensions. Raises SpeqError for none."""
    for size in sorted(GROUP_SIZES, reverse=True):
        if size > 0 and not any(width % size for width in widths):
            return size
    raise OptionError(
        f"no group of INT4 codes divides {' and '.join(map(str, sorted(widths)))}; widen to sizes "
        f"that {min(size for size in GROUP_SIZES if size > 0)} divides"
    )


class DraftFolder:
    """The draft beside a widened model, as a GPTQ checkpoint; config.json comes last."""

    def __init__(self, model: Path, group_size: int) -> None:
        self.path = gptq_path(model)
        self.group_size = group_size
        self.moves = Moves()
        self._weight_map: dict[str, str] = {}
        self._total = 0
        self.path.mkdir(parents=True)

    def matrix(self, name: str, wide: Tensor, error: Tensor, placed: Placed) -> dict[str, Tensor]:
        """The tensors of one matrix, by their names."""
        codes, scales = moved_codes(wide, self.group_size, error, placed, self.moves)
        groups = torch.arange(wide.shape[1], dtype=torch.int32) // self.group_size
        inputs_first = (codes + ZERO_POINT).to(torch.uint8).t().contiguous()
        matrix = QuantisedMatrix(inputs_first, scales.t().contiguous(), groups)
        return dict(zip(names_of(name), pack_matrix(matrix, slice(None)), strict=True))

    def shard(self, file: str, tensors: dict[str, Tensor]) -> None:
        save_file(tensors, self.path / file, metadata={"format": "pt"})
        self._weight_map |= dict.fromkeys(tensors, file)
        self._total += sum(tensor.nbytes for tensor in tensors.values())

    def finish(self, model: Path) -> None:
        """Make the folder a checkpoint of that model, which is whole by now."""
        config = read_json(model / "config.json")
        shape = shape_of(family_of(config, model), config_in(model), model / "config.json")
        layers = tuple(layer for layer in shape.draft_layers if layer.part != HEAD)
        settings = QuantizeSettings(group_size=self.group_size, method="rtn")
        packed_as = quantization_config(
            settings, __version__, LayerShards(shape.experts, settings, layers).left
        )
        index = {"metadata": {"total_size": self._total}, "weight_map": self._weight_map}
        (self.path / INDEX).write_text(json.dumps(index, indent=1))
        quantised = config | {"quantization_config": packed_as}
        (self.path / "config.json").write_text(json.dumps(quantised, indent=1) + "\n")


def names_of(weight: str) -> Iterator[str]:
    """Names of a matrix' parts in a GPTQ checkpoint, by that of its weight."""
    module = weight.removesuffix("weight")
    return (module + part for part in PARTS)
