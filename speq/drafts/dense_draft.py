"""Dense layers of a draft in codes: which layers, their widths, and the source of the codes.

A GPTQ checkpoint provides the dense layers that it has quantised. The rest is rounded and cached
beside the model, as experts are.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from speq.drafts import draft_file
from speq.errors import present
from speq.experts.int4 import group_size_of, round_into
from speq.files.checkpoint import Checkpoint
from speq.kernels.ops import Int4Weight


class DenseLayer(Protocol):
    """A dense layer; `speq.models.dense_parts.DenseShape` is one."""

    @property
    def name(self) -> str: ...
    @property
    def part(self) -> str: ...
    @property
    def outputs(self) -> int: ...
    @property
    def columns(self) -> int: ...


# Bits of each part, by what draft_dense says.
WIDTHS: Mapping[str, Mapping[str, int]] = {
    "none": {},
    "shared": {"mlp": 4},
    "attention": {"mlp": 4, "attention": 4},
    "all": {"mlp": 4, "attention": 4, "head": 8},
}
AUTO = "all"


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """Form of one layer's matrix [outputs, columns].

    planes      planes of INT4 codes: 1, or 2 for eight bits
    group_size  columns to a scale
    permuted    whether it has an order of inputs (desc_act)
    brought     whether the draft's source has the codes; otherwise they are rounded
    """

    name: str
    outputs: int
    columns: int
    planes: int
    group_size: int
    permuted: bool = False
    brought: bool = False

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part."""
        rows = self.planes * self.outputs
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "qweight": ((rows, self.columns // 2), torch.uint8),
            "scales": ((rows, self.columns // self.group_size), torch.float16),
        }
        if self.permuted:
            shapes["input_perm"] = ((self.columns,), torch.int32)
        return shapes

    @property
    def nbytes(self) -> int:
        parts = self.shapes.values()
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in parts)


class DenseSource(Protocol):
    """A draft's source that may have codes of dense layers."""

    @property
    def dense(self) -> Mapping[str, DenseLayout]:
        """Layouts of its dense layers, by module name."""

    def dense_weight(self, name: str) -> Int4Weight:
        """Read the codes of one of them. Raises SpeqError if they are damaged."""


@dataclass(frozen=True, slots=True)
class DenseDraft:
    """The dense layers that a draft runs on codes, by module name.

    source  has some of them; None: all are rounded
    """

    layouts: Mapping[str, DenseLayout]
    source: DenseSource | None = None

    @classmethod
    def of(
        cls, choice: str, shapes: tuple[DenseLayer, ...], source: DenseSource | None = None
    ) -> "DenseDraft":
        """Choose the dense layers that a draft runs on codes. choice: the option draft_dense."""
        widths = WIDTHS[AUTO if choice == "auto" else choice]
        brought = {} if source is None else source.dense
        layouts = {}
        for shape in shapes:
            if shape.part in widths and shape.name in brought:
                layouts[shape.name] = brought[shape.name]
            elif shape.part in widths and shape.columns % 2 == 0:
                sizes = shape.name, shape.outputs, shape.columns
                planes = widths[shape.part] // 4
                layouts[shape.name] = DenseLayout(*sizes, planes, group_size_of(shape.columns))
        return cls(layouts, source)

    @property
    def nbytes(self) -> int:
        return sum(layout.nbytes for layout in self.layouts.values())

    @property
    def bases(self) -> list[DenseLayout]:
        """Four-bit matrices, in the model's order: exact ones may be residuals of these."""
        layouts = self.layouts.values()
        return [layout for layout in layouts if layout.planes == 1 and not layout.permuted]


class DenseCodes:
    """Codes of a draft's dense layers, each made once. Thread-safe."""

    def __init__(self, draft: DenseDraft, checkpoint: Checkpoint) -> None:
        self._draft = draft
        rounded = [layout for layout in draft.layouts.values() if not layout.brought]
        self._parts = {
            f"{layout.name}.{part}": torch.empty(shape, dtype=dtype)
            for layout in rounded
            for part, (shape, dtype) in layout.shapes.items()
        }
        digest = hashlib.sha256(repr(sorted(map(repr, rounded))).encode()).hexdigest()
        self._paths = draft_file.candidate_paths(checkpoint, f"dense-{digest[:8]}")
        self._kept = not rounded or draft_file.read_cached(self._parts, self._paths)

    def weight(self, name: str, words: Callable[[], Tensor]) -> Int4Weight:
        """Codes of one layer, on the CPU. words: returns its exact matrix, to be rounded."""
        layout = self._draft.layouts[name]
        if layout.brought:
            source = present(self._draft.source, f"no source has the codes of {name}")
            return source.dense_weight(name)
        qweight, scales = (self._parts[f"{name}.{part}"] for part in layout.shapes)
        if not self._kept:
            round_into(words(), layout.planes, layout.group_size, qweight, scales)
        return Int4Weight(qweight, scales)

    def finish(self) -> None:
        """Cache the rounded codes on disk, once all are made."""
        if not self._kept:
            draft_file.keep(self._parts, self._paths)
            self._kept = True


EXPERTS_ONLY = DenseDraft({})
