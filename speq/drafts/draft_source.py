"""Opening of a draft's source of INT4 experts: a GPTQ checkpoint, or rounded exact experts."""

import os
from pathlib import Path

from speq.drafts import draft_file, kinship
from speq.drafts.dense_draft import DenseDraft, DenseLayer
from speq.drafts.gptq_config import has_gptq_config
from speq.drafts.gptq_folder import GptqFolder
from speq.errors import CheckpointError, SpeqError
from speq.experts.draft_codes import DraftSource
from speq.experts.expert_store import ExpertLayout, ExpertStore, expert_slot, read_matrices
from speq.experts.int4 import Int4Arena, Int4Expert, Int4Layout
from speq.experts.packed_draft import PackedDraft
from speq.experts.packed_store import open_experts
from speq.files.checkpoint import Checkpoint, locate
from speq.files.json_file import read_json
from speq.units import Done


class RoundedDraft:
    """Exact experts rounded to nearest, or a cached copy of them."""

    def __init__(
        self, checkpoint: Checkpoint, store: ExpertStore, experts: ExpertLayout, owned: bool
    ) -> None:
        self.layout = Int4Layout(experts.hidden_size, experts.expert_width, gated=experts.gated)
        self._checkpoint, self._store, self._owned = checkpoint, store, owned
        self._quantisable = not experts.normed

    @property
    def label(self) -> str:
        """Description of what `fill` does."""
        kept = draft_file.any_exists(draft_file.candidate_paths(self._checkpoint))
        return "reading the INT4 copy" if kept else "rounding experts to INT4"

    @property
    def fingerprint(self) -> str:
        return draft_file.digest_of(self._checkpoint)

    def expert(self, at: int) -> Int4Expert:
        store = self._store
        exact = read_matrices(store, *divmod(at, store.num_experts), expert_slot(store))
        return Int4Expert.round(self.layout, *exact)

    def fill(self, arena: Int4Arena, progress: Done | None = None) -> None:
        source = self._checkpoint, self._store
        draft_file.load_or_make(arena, *source, progress, quantisable=self._quantisable)

    def close(self) -> None:
        if self._owned:
            self._store.close()
            self._checkpoint.close()


def gptq_path(model: Path) -> Path:
    """Path of the GPTQ checkpoint of a model, where `speq quantize` writes it."""
    return model / draft_file.FOLDER / "gptq"


def open_draft(
    draft: str,
    model: Checkpoint,
    store: ExpertStore,
    experts: ExpertLayout,
    dense: tuple[DenseLayer, ...] = (),
) -> DraftSource:
    """Open the draft of a model: "auto", or a folder or hub id. Raises SpeqError if it does not
    fit.

    dense  the model's dense layers that a draft may have codes of

    A model that is packed with its draft takes no other, except the folder that it was copied from.

    auto  the draft in the pack; else the GPTQ checkpoint beside the model; else its own experts,
          rounded. A folder without config.json, which is written last, is incomplete and ignored.
    """
    tied = store.tied_draft
    if tied is None:
        return _open(draft, model, store, experts, dense)
    if draft == "auto":
        return PackedDraft(model.path, tied, store.num_layers * store.num_experts)
    source = _open(draft, model, store, experts, dense)
    try:
        tied.check_source(model.path, source.layout, source.fingerprint)
    except SpeqError:
        source.close()
        raise
    return source


def _open(
    draft: str,
    model: Checkpoint,
    store: ExpertStore,
    experts: ExpertLayout,
    dense: tuple[DenseLayer, ...],
) -> DraftSource:
    if draft == "auto":
        beside = gptq_path(model.path)
        if os.path.exists(beside / "config.json"):
            return open_gptq(beside, model, store, experts, dense)
        return RoundedDraft(model, store, experts, owned=False)
    path = locate(draft, "draft", "auto, none, ")
    if has_gptq_config(path, read_json(path / "config.json")):
        return open_gptq(path, model, store, experts, dense)
    checkpoint = Checkpoint(path, model.part)
    try:
        theirs = open_experts(checkpoint, experts)
        if theirs.tied_draft is None:
            return RoundedDraft(checkpoint, theirs, experts, owned=True)
        theirs.close()
        packed = PackedDraft(path, theirs.tied_draft, store.num_layers * store.num_experts)
        checkpoint.close()
        return packed
    except SpeqError as error:
        checkpoint.close()
        raise CheckpointError(f"draft {path} does not fit the model: {error}") from error


def dense_draft(choice: str, dense: tuple[DenseLayer, ...], source: DraftSource) -> DenseDraft:
    """Choose a draft's dense layers: those of its source, and the rest rounded.

    choice  the option draft_dense
    """
    return DenseDraft.of(choice, dense, source if isinstance(source, GptqFolder) else None)


def open_gptq(
    path: Path,
    model: Checkpoint,
    store: ExpertStore,
    experts: ExpertLayout,
    dense: tuple[DenseLayer, ...],
) -> GptqFolder:
    """Open a GPTQ checkpoint made from `model`, whose exact experts are in `store`."""
    kinship.check_sizes(path, read_json(path / "config.json"), model)
    folder = GptqFolder(path, experts, dense, model.part)
    try:
        if experts.biased and folder.layout.permuted:
            raise CheckpointError(
                f"draft {path} has its columns in an order of their own (desc_act), and the "
                "model's experts have biases, which are not; give a GPTQ checkpoint without "
                "desc_act"
            )
        kinship.check_weights(path, folder.tensors, model, experts.names)
        if store.tied_draft is None:  # a tied draft is compared by its codes
            kinship.check_experts(folder, store)
    except BaseException:
        folder.close()
        raise
    return folder
