"""A model on disk: checked, with its sizes, before any weights are loaded."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from speq.experts.expert_store import ExpertStore
from speq.experts.packed_dense import PackedDense
from speq.experts.packed_store import PackedExpertStore, open_experts
from speq.files.checkpoint import EXPERTS_MANIFEST, Checkpoint, locate
from speq.files.json_file import read_json
from speq.models.bounds import check_weights
from speq.models.families import family_of
from speq.models.family import Family
from speq.models.layer_range import LayerRange
from speq.models.self_test import check_transformers
from speq.models.shape import ModelShape, hf_config, shape_of


@dataclass(frozen=True, slots=True)
class Opened:
    """A checked checkpoint, its family and its sizes.

    dense  packed dense matrices; None if no pack has them
    part   the layers to hold; None: all
    """

    checkpoint: Checkpoint
    family: Family
    shape: ModelShape
    store: ExpertStore
    dense: PackedDense | None = None
    part: LayerRange | None = None

    def converted_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the tensors outside the experts that are stored in another dtype. Codes are
        dequantized to bfloat16 first.
        """
        checkpoint = self.checkpoint
        family, layers = self.family, checkpoint.model_config.get("num_hidden_layers")
        stored = (
            (
                torch.bfloat16 if checkpoint.coded.is_coded(name) else info.dtype,
                prod(checkpoint.coded.matrix_shape(name)),
            )
            for name, (_, info) in checkpoint.tensors.items()
            if family.holds(name, layers) and (self.part is None or self.part.holds(name))
        )
        return sum(kind.itemsize * count for kind, count in stored if kind != dtype)

    @property
    def table_dtype(self) -> torch.dtype | None:
        """Dtype of the embedding on disk; None for codes, and for a part without one."""
        names, checkpoint = self.shape.dense_names, self.checkpoint
        if not names or names[0] not in checkpoint.tensors or checkpoint.coded.is_coded(names[0]):
            return None
        return checkpoint.tensors[names[0]][1].dtype

    def packed_dense(self, dtype: torch.dtype) -> tuple[int | None, ...]:
        """Bytes of each matrix of `shape.dense` that the pack has in the form for `dtype`; None for
        others. Empty if the pack has none.
        """
        if self.dense is None:
            return ()
        shapes = zip(self.shape.dense_names, self.shape.dense, strict=True)
        return tuple(
            self.dense.nbytes(name, rows * columns * dtype.itemsize)
            for name, (rows, columns) in shapes
        )

    def close(self) -> None:
        self.store.close()
        if self.dense is not None:
            self.dense.close()
        self.checkpoint.close()


def open_model(
    model: str | Path, verify_reads: bool = False, part: LayerRange | None = None
) -> Opened:
    """Check a model folder and read its sizes without loading weights.

    verify_reads  compare a pack's experts with their checksums whenever they are read
    part   the layers to hold; None: all
    """
    path = locate(model)
    config = read_json(path / "config.json")
    family = family_of(config, path)
    checkpoint = Checkpoint(path, family.text_part)
    check_weights(family.config(config, path), checkpoint)
    sizes = family, hf_config(checkpoint), path / "config.json"
    shape, whole = shape_of(*sizes, part), None
    if part is not None and (path / EXPERTS_MANIFEST).exists():
        whole = shape_of(*sizes).experts  # a pack has all layers
    check_transformers(family, sizes[1])
    store = open_experts(checkpoint, shape.experts, verify_reads, whole)
    return Opened(checkpoint, family, shape, store, open_dense(checkpoint, store), part)


def open_dense(checkpoint: Checkpoint, store: ExpertStore) -> PackedDense | None:
    """Open the packed dense matrices of a pack; None for an earlier version of packs."""
    if not isinstance(store, PackedExpertStore) or not store.manifest.dense:
        return None
    return PackedDense(checkpoint, store.manifest.dense)
