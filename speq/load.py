"""From an opened model and a budget to a loaded one: settle, check, load, measure.

What does not depend on the length of the context is made here, once: weights, the INT4 copy, and
the store that fills slots. `Runtime` lays out the rest.
"""

import contextlib
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from speq.config import RunConfig
from speq.devices.device import Accelerator, Processor
from speq.devices.named import find_device
from speq.drafts.dense_draft import DenseCodes, DenseDraft
from speq.drafts.draft_source import RoundedDraft, dense_draft, open_draft
from speq.errors import SpeqError, present
from speq.experts.codec import codec_of
from speq.experts.draft_codes import DraftSource
from speq.experts.encoding_store import EncodingStore
from speq.experts.expert_store import ExpertStore, SafetensorsExpertStore
from speq.experts.host_tier import HostRoom, HostTier
from speq.experts.int4 import Int4Arena
from speq.experts.packed_copy import PackedCopy, copy_codec, copy_folder, open_copy
from speq.files import heap
from speq.files.checkpoint import Checkpoint
from speq.governor.adaptive import make_governor
from speq.governor.batches import Governors
from speq.governor.draft_length import LONGEST, LONGEST_SECONDARY, Governor
from speq.governor.planner import acceptance_of_part
from speq.governor.prior import Prior
from speq.governor.profile import Profile
from speq.governor.residency_plan import ResidencyPlan
from speq.heads.draft_head import DraftHead, HeadSource
from speq.heads.predicted_experts import head_worth_weighing, open_head
from speq.kernels import library
from speq.kernels.ops import MAX_LINEAR_ROWS, Int4Pair
from speq.layers.draft_experts import DraftExperts
from speq.layers.expert_budget import BudgetRules, rules_of
from speq.layers.int4_matrix import Int4Matrix
from speq.machine import default_host_bytes
from speq.models import moe_model
from speq.models.dense import Records, encode_dense
from speq.models.layer_range import RemoteStages
from speq.models.moe_model import MoEModel
from speq.models.opened import Opened
from speq.models.recorded import recording_device
from speq.planning import profiles
from speq.planning.candidates import agree, check_parts, drafter_of, open_candidates, wants_int4
from speq.planning.choose_plan import PlanDecision, choose_plan, objectives_of, replan
from speq.planning.demand import Budget, DeviceOverhead
from speq.planning.dense import DenseTrial, MemoryContext, settle_dense
from speq.planning.device_trial import DeviceTrial
from speq.planning.host_memory import host_plan
from speq.planning.memory import MemoryPlan
from speq.planning.model_spec import ModelSpec
from speq.planning.processor_trial import ProcessorTrial
from speq.planning.used_experts import UsedExperts, used_experts, warn
from speq.units import Done, Progress, format_bytes, no_progress

logger = logging.getLogger("speq")

# Contexts grow in these steps, so that a chat does not lay its arenas out anew at every turn.
CONTEXT_STEP = 64
# What a pass over published experts is called, which are encoded.
ENCODING = "measuring encoded experts"


@dataclass(slots=True)
class Loaded:
    """A model in memory, and how its experts are held.

    opened    the checkpoint; its store is the one that fills slots
    subject   the model as it was planned for, its slots as large as was measured
    settled   the holding, with memory planned for the first request
    draft_bank  the INT4 copy, where one is held
    host      exact experts in the host's memory, for a device with memory of its own
    graphs_on  the device that passes are recorded on; None: they are not
    head      what drafts out of hidden states, where one does
    governors  of batches; they outlive arenas that are laid out anew, with what it has learnt
    copy      the packed copy of published experts that this run writes
    limits    of the experts of verifications; None: they are exact
    others    stages that run the layers behind these; None: this machine has the last ones
    """

    config: RunConfig
    opened: Opened
    device: Processor | Accelerator
    model_spec: ModelSpec
    settled: PlanDecision
    model: MoEModel
    arena: Int4Arena | None
    draft_bank: DraftExperts | None
    host: HostTier | None
    graphs_on: Accelerator | None
    governors: Governors
    copy: PackedCopy | None = None
    limits: BudgetRules | None = None
    head: DraftHead | None = None
    others: RemoteStages | None = None

    def budget(self, context: int) -> Budget:
        return budget_of(self.config, context, self.device)

    def memory(self, plan: MemoryPlan) -> dict[str, int]:
        """A plan item by item, in bytes, with what is taken of the host."""
        if self.host is None:
            return plan.report()
        return plan.report() | {
            "host_records": self.host.nbytes,
            "host_pinned": self.host.pinned_bytes,
        }

    def close(self) -> None:
        """Give back files, and the host's memory."""
        if self.copy is not None:  # which reads the files
            self.copy.stop()
        if self.host is not None:
            self.host.close()
        try:
            if self.others is not None:
                self.others.close()
        finally:  # also where one of them is gone
            self.opened.close()


