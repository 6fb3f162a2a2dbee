"""From an opened model and a budget to a loaded one: plan, check, load, measure.

What does not depend on the length of the context is made here, once: weights, the INT4 copy, and
the store that fills slots. `Runtime` lays out the rest.
"""

import contextlib
import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from speq.config import (
    ComputeOptions,
    DraftOptions,
    ExpertBudgetOptions,
    ExpertOptions,
    MemoryOptions,
    RunConfig,
    TransferOptions,
)
from speq.devices.device import Accelerator, Processor
from speq.devices.named import find_device, find_peers
from speq.errors import NoRoom, OptionError, present
from speq.experts.encoding_store import sampled_slot_bytes
from speq.experts.host_tier import HostTier
from speq.experts.int4 import Int4Arena
from speq.experts.packed_copy import PackedCopy
from speq.files import heap
from speq.files.heap import spare_collections
from speq.governor.batches import Governors
from speq.governor.profile import ProfileKey
from speq.heads.draft_head import DraftHead
from speq.kernels import library
from speq.layers.draft_experts import DraftExperts
from speq.layers.expert_budget import BudgetRules, rules_of
from speq.loading.dense import DraftMatrices, dense_records
from speq.loading.experts import encoding_store, host_tier, int4_copy, with_copy
from speq.loading.peer_slots import PeerSlots, held_experts
from speq.models import moe_model
from speq.models.layer_range import RemoteStages
from speq.models.moe_model import MoEModel
from speq.models.opened import Opened
from speq.models.packed_copies import copy_to_write, read_copy
from speq.models.recorded import recording_device
from speq.planning import profiles
from speq.planning.candidates import check_codec, open_candidates, secondary_drafter
from speq.planning.choose_plan import PlanChooser, PlanDecision, asks_for_draft
from speq.planning.cost.peers import Peers
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.demand import Budget
from speq.planning.dense import MemoryContext, choose_dense_form
from speq.planning.fitting import holds_all
from speq.planning.kept_survey import MachineSurvey
from speq.planning.model_spec import ModelSpec
from speq.planning.peers import peers_of
from speq.planning.reader_survey import reader_threads
from speq.planning.run_budget import check_free_memory, first_context, run_budget
from speq.planning.run_draft import RunDraft
from speq.planning.run_governor import run_governors, run_kind
from speq.planning.trials import dense_trial, machine_survey
from speq.planning.used_experts import UsedExperts, used_experts
from speq.units import Progress, format_bytes, label_progress, no_progress

logger = logging.getLogger("speq")


@dataclass(slots=True)
class Loaded:
    """A model in memory, and how its experts are held.

    opened      the checkpoint; its store is the one that fills slots
    model_spec  the model as it was planned for, its slots as large as was measured
    decision    how its experts are held, with memory planned for the first request
    budget      with the context of the first request
    draft_backend  the INT4 copy, where one is held
    host        exact experts in the host's memory, for a device with memory of its own
    graphs_on   the device that passes are recorded on; None: they are not
    governors   of batches; they outlive arenas that are laid out anew, with what it has learnt
    copy        the packed copy of published experts that this run writes
    limits      of the experts of verifications; None: they are exact
    head        what drafts out of hidden states, where one does
    others      stages that run the layers behind these; None: this machine has the last ones
    learning    what governors of such runs learn is kept under it; None: it is not kept
    sums        the order of sums, "canonical" or "fast"
    peers       experts that further devices hold; peer_rows: rows of a layer that may have them
    machine     what its plan went by; None: a profile
    host_expert_s  of an expert that the host computes for a device, by a profile; 0: not known
    """

    config: RunConfig
    opened: Opened
    device: Processor | Accelerator
    model_spec: ModelSpec
    decision: PlanDecision
    budget: Budget
    model: MoEModel
    arena: Int4Arena | None
    draft_backend: DraftExperts | None
    host: HostTier | None
    graphs_on: Accelerator | None
    governors: Governors
    copy: PackedCopy | None = None
    limits: BudgetRules | None = None
    head: DraftHead | None = None
    others: RemoteStages | None = None
    learning: tuple[ProfileKey, str] | None = None
    sums: str = "fast"
    host_expert_s: float = 0.0
    peers: tuple[PeerSlots, ...] = ()
    peer_rows: int = 0
    machine: MachineSurvey | None = None

    def budget_for(self, context: int) -> Budget:
        """The budget with a KV cache of so many tokens."""
        return replace(self.budget, context=context)

    def close(self) -> None:
        """Give back files, and the host's memory. Keep what the governor learned."""
        if self.learning is not None:
            profiles.keep_learned(*self.learning, self.governors.alone)
        if self.copy is not None:  # which reads the files
            self.copy.stop()
        if self.host is not None:
            self.host.close()
        try:
            if self.others is not None:
                self.others.close()
        finally:  # also where one of them is gone
            self.model.close()
            self.opened.close()
            if self.copy is not None:  # whose records the store has read
                self.copy.close()


