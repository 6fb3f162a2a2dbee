"""Lays an engine out over a loaded model: slots, KV caches, drafters, and what fills the slots."""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor

from speq.config import DraftOptions, MemoryOptions, TransferOptions
from speq.devices.device import Processor
from speq.engine.approximation import Approximation
from speq.engine.drafter import (
    DraftContext,
    Drafter,
    FeatureDrafter,
    PlainDecoding,
    SecondaryDrafter,
)
from speq.engine.engine import Engine
from speq.engine.host_compute import HostCompute
from speq.engine.offload import (
    Beside,
    MoeSizes,
    Offload,
    OffloadPolicies,
    fetch_from,
    moved_from,
    offload_over,
    residents_of,
)
from speq.engine.peer_compute import PeerCompute
from speq.engine.prefix_files import PrefixFiles
from speq.engine.prefixes import Prefixes
from speq.engine.sampler import sampler_on
from speq.engine.spilled_prefixes import SpilledPrefixes
from speq.engine.verification import verification_over
from speq.errors import present
from speq.experts.encoding_store import EncodingStore
from speq.experts.slots import SlotExperts
from speq.files.alignment import allocate_aligned
from speq.files.contents import stamp
from speq.governor.batches import Governors
from speq.governor.confidence import Confidence
from speq.governor.draft_length import FixedDraftLength
from speq.kernels.library import CPU_LIBRARY, CUDA_LIBRARY, has_cpu_library
from speq.layers.expert_budget import LayerBudgets
from speq.layers.host_experts import HostExperts
from speq.layers.peer_experts import PeerExperts
from speq.load import Loaded
from speq.loading.peer_slots import slots_of
from speq.machine import device_name
from speq.models.kv_cache import KVCache
from speq.models.states import SNAPSHOTS
from speq.planning.candidates import drafter_of
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.memory import MemoryPlan
from speq.registries import DRAFTERS
from speq.scheduler.device_clock import DeviceClock
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.host_share import HostShare
from speq.scheduler.peer_devices import PeerDevices
from speq.scheduler.read_queue import ReaderThreads
from speq.scheduler.stream_transfer import StreamTransfer
from speq.scheduler.transfer import TransferEngine
from speq.stats import Recorder, Timed
from speq.version import __version__, transformers_version

logger = logging.getLogger("speq")

# Makes what computes experts on the host; None: nothing.
HostOver = Callable[[ExpertLoader], HostCompute | None]
# Of slots, before the first prompt.
TAKEN_BYTES = 256 << 20