def load(
    opened: Opened,
    config: RunConfig,
    progress: Progress | None = None,
    first_context: int = 0,
    others: RemoteStages | None = None,
) -> Loaded:
    """Load a model under a budget, or the part of it that is opened.

    first_context  tokens that the first request needs; 0 where that is not known
    others         stages that run the layers behind a first part

    Raises SpeqError where options, files or the budget do not allow it.
    """
    device = find_device(config.device)
    if not isinstance(device, Processor):
        # Recorded passes refer to themselves in circles: those of a model that was closed may
        # still be there. On the CPU nothing does, and looking through all objects takes long.
        gc.collect()
    opened = with_kept_copy(opened, config, device)
    check_verifiable(opened, config)
    copied = copy_to_make(opened, config, device)
    if copied is not None:
        # Encoding each miss would take what the copy needs, and later runs read records anyway.
        config = replace(config, codec=opened.store.codec.name)
    agree(opened.store, config)
    experts = opened.shape.experts
    limits = rules_of(config, len(experts.layers), experts.num_experts, opened.shape.top_k)
    profile = profiles.wanted(config.profile, opened, device.torch.type, config.memory_budget)
    context = first_context_of(config, opened, first_context)
    # Drafts are refused before weights are loaded, and even where the budget has no room.
    used = used_experts(config.draft_experts, config.draft_counts, opened.checkpoint, opened.shape)
    parts = used.parts(config.draft_experts)
    check_parts(parts, opened.store.codec, config.codec)
    warn(used, config.draft_experts)
    with contextlib.closing(draft_source(opened, config)) as draft:
        name, layers = str(opened.checkpoint.path), opened.shape.draft_layers
        dense = dense_draft(config.draft_dense, layers, draft)
        model_spec = ModelSpec.of_draft(name, opened, config.dtype, draft.layout, dense)
        model_spec = replace(model_spec, draft_parts=parts)
        if copied is not None:
            model_spec = replace(model_spec, copying_bytes=copied.writing_bytes)
        source = head_of(opened, config)
        if source is not None:
            model_spec = replace(model_spec, head=source.shape, head_stand=source.acceptance_rates)
        budget = budget_of(config, context, device)
        room = MemoryContext(budget, partial(open_candidates, config=config, on_cpu=budget.on_cpu))
        model_spec = settle_dense(
            model_spec, config.dense, room, dense_trial_of(opened, device, config)
        )
        trial = trial_of(opened, device, model_spec, config)
        settled = choose_plan(model_spec, budget, config, profile, trial.survey)
        check_room(settled.memory, config.memory_budget, device)
        encoding = encoding_of(opened.store, settled)
        opened = replace(opened, store=encoding or opened.store)
        library.report_backends(device.torch.type)
        if settled.residency_plan.drafter != "head":
            source = None
        drafting = settled.residency_plan.drafter == "int4"
        codes = DraftMatrices(dense, opened.checkpoint, device.torch) if drafting else None
        model = moe_model.load(
            opened.family,
            opened.checkpoint,
            model_spec.dtype,
            device,
            records_of(model_spec, opened, codes, device, budget, progress),
            progress or no_progress,
            opened.part,
        )
        model_spec, settled = replan_with_dense_sizes(model, model_spec, settled, budget)
        arena = None
        if settled.residency_plan.holds_int4:
            arena = int4_copy(draft, opened, settled, used, device.torch, progress)
        if codes is not None:
            codes.put(model, labelled(progress, "loading the draft's dense layers"))
    base = (
        arena if settled.residency_plan.needs_draft else None
    )  # held no longer than the run holds it
    with contextlib.ExitStack() as undo:
        host = None
        if not isinstance(device, Processor):
            host = host_tier(opened.store, base, device, model_spec, settled, budget, progress)
            undo.callback(host.close)
        elif encoding is not None:
            encoding.measure(base, budget.readers, labelled(progress, ENCODING))
        if encoding is not None:
            settled = replan_with_slot_size(encoding, model_spec, settled, budget)
        backend = None if arena is None else drafting_bank(arena, opened, model)
        graphs_on = recording_device(config.graphs, device, model)
        governors = Governors(governor_of(config, profile, settled), MAX_LINEAR_ROWS)
        undo.pop_all()
    head = None
    if source is not None:
        model.capture_hidden_states(source.shape.captured_layers)
        head = source.load(model_spec.dtype, device.torch)
    heap.give_back()
    loaded = Loaded(
        config,
        opened,
        device,
        model_spec,
        settled,
        model,
        arena,
        backend,
        host,
        graphs_on,
        governors,
    )
    loaded.limits, loaded.head, loaded.others = limits, head, others
    if others is not None:
        model.join(others)
    if limits is not None and not settled.residency_plan.drafts:
        logger.warning("nothing drafts, so that the expert budget bounds nothing: output is exact")
    if copied is not None and settled.memory.slots < model_spec.count:
        loaded.copy = copied
        copied.begin()
    return loaded