def load(
    opened: Opened,
    config: RunConfig,
    progress: Progress | None = None,
    first_request: int = 0,
    others: RemoteStages | None = None,
) -> Loaded:
    """Load a model under a budget, or the part of it that is opened.

    first_request  tokens that the first request needs; 0 where that is not known
    others         stages that run the layers behind a first part

    Raises SpeqError where options, files or the budget do not allow it.
    """
    spare_collections()
    device = find_device(config.device)
    if not isinstance(device, Processor):
        # Recorded passes refer to themselves in circles: those of a model that was closed may
        # still be there. On the CPU nothing does, and looking through all objects takes long.
        gc.collect()
    experts = config.group(ExpertOptions)
    opened = read_copy(opened, experts, device)
    copy = copy_to_write(opened, experts)
    sums = sums_on(device, config.sums)
    peers = find_peers(device, len(config.peer_budget))
    memory, compute = config.group(MemoryOptions), config.group(ComputeOptions)
    readers = config.reader_threads
    if readers is None:
        readers = reader_threads(opened.store, memory.memory_budget, progress)
    drafts, transfer = config.group(DraftOptions), config.group(TransferOptions)
    codec, shape = config.codec, opened.shape
    check_codec(opened.store, codec)
    layers, num_experts = len(shape.experts.layers), shape.experts.num_experts
    limits = rules_of(config.group(ExpertBudgetOptions), layers, num_experts, shape.top_k)
    profile = profiles.find(compute.profile, opened, device.torch.type, memory.memory_budget)
    nodes = drafts.draft_nodes or 0
    context = first_context(memory.context_length, shape.max_context, first_request, nodes)
    # Drafts are refused before weights are loaded, and even where the budget has no room.
    with contextlib.closing(RunDraft.open(opened, drafts, codec)) as draft:
        spec = draft.model_spec(opened, compute.dtype)
        opened.family.check_dtype(spec.dtype)
        graphs = compute.graphs == "auto"
        secondary = secondary_drafter(drafts, limits is not None)
        budget = run_budget(memory, drafts, device, readers, graphs, secondary)
        budget = replace(budget, context=context)
        if copy is not None:
            spec = replace(spec, copying_bytes=copy.writing_bytes)
        if copy is not None and budget.on_cpu:
            published = open_candidates(spec, drafts, opened.store.codec.name, budget.on_cpu)
            drafting = [way for way in published if way.drafts] if asks_for_draft(drafts) else []
            if holds_all(spec, drafting or published, budget):
                codec = opened.store.codec.name  # none is read twice, and none need be copied
            elif not copy.is_possible:
                copy, spec = None, replace(spec, copying_bytes=0)
            elif not copy.compares:
                copied_bytes = sampled_slot_bytes(opened.store, copy.codec)
                spec = replace(spec, copied_slot_bytes=copied_bytes)
        ways = partial(open_candidates, drafts=drafts, codec=codec, on_cpu=budget.on_cpu)
        room = MemoryContext(budget, ways, asks_for_draft(drafts))
        if budget.on_cpu and spec.has_table and not room.holds_all(spec):
            spec = spec.with_table_on_disk()
        machine = machine_survey(opened, device, spec, budget)
        survey = cache(machine.survey)
        prefetches, on_host = transfer.prefetch != "none", transfer.host_compute == "auto"
        used = used_experts(
            "auto" if peers else None, drafts.draft_counts, opened.checkpoint, shape
        )
        beside = peers_of(spec, config.peer_budget, used, budget)
        chooser = PlanChooser(spec, budget, drafts, codec, prefetches, on_host, beside)
        spec = choose_dense_form(
            spec,
            experts.dense,
            room,
            dense_trial(opened, budget),
            lambda form: replace(chooser, model_spec=form).expected_s(survey),
        )
        decision = replace(chooser, model_spec=spec).choose(profile, survey)
        check_free_memory(decision.memory, memory.memory_budget, device)
        check_peers(peers, config.peer_budget, beside, used, decision.residency_plan)
        if not budget.on_cpu:
            opened, plan, copy = with_copy(opened, experts, decision.residency_plan, copy)
            spec = spec if copy is not None else replace(spec, copying_bytes=0)
            decision = decision.replan(spec, plan, budget)
        encoding = encoding_store(opened.store, decision.residency_plan, copy)
        opened = replace(opened, store=encoding or opened.store)
        library.report_backends(device.torch.type)
        codes = None
        if decision.residency_plan.drafter == "int4":
            codes = DraftMatrices(draft.dense, opened.checkpoint, device.torch)
        model = moe_model.load(
            opened.family,
            opened.checkpoint,
            spec.dtype,
            device,
            dense_records(spec, opened, codes, device.torch, budget.readers, progress),
            progress or no_progress,
            opened.part,
            graphs,
            sums == "canonical" and isinstance(device, Processor),
            spec.table_on_disk,
        )
        sizes = tuple(model.dense_sizes)
        if sizes != spec.dense.sizes:
            spec = replace(spec, dense=spec.dense.known(sizes))
            decision = decision.replan(spec, decision.residency_plan, budget)
        arena = None
        if decision.residency_plan.holds_int4:
            plan = decision.residency_plan
            arena = int4_copy(draft.source, opened, plan, draft.used, device.torch, progress)
        if codes is not None:
            codes.put(model, label_progress(progress, "loading the draft's dense layers"))
    plan = decision.residency_plan
    base = arena if plan.needs_draft else None  # held no longer than the run holds it
    with contextlib.ExitStack() as undo:
        host = None
        if not isinstance(device, Processor):
            host = host_tier(opened.store, base, device, spec, plan, budget, progress)
            undo.callback(host.close)
        elif encoding is not None and plan.estimated:
            encoding.sample(base)
        if encoding is not None:
            slot_bytes = encoding.codec.slot_bytes
            plan = replace(plan, slot_bytes=slot_bytes, estimated=False)
            decision = decision.replan(spec, plan, budget)
        backend = None
        if arena is not None:
            backend = DraftExperts(arena, shape.activations, model.biases, model.gates)
        head = None
        if draft.head is not None and decision.residency_plan.drafter == "head":
            model.capture_hidden_states(draft.head.shape.captured_layers)
            head = draft.head.load(spec.dtype, device.torch)
        learning = learned = None
        if compute.profile == "auto":
            key = profiles.key_of(opened, device.torch.type, memory.memory_budget)
            learning = key, run_kind(config, decision, secondary)
            learned = profiles.read_learned(*learning)
        loaded = Loaded(
            config,
            opened,
            device,
            spec,
            decision,
            budget,
            model,
            arena,
            backend,
            host,
            recording_device(compute.graphs, device, model),
            run_governors(drafts, profile, decision, secondary, learned),
            copy if decision.memory.slots < spec.count or decision.residency_plan.encoded else None,
            limits,
            head,
            others,
            learning,
            sums,
            0.0 if profile is None else profile.host_expert_s,
            tuple(
                PeerSlots.fill(peer, keys, present(host, "a further GPU has no host"), plan)
                for peer, keys in zip(peers, held_experts(plan, beside, used), strict=True)
            ),
            beside.most_rows(plan.peers, plan.moved_bytes) if plan.peers else 0,
            machine if profile is None else None,
        )
        undo.pop_all()
    heap.give_back()
    if others is not None:
        model.join(others)
    if limits is not None and not decision.residency_plan.drafts:
        logger.warning("nothing drafts, so that the expert budget bounds nothing: output is exact")
    if loaded.copy is not None:
        loaded.copy.begin()
    return loaded


