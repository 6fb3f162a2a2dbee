"""A model on disk, checked and measured, before any of it is loaded."""

from dataclasses import dataclass
from pathlib import Path

import torch

from speq.experts.expert_store import ExpertStore
from speq.experts.packed_store import open_experts
from speq.files.checkpoint import Checkpoint, locate
from speq.files.json_file import read_json
from speq.models.bounds import check_weights
from speq.models.families import Family, family_of
from speq.models.shape import ModelShape, hf_config, shape_of


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint whose files were checked, its family and its sizes."""

    checkpoint: Checkpoint
    family: Family
    shape: ModelShape
    store: ExpertStore

    def converted_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the tensors outside the experts that are stored in another dtype."""
        names = self.family.names
        tensors = self.checkpoint.tensors.items()
        stored = [info for name, (_, info) in tensors if not names.is_expert(name)]
        return sum(info.nbytes for info in stored if info.dtype != dtype)

    def close(self) -> None:
        self.store.close()
        self.checkpoint.close()


def open_model(model: str | Path, verify_reads: bool = False) -> Opened:
    """Check a model folder and read its sizes, without loading weights.

    verify_reads  compare experts with their checksums whenever they are read; packed models only
    """
    path = locate(model)
    config = read_json(path / "config.json")
    family = family_of(config, path)
    checkpoint = Checkpoint(path)
    check_weights(config, checkpoint)
    shape = shape_of(family, hf_config(checkpoint), path / "config.json")
    store = open_experts(checkpoint, shape.experts, verify_reads)
    return Opened(checkpoint, family, shape, store)