def with_kept_copy(opened: Opened, config: RunConfig, device: Processor | Accelerator) -> Opened:
    """A model whose experts are read from their packed copy, where there is one that is whole."""
    if not config.reads_copies or not isinstance(device, Processor):
        return opened
    if not isinstance(opened.store, SafetensorsExpertStore):
        return opened
    kept = open_copy(opened.checkpoint, opened.shape.experts, opened.store)
    if kept is None:
        return opened
    kept.verify_reads = config.verify_reads
    return replace(opened, store=kept)


def check_verifiable(opened: Opened, config: RunConfig) -> None:
    """Raise SpeqError where reads are to be compared with checksums, and there are none."""
    if config.verify_reads and opened.store.published:
        raise SpeqError(
            f"{opened.checkpoint.path} has no checksums to verify reads by, nor a packed copy in "
            "the cache folder, which has some; `speq pack` writes a model that has"
        )


def copy_to_make(
    opened: Opened, config: RunConfig, device: Processor | Accelerator
) -> PackedCopy | None:
    """The packed copy of published experts that a run is to write; None: it writes none."""
    store = opened.store
    if not config.reads_copies or not isinstance(device, Processor):
        return None
    if not isinstance(store, SafetensorsExpertStore) or copy_codec(store) is None:
        return None
    folder = copy_folder(opened.checkpoint)
    return None if folder is None else PackedCopy(opened.checkpoint, store, folder)


def first_context_of(config: RunConfig, opened: Opened, wanted: int) -> int:
    """The context that memory is planned for first. Raises SpeqError beyond the model's limit."""
    limit, fixed = opened.shape.max_context, config.context_length
    if fixed is not None and fixed > limit:
        raise SpeqError(f"context_length is {fixed}; the model's limit is {limit}")
    return min(fixed or (wanted or CONTEXT_STEP) + (config.draft_nodes or 0), limit)


def check_context(context: int, fixed: int | None, longest: int) -> int:
    """The most tokens of a request. Raises SpeqError where it needs a longer context than that.

    fixed  the option context_length; longest: the model's own limit
    """
    limit = fixed or longest
    if context > limit:
        source = "context_length" if fixed else "the model's limit"
        raise SpeqError(
            f"the prompt and max_new_tokens need a context of {context} tokens and {source} is "
            f"{limit}; shorten one of them"
        )
    return limit


def budget_of(config: RunConfig, context: int, device: Processor | Accelerator) -> Budget:
    """Raises SpeqError for a host budget on the CPU."""
    on_cpu = isinstance(device, Processor)
    check_host_budget(config.host_budget, on_cpu)
    beside = None
    if not isinstance(device, Processor):
        beside = DeviceOverhead(config.host_budget or default_host_bytes(), device.overhead_bytes)
    return Budget(
        config.memory_budget,
        context,
        on_cpu,
        config.reader_threads,
        most_drafted(config),
        beside,
        graphs=not on_cpu and config.graphs == "auto",
        batch_size=config.max_batch,
        longest_side=LONGEST_SECONDARY if side_of(config) else 0,
    )


def most_drafted(config: RunConfig) -> int:
    """Tokens of a draft at most, of a chain or a tree."""
    length = LONGEST if config.draft_length is None else config.draft_length
    return max(length, config.draft_nodes or 0) if length else 0