def check_peers(
    devices: Sequence[Accelerator],
    budgets: Sequence[int],
    peers: Peers,
    used: UsedExperts,
    plan: ResidencyPlan,
) -> None:
    """Raise NoRoom where further devices lack what is given of them."""
    for device, size in zip(devices, budgets, strict=True):
        if size > device.free_bytes():
            raise NoRoom(
                f"peer_budget gives {format_bytes(size)} of {device.torch}, which has "
                f"{format_bytes(device.free_bytes())} free; give less"
            )
    for device, keys in zip(devices, held_experts(plan, peers, used), strict=True):
        logger.info(
            "%s holds %d of %d experts of each layer",
            *(device.torch, len(keys) // used.num_layers, used.num_experts),
        )


def sums_on(device: Processor | Accelerator, asked: str) -> str:
    """The order of sums of a run: "canonical" or "fast". Raises OptionError where the device lacks
    the one that is asked for.
    """
    if not isinstance(device, Processor):
        if asked == "fast":
            raise OptionError(
                f"sums is fast and the device is {device.torch}; GPUs have the canonical order "
                "alone, and so has a processor that computes experts for one: leave sums out, or "
                "give device cpu"
            )
        return "canonical"
    if asked == "canonical" and not library.has_cpu_library():
        raise OptionError(
            "sums is canonical and there are no native CPU kernels; only those have that order: "
            "leave sums out, or install speq with its kernels (`speq doctor` says why it has none)"
        )
    return "fast" if asked == "auto" else asked
