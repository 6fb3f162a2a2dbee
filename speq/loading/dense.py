"""Matrices outside the experts: encoded or read as they are loaded, and codes that drafts run."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from speq.drafts.dense_draft import DenseCodes, DenseDraft
from speq.files.checkpoint import Checkpoint
from speq.kernels.ops import Int4Pair
from speq.layers.int4_matrix import Int4Matrix
from speq.models.dense import Records, encode_dense
from speq.models.moe_model import MoEModel
from speq.models.opened import Opened
from speq.planning.model_spec import ModelSpec
from speq.units import Done, Progress, label_progress


class DraftMatrices:
    """A draft's dense layers on a device, each made once: drafts run them, and exact matrices may
    be residuals of them.
    """

    def __init__(self, draft: DenseDraft, checkpoint: Checkpoint, device: torch.device) -> None:
        self._draft, self._device = draft, device
        self._codes = DenseCodes(draft, checkpoint)
        self._made: dict[str, Int4Matrix] = {}
        self._bases = {layout.name for layout in draft.bases}

    def base(self, name: str, words: Tensor) -> Int4Pair | None:
        """The codes of a layer that its exact matrix, whose words these are, is to be read over."""
        return self._matrix(name, lambda: words).pair if name in self._bases else None

    def _matrix(self, name: str, words: Callable[[], Tensor]) -> Int4Matrix:
        if name not in self._made:
            weight = self._codes.weight(name, words).to(self._device)
            self._made[name] = Int4Matrix(weight, self._draft.layouts[name].planes)
        return self._made[name]

    def put(self, model: MoEModel, progress: Done | None) -> None:
        """Let the drafts of a loaded model run them."""
        layers, total = model.dense, len(self._draft.layouts)
        for done, name in enumerate(self._draft.layouts, start=1):
            layers[name].draft = self._matrix(name, layers[name].exact.words)
            if progress is not None:
                progress(done, total)
        self._codes.finish()


def dense_records(
    model_spec: ModelSpec,
    opened: Opened,
    codes: DraftMatrices | None,
    device: torch.device,
    readers: int,
    progress: Progress | None,
) -> Records | None:
    """What encodes the dense matrices of a model, or reads them; None where they stay words."""
    if model_spec.dense.name == "raw":
        return None
    doing = "reading" if model_spec.dense.packed else "encoding"
    return partial(
        encode_dense,
        threads=readers,
        device=device,
        progress=label_progress(progress, f"{doing} dense layers"),
        base=codes.base if codes is not None and model_spec.dense.name == "residual" else None,
        packed=opened.dense if model_spec.dense.name == "lossless" else None,
    )