def check_host_budget(host_budget: int | None, on_cpu: bool) -> None:
    """Raise SpeqError for a host budget where there is one memory, and one budget."""
    if on_cpu and host_budget is not None:
        raise SpeqError(
            "host_budget is given and the device is cpu, where experts lie in the memory of "
            "memory_budget or on the disk; leave it out"
        )


def draft_source(opened: Opened, config: RunConfig) -> DraftSource:
    """The draft that options name, opened and checked. Raises SpeqError where it does not fit."""
    checkpoint, store, experts = opened.checkpoint, opened.store, opened.shape.experts
    wanted = wants_int4(config, store.codec)
    if config.draft == "none" and wanted:
        drafter_of(config)  # refuses one that has nothing to draft with
        codec = store.codec.name if config.codec == "auto" else config.codec
        raise SpeqError(
            f"draft is none, and experts of codec {codec} are read over a draft's codes; leave "
            "draft to be auto"
        )
    if config.draft in ("auto", "none") and not wanted:
        return RoundedDraft(checkpoint, store, experts, owned=False)
    source = open_draft(config.draft, checkpoint, store, experts, opened.shape.draft_layers)
    try:
        _ = source.layout.nbytes  # refuses experts that INT4 codes cannot be packed for
    except SpeqError:
        source.close()
        raise
    return source


def head_of(opened: Opened, config: RunConfig) -> HeadSource | None:
    """The head that is to draft, or may; None where another drafter does.

    Raises SpeqError where one is asked for that is missing, damaged or another model's.
    """
    if config.drafter == "auto" and drafter_of(config) != "none":
        return head_worth_weighing(opened)
    return open_head(config.head, opened) if drafter_of(config) == "head" else None


def trial_of(
    opened: Opened, device: Processor | Accelerator, model_spec: ModelSpec, config: RunConfig
) -> ProcessorTrial | DeviceTrial:
    """What surveys the machine before anything is loaded, within half of the budget."""
    limit_bytes, dtype = config.memory_budget // 2, model_spec.dtype
    if isinstance(device, Processor):
        return ProcessorTrial(opened, dtype, model_spec.draft, config.reader_threads, limit_bytes)
    graphs = config.graphs == "auto"
    return DeviceTrial(opened.store, device, opened.shape, dtype, limit_bytes, graphs)


