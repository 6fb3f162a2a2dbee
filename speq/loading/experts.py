"""Experts as they are held: the INT4 copy, and exact ones in the host's memory of a device."""

from dataclasses import replace

import torch

from speq.config import ExpertOptions
from speq.devices.device import Accelerator
from speq.errors import Broken, present
from speq.experts.codec import codec_of
from speq.experts.draft_codes import DraftSource
from speq.experts.encoding_store import EncodingStore
from speq.experts.expert_store import ExpertStore, SafetensorsExpertStore
from speq.experts.host_tier import HostRoom, HostTier
from speq.experts.int4 import Int4Arena
from speq.experts.packed_copy import PackedCopy
from speq.models.opened import Opened
from speq.models.packed_copies import check_verifiable, whole_copy
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.demand import Budget
from speq.planning.host_memory import holds_copied, host_plan
from speq.planning.model_spec import ModelSpec
from speq.planning.used_experts import UsedExperts
from speq.units import Progress, label_progress


def encoding_store(
    store: ExpertStore, plan: ResidencyPlan, copy: PackedCopy | None
) -> EncodingStore | None:
    """The store that encodes published experts as it reads them, where the plan has it.

    copy  in the making
    """
    if not plan.encoded:
        return None
    if not isinstance(store, SafetensorsExpertStore):
        raise Broken("experts of a pack are planned to be encoded as they are read")
    codec = codec_of(plan.codec, store.codec.shape).with_slot_bytes(plan.slot_bytes)
    same = copy is not None and copy.codec.name == plan.codec
    return EncodingStore(store, codec, copy if same else None)


def with_copy(
    opened: Opened, options: ExpertOptions, plan: ResidencyPlan, copy: PackedCopy | None
) -> tuple[Opened, ResidencyPlan, PackedCopy | None]:
    """What fills the host's memory of a GPU whose run has this plan: the records of a packed copy,
    if they are planned and the copy is whole. Last the copy that the run makes, if any.

    copy  that the run may make. Raises as `check_verifiable` does
    """
    copied = holds_copied(plan)
    whole = whole_copy(opened, options) if copied else None
    if whole is None:
        check_verifiable(opened, options)
        return opened, plan, copy if copied else None
    plan = replace(plan, encoded=False, estimated=False, slot_bytes=whole.codec.slot_bytes)
    return replace(opened, store=whole), plan, None


def int4_copy(
    draft: DraftSource,
    opened: Opened,
    plan: ResidencyPlan,
    used: UsedExperts,
    device: torch.device,
    progress: Progress | None,
) -> Int4Arena:
    """The INT4 copy of all experts, or of those used most, on the device."""
    experts, count = opened.shape.experts, plan.draft_experts
    arena = Int4Arena(
        draft.layout,
        len(experts.layers),
        experts.num_experts,
        device,
        keep_orders=plan.encoded and plan.needs_draft,
        kept=None if count is None else used.most(count),
    )
    draft.fill(arena, label_progress(progress, draft.label))
    tied = opened.store.tied_draft
    if tied is not None:
        tied.check(opened.checkpoint.path, arena)
    return arena


def host_tier(
    store: ExpertStore,
    base: Int4Arena | None,
    device: Accelerator,
    model_spec: ModelSpec,
    plan: ResidencyPlan,
    budget: Budget,
    progress: Progress | None,
) -> HostTier:
    """The host's memory with as many experts as it is given, encoded where the plan has it."""
    planned = present(host_plan(model_spec, plan, budget), "a processor has no host tier")
    room = HostRoom(device, planned.limit_bytes, budget.readers)
    if isinstance(store, EncodingStore):
        return HostTier.encode(
            store, base, room, label_progress(progress, "encoding experts into host memory")
        )
    return HostTier.load(store, room, label_progress(progress, "reading experts into host memory"))
