"""What a run asks of memory, from its model, its options and its draft's layout."""

from dataclasses import dataclass

import torch

from speq.config import RunConfig
from speq.experts.encoding_store import EncodingStore
from speq.experts.expert_names import ExpertNames
from speq.experts.expert_store import ExpertStore
from speq.experts.int4 import Int4Layout
from speq.files.alignment import ALIGNMENT
from speq.files.checkpoint import Checkpoint
from speq.governor.adaptive import LONGEST
from speq.models.shape import ModelShape
from speq.planning.memory import Demand


def draft_length_of(config: RunConfig) -> int:
    """Of the longest draft that may be verified."""
    return LONGEST if config.draft_length is None else config.draft_length


def needs_draft(config: RunConfig, store: ExpertStore) -> bool:
    """Whether exact experts are, or are to be, read over the draft's codes."""
    return config.codec == "residual" or store.codec.needs_draft


def wants_draft(config: RunConfig, store: ExpertStore) -> bool:
    """Whether the draft is to be loaded, if there is room for it."""
    drafts = config.draft != "none" and config.draft_length != 0
    return drafts or needs_draft(config, store)


def encodes_residuals(store: ExpertStore) -> bool:
    """Whether experts are encoded over the draft's codes, in their order, as they are read."""
    return isinstance(store, EncodingStore) and store.codec.needs_draft


def order_bytes_of(draft: Int4Layout) -> int:
    """What an expert's draft takes besides, where experts are encoded over it in its order."""
    return 4 * draft.expert_width


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """What memory needs to know of a store of exact experts, or of one that is only thought of.

    count          of all layers together
    reading_bytes  what each thread that reads takes beside the slot it fills
    order_bytes    what an expert's draft takes besides, where experts are encoded over it
    """

    count: int
    slot_bytes: int
    reading_bytes: int
    needs_draft: bool = False
    order_bytes: int = 0

    @classmethod
    def of(cls, store: ExpertStore, draft: Int4Layout) -> "ExpertSizes":
        return cls(
            store.num_layers * store.num_experts,
            store.codec.slot_bytes,
            store.reading_bytes,
            store.codec.needs_draft,
            order_bytes_of(draft) * encodes_residuals(store),
        )


def demand_of(
    checkpoint: Checkpoint,
    shape: ModelShape,
    store: ExpertStore,
    draft: Int4Layout,
    config: RunConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> Demand:
    """Of a model computed in `dtype`, its experts out of `store`."""
    on_cpu = device.type == "cpu"
    return demand_by_sizes(
        shape,
        ExpertSizes.of(store, draft),
        draft.nbytes if wants_draft(config, store) else 0,
        draft_length_of(config),
        dtype,
        # On a GPU loading and reading pass through host memory, which is not what is budgeted.
        loading_bytes_of(checkpoint, shape.experts.names, dtype) if on_cpu else 0,
        config.reader_threads if on_cpu else 0,
    )


def demand_by_sizes(
    shape: ModelShape,
    experts: ExpertSizes,
    draft_bytes: int,
    draft_length: int,
    dtype: torch.dtype,
    loading_bytes: int,
    readers: int,
) -> Demand:
    """The same from sizes alone.

    draft_bytes    of an INT4 expert; 0: no draft
    draft_length   of the longest draft that may be verified
    """
    scored = 1 + draft_length if draft_bytes else 1
    return Demand(
        non_expert_bytes=shape.resident_bytes(dtype),
        loading_bytes=loading_bytes,
        draft_bytes=experts.count * (draft_bytes + experts.order_bytes) if draft_bytes else 0,
        draft_needed=experts.needs_draft,
        kv_bytes_per_token=shape.kv_elements_per_token * dtype.itemsize,
        reading_bytes=ALIGNMENT + readers * experts.reading_bytes,
        slot_bytes=experts.slot_bytes,
        num_experts=experts.count,
        workspace=lambda rows, context: shape.workspace_bytes(
            max(rows, scored), scored, context, dtype
        ),
    )


def loading_bytes_of(checkpoint: Checkpoint, names: ExpertNames, dtype: torch.dtype) -> int:
    """What loading holds beside the weights it leaves: those in another dtype, as stored."""
    tensors = checkpoint.tensors.items()
    stored = [info for name, (_, info) in tensors if not names.is_expert(name)]
    return sum(info.nbytes for info in stored if info.dtype != dtype)
