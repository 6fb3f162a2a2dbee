"""What a run asks of memory, from its model, its options and its draft's layout."""

import torch

from speq.config import RunConfig
from speq.governor.adaptive import LONGEST
from speq.int4 import Int4Layout
from speq.memory import Demand
from speq.models.shape import ModelShape
from speq.store.alignment import ALIGNMENT
from speq.store.checkpoint import Checkpoint
from speq.store.encoding_store import EncodingStore
from speq.store.expert_store import ExpertStore, is_expert_tensor


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
    wanted = wants_draft(config, store)
    scored = 1 + draft_length_of(config) if wanted else 1
    count = store.num_layers * store.num_experts
    draft_bytes = draft.nbytes + 4 * draft.expert_width * encodes_residuals(store)
    on_cpu = device.type == "cpu"
    # On a GPU loading and reading pass through host memory, which is not what is budgeted.
    readers = config.reader_threads if on_cpu else 0
    return Demand(
        non_expert_bytes=shape.resident_bytes(dtype),
        loading_bytes=_loading_bytes(checkpoint, dtype) if on_cpu else 0,
        draft_bytes=count * draft_bytes if wanted else 0,
        draft_needed=store.codec.needs_draft,
        kv_bytes_per_token=shape.kv_elements_per_token * dtype.itemsize,
        reading_bytes=ALIGNMENT + readers * store.reading_bytes,
        slot_bytes=store.codec.slot_bytes,
        num_experts=count,
        workspace=lambda rows, context: shape.workspace_bytes(
            max(rows, scored), scored, context, dtype
        ),
    )


def _loading_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """What loading holds beside the weights it leaves: those in another dtype, as stored."""
    tensors = checkpoint.tensors.items()
    stored = [info for name, (_, info) in tensors if not is_expert_tensor(name)]
    return sum(info.nbytes for info in stored if info.dtype != dtype)