def no_host(loader: ExpertLoader) -> None:
    """Compute nothing on the host."""


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """A loaded model, and the memory that is planned for its arenas.

    spilled  chunks of prompts that earlier arenas held; None: they are not kept
    """

    loaded: Loaded
    residency_plan: ResidencyPlan
    plan: MemoryPlan
    recorder: Recorder
    spilled: SpilledPrefixes | None = None

    def engine(self) -> Engine:
        """Take the memory, and put an engine over it."""
        loaded, model = self.loaded, self.loaded.model
        memory = loaded.config.group(MemoryOptions)
        slots = self._slots()
        caches = self._caches(memory.max_batch)
        chunk = self.plan.chunk
        if loaded.others is not None:
            chunk = min(chunk, loaded.others.reserve(self.plan.context))
            for cache in caches:
                cache.changes = loaded.others.changes
        store = loaded.opened.store
        experts = store.codec.experts(slots, loaded.arena)
        if isinstance(store, EncodingStore) and isinstance(loaded.device, Processor):
            experts = store.experts(slots, loaded.arena, self.recorder)
        offload = self._offload(slots, experts)
        if loaded.draft_backend is not None:
            loaded.draft_backend.idle = idle_over(offload)
        approximation = None
        if offload.budget is not None:
            share = loaded.config.expert_audit
            approximation = Approximation(offload.budget, share, self.recorder.timed)
        confidence, sampler = Confidence(), sampler_on(loaded.device)
        drafters: list[Drafter] = [PlainDecoding() for _ in caches]
        governors = Governors(FixedDraftLength(0, self._no_draft_reason()), most_rows=len(caches))
        secondary_drafters: list[SecondaryDrafter] = []
        secondary = loaded.governors.alone.secondary
        if self.residency_plan.drafts or secondary is not None:
            residents = residents_of(
                offload.loader, experts, model.gates, self._sizes, loaded.device
            )
            # Passes of the first sequence alone are recorded: batches are launched, and a sequence
            # by itself has the first cache.
            contexts = [
                DraftContext(
                    model,
                    cache,
                    loaded.draft_backend,
                    sampler,
                    None if cache.number else loaded.graphs_on,
                    confidence,
                    loaded.head,
                    residents,
                )
                for cache in caches
            ]
            governors = loaded.governors
            if self.residency_plan.drafts:
                drafters = [DRAFTERS[self.residency_plan.drafter](each) for each in contexts]
            if secondary is not None:
                secondary_drafters = [DRAFTERS[secondary](each) for each in contexts]
        listeners: list[FeatureDrafter] = [
            each for each in drafters if isinstance(each, FeatureDrafter)
        ]
        return Engine(
            model=model,
            caches=caches,
            offload=offload,
            verification=verification_over(model, caches[0], offload.target, loaded.graphs_on),
            drafters=drafters,
            governors=governors,
            recorder=self.recorder,
            chunk=chunk,
            sampler=sampler,
            confidence=confidence,
            approximation=approximation,
            prefixes=Prefixes(
                caches,
                chunk,
                self._reuse,
                listeners,
                self._prefix_files(bool(listeners)),
                # No file has the KV of drafters, and other stages have files of none.
                None if listeners or loaded.others is not None else self.spilled,
            ),
            secondary_drafters=secondary_drafters,
        )

    @property
    def _sizes(self) -> MoeSizes:
        model, shape = self.loaded.model, self.loaded.opened.shape
        experts = shape.experts.num_experts
        return MoeSizes(model.num_moe_layers, experts, shape.activations, model.biases)

    def _slots(self) -> Tensor:
        slot_bytes, device = self.residency_plan.slot_bytes, self.loaded.device.torch
        slots = allocate_aligned(self.plan.slots, slot_bytes, device)
        # Takes memory now: the first prompt would wait for every page of it.
        slots[: self._taken].zero_()
        return slots

    @property
    def _taken(self) -> int:
        """Slots whose memory is taken first. The rest comes beside what runs."""
        if not isinstance(self.loaded.device, Processor):
            return self.plan.slots
        return min(max(TAKEN_BYTES // self.residency_plan.slot_bytes, 2), self.plan.slots)

    @property
    def _reuse(self) -> str:
        """What prompts reuse. Other stages keep no copies of states."""
        reuse = self.loaded.config.group(MemoryOptions).prefix_reuse
        has_states = bool(self.loaded.opened.shape.states.layers)
        return "none" if has_states and self.loaded.others is not None else reuse

    def _prefix_files(self, heads: bool) -> PrefixFiles | None:
        """Chunks of prompts on disk. Their bits depend on the weights and on what computes, but not
        on the form of the weights.

        heads  drafters keep KV of their own, which no file has
        """
        loaded = self.loaded
        memory, device = loaded.config.group(MemoryOptions), loaded.device.torch.type
        if memory.prefix_folder is None:
            return None
        if heads:
            logger.warning("prefix_cache is not used: a draft head needs to see prompts whole")
            return None
        kernels = CPU_LIBRARY if device == "cpu" else CUDA_LIBRARY
        built = os.stat(kernels) if kernels.exists() else None
        identity = [
            *(__version__, transformers_version(), torch.__version__, torch.get_num_threads()),
            *(device_name(device), built and (built.st_size, built.st_mtime_ns)),
            *(str(loaded.model_spec.dtype), stamp(loaded.opened.checkpoint), loaded.sums),
        ]
        return PrefixFiles(memory.prefix_folder, memory.prefix_cache_limit, json.dumps(identity))

    def _caches(self, count: int) -> list[KVCache]:
        loaded, context = self.loaded, self.plan.context
        dtype, device = loaded.model_spec.dtype, loaded.device.torch
        shape = loaded.opened.shape
        snapshots = 0 if self._reuse == "none" else SNAPSHOTS
        return [shape.cache(context, dtype, device, number, snapshots) for number in range(count)]

    def _offload(self, slots: Tensor, experts: SlotExperts) -> Offload:
        loaded, config = self.loaded, self.loaded.config
        budget = None
        if loaded.limits is not None:
            budget = LayerBudgets(loaded.limits, loaded.model.gates)
        options, drafts = config.group(TransferOptions), config.group(DraftOptions)
        policies = OffloadPolicies(
            options.cache_policy, options.prefetch, drafts.prunes_rows, budget
        )
        transfer, timed = self._transfer(slots, loaded.budget.readers)
        host_over: HostOver = no_host
        if options.host_compute == "auto" and isinstance(transfer, StreamTransfer):
            host_over = self._host_over(transfer)
        return offload_over(
            *(slots, self._taken, experts, transfer, self._sizes, policies, loaded.device),
            *(self.recorder, timed, self._beside(host_over)),
        )

    def _beside(self, host_over: HostOver) -> Beside:
        """What makes further devices compute the experts that they hold, and the host others."""
        loaded, sizes, device = self.loaded, self._sizes, self.loaded.device
        if not loaded.peers or isinstance(device, Processor):
            return host_over
        codec = loaded.opened.store.codec
        peers = [
            PeerExperts(
                *(device, peer.device, codec.experts(peer.slots, None)),
                *(sizes.num_experts, sizes.activations, sizes.biases),
            )
            for peer in loaded.peers
        ]
        devices = PeerDevices(slots_of(loaded.peers), loaded.peer_rows)

        def beside(loader: ExpertLoader) -> PeerCompute:
            loader.peers = devices
            return PeerCompute(peers, devices, self.recorder, host_over(loader))

        return beside

    def _host_over(self, transfer: StreamTransfer) -> HostOver:
        """What makes the host compute missing experts. Records over a draft's codes cannot be run
        there: the device has the codes.
        """
        codec, sizes, device = self.loaded.opened.store.codec, self._sizes, self.loaded.device
        if codec.needs_draft or not has_cpu_library() or isinstance(device, Processor):
            return no_host
        experts = HostExperts(
            *(device, codec, transfer, sizes.num_experts, sizes.activations, sizes.biases),
            self.recorder.clock,
        )
        expert_s = self.loaded.host_expert_s
        share = HostShare(sizes.num_layers, sizes.num_experts, transfer.holds, expert_s)
        return lambda loader: HostCompute(experts, loader, share, self.recorder)

    def _transfer(self, slots: Tensor, readers: int) -> tuple[TransferEngine, Timed]:
        """Whatever fills the slots, reading threads or copies from host memory, and what times the
        work over them.
        """
        device, store, recorder = self.loaded.device, self.loaded.opened.store, self.recorder
        if isinstance(device, Processor):
            fetch, moved = fetch_from(store), moved_from(store)
            return ReaderThreads(fetch, slots, moved, recorder, readers), recorder.timed
        host = present(self.loaded.host, "no experts were loaded into the host's memory")
        clock = DeviceClock(device, recorder)
        return StreamTransfer(device, host, slots, clock, readers), clock.timed

    def _no_draft_reason(self) -> str:
        if self.loaded.decision.gives_up_draft:
            return "a draft is expected to lose"
        asked = drafter_of(self.loaded.config.group(DraftOptions)) != "none"
        return "the draft does not fit the budget" if asked else "no draft asked for"


def idle_over(offload: Offload) -> Callable[[], bool]:
    """A function that tells whether a draft has nothing to have fetched.

    It does not keep the slots from being freed: the INT4 copy outlives them.
    """
    found = None if offload.resident is None else ref(offload.resident)

    def idle() -> bool:
        resident = None if found is None else found()
        return resident is not None and resident.keeps_all and resident.straight

    return idle