def dense_trial_of(
    opened: Opened, device: Processor | Accelerator, config: RunConfig
) -> Callable[[], DenseTrial] | None:
    """What times one of a model's own matrices, within half of the budget; None on a GPU."""
    if not isinstance(device, Processor):
        return None
    names = opened.family.names
    return partial(DenseTrial.of, opened.checkpoint, names.is_expert, config.memory_budget // 2)


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


def records_of(
    model_spec: ModelSpec,
    opened: Opened,
    codes: DraftMatrices | None,
    device: Processor | Accelerator,
    budget: Budget,
    progress: Progress | None,
) -> Records | None:
    """What encodes the dense matrices of a model, or reads them; None where they stay words."""
    if model_spec.dense.name == "raw":
        return None
    doing = "reading" if model_spec.dense.packed else "encoding"
    return partial(
        encode_dense,
        threads=budget.readers,
        device=device.torch,
        progress=labelled(progress, f"{doing} dense layers"),
        base=codes.base if codes is not None and model_spec.dense.name == "residual" else None,
        packed=opened.dense if model_spec.dense.name == "lossless" else None,
    )


def replan_with_dense_sizes(
    model: MoEModel, model_spec: ModelSpec, settled: PlanDecision, budget: Budget
) -> tuple[ModelSpec, PlanDecision]:
    """The model with dense matrices of known sizes, and the same holding with what they leave."""
    sizes = tuple(model.dense_sizes)
    if sizes == model_spec.dense.sizes:
        return model_spec, settled
    known = replace(model_spec, dense=model_spec.dense.known(sizes))
    residency_plan, memory = replan(known, settled.residency_plan, budget)
    return known, replace(settled, residency_plan=residency_plan, memory=memory)


def encoding_of(store: ExpertStore, settled: PlanDecision) -> EncodingStore | None:
    """The store that encodes published experts as it reads them, where that is settled."""
    if not settled.residency_plan.encoded:
        return None
    return EncodingStore(store, codec_of(settled.residency_plan.codec, store.codec.shape))


def check_room(memory: MemoryPlan, budget_bytes: int, device: Processor | Accelerator) -> None:
    """The budget is a promise about memory that must exist."""
    planned = sum(memory.items.values())
    free = device.free_bytes()
    on_cpu = isinstance(device, Processor)
    where = "here" if on_cpu else "on the GPU"
    if planned > free:
        sentence = (
            f"the run would take {format_bytes(planned)} of the memory budget and "
            f"{format_bytes(free)} are free {where}; give a smaller budget"
        )
        if not on_cpu:
            raise SpeqError(sentence)
        logger.warning("%s, or the system may end the run", sentence)
    elif budget_bytes > free:
        logger.warning(
            "the memory budget is %s and %s are free %s; a longer context may take what is not "
            "there: give a smaller budget, or a context_length",
            format_bytes(budget_bytes),
            format_bytes(free),
            where,
        )


def int4_copy(
    draft: DraftSource,
    opened: Opened,
    settled: PlanDecision,
    used: UsedExperts,
    device: torch.device,
    progress: Progress | None,
) -> Int4Arena:
    """The INT4 copy of all experts, or of those used most, on the device."""
    experts, residency_plan = opened.shape.experts, settled.residency_plan
    count = residency_plan.draft_experts
    arena = Int4Arena(
        draft.layout,
        len(experts.layers),
        experts.num_experts,
        device,
        keep_orders=residency_plan.encoded and residency_plan.needs_draft,
        kept=None if count is None else used.most(count),
    )
    draft.fill(arena, labelled(progress, draft.label))
    tied = opened.store.tied_draft
    if tied is not None:
        tied.check(opened.checkpoint.path, arena)
    return arena


def drafting_bank(arena: Int4Arena, opened: Opened, model: MoEModel) -> DraftExperts:
    """What drafts run of a loaded model."""
    return DraftExperts(arena, opened.shape.activation, model.biases, model.gates)


def host_tier(
    store: ExpertStore,
    base: Int4Arena | None,
    device: Accelerator,
    model_spec: ModelSpec,
    settled: PlanDecision,
    budget: Budget,
    progress: Progress | None,
) -> HostTier:
    """The host's memory with as many experts as it is given, encoded where that is settled."""
    planned = present(
        host_plan(model_spec, settled.residency_plan, budget), "a processor has no host tier"
    )
    room = HostRoom(device, planned.limit_bytes, budget.readers)
    if isinstance(store, EncodingStore):
        return HostTier.encode(store, base, room, labelled(progress, ENCODING))
    return HostTier.load(store, room, labelled(progress, "reading experts into host memory"))


def replan_with_slot_size(
    store: EncodingStore, model_spec: ModelSpec, settled: PlanDecision, budget: Budget
) -> PlanDecision:
    """The same holding with slots that are known to hold the largest expert."""
    known = replace(settled.residency_plan, slot_bytes=store.codec.slot_bytes, estimated=False)
    residency_plan, memory = replan(model_spec, known, budget)
    return replace(settled, residency_plan=residency_plan, memory=memory)


def side_of(config: RunConfig) -> str | None:
    """The drafter besides the run's own: prompt lookup takes no memory, where options leave open
    who drafts and how far. None within an expert budget, which goes by the routes that drafts name.
    """
    free = config.drafter == "auto" and drafter_of(config) != "none"
    if not free or config.draft_length is not None or config.approximates:
        return None
    return "ngram"


def governor_of(config: RunConfig, profile: Profile | None, settled: PlanDecision) -> Governor:
    """The governor of a run. A profile knows INT4 drafts, a plan also those of a head that says how
    far they stand; of others nothing is known beforehand.
    """
    prior = None
    if settled.residency_plan.drafter == "int4":
        prior = settled.prior if profile is None else prior_of(profile, settled.residency_plan)
    elif settled.residency_plan.drafter == "head":
        prior = settled.prior
    objectives, nodes = objectives_of(config), config.draft_nodes
    longest, secondary = settled.longest, side_of(config)
    if not settled.residency_plan.drafts:
        longest, nodes = 0, None
    return make_governor(config.draft_length, objectives, prior, longest, nodes, secondary)


def prior_of(profile: Profile, residency_plan: ResidencyPlan) -> Prior:
    """A profile knows drafts of all experts."""
    prior = Prior.of_profile(profile)
    if prior.acceptance is None:
        return prior
    return replace(
        prior, acceptance=acceptance_of_part(prior.acceptance, residency_plan.draft_covers)
    )


def labelled(progress: Progress | None, label: str) -> Done | None:
    if progress is None:
        return None
    return lambda done, total: progress(label, done, total)
