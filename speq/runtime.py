"""Builds an engine from a checkpoint and a budget; lays out its arenas anew when need be.

What does not depend on the length of the context (weights, draft) is loaded once; the KV cache and
the expert slots share the rest of the budget and are laid out for the context at hand.
"""

import contextlib
import gc
import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from speq.config import RunConfig
from speq.decode.drafter import Drafter, PlainDecoding
from speq.decode.engine import Engine
from speq.decode.offload import Offload, fetch_from, moved_from
from speq.decode.self_draft import SelfDraft
from speq.drafts.draft_source import RoundedDraft, open_draft
from speq.errors import SpeqError
from speq.experts.draft_codes import DraftSource
from speq.experts.encoding_store import EncodingStore
from speq.experts.expert_store import ExpertStore, SafetensorsExpertStore
from speq.experts.host_tier import HostTier
from speq.experts.int4 import Int4Arena
from speq.files.alignment import aligned_bytes
from speq.governor.adaptive import make_governor
from speq.governor.draft_length import FixedDraftLength, Governor
from speq.governor.profile import Profile
from speq.kernels import library
from speq.layers.draft_experts import DraftExperts
from speq.layers.exact_experts import ExactExperts, ExpertServer, SlotTable
from speq.machine import available_bytes, resolve_device
from speq.models import moe_model
from speq.models.kv_cache import KVCache
from speq.models.opened import Opened
from speq.models.shape import DTYPES
from speq.planning import follow_profile, memory, profiles, representation
from speq.planning.demand import (
    demand_of,
    draft_length_of,
    encodes_residuals,
    needs_draft,
    wants_draft,
)
from speq.planning.subject import Budget, Subject
from speq.routing import Route
from speq.scheduler.expert_cache import ExpertCache
from speq.scheduler.layer_stream import LayerStream
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.policies import eviction_policy
from speq.scheduler.prefetch import DraftGuided, Mode, OnDemand, Prefetcher
from speq.scheduler.reader_threads import ReaderThreads
from speq.scheduler.route_history import RouteHistory
from speq.scheduler.supply import ExpertSupply
from speq.scheduler.transfer import SynchronousTransfer, TransferEngine
from speq.stats import Recorder, RunStats
from speq.units import Progress, format_bytes

logger = logging.getLogger("speq")

# Contexts grow in these steps, so that a chat does not lay its arenas out anew at every turn.
CONTEXT_STEP = 64


class Runtime:
    """A loaded model under one memory budget.

    first_context  tokens the first request needs, where that is known before loading
    """

    def __init__(
        self,
        opened: Opened,
        config: RunConfig,
        progress: Progress | None = None,
        first_context: int = CONTEXT_STEP,
    ) -> None:
        # A model's modules refer to each other in circles: one that was closed may still be there.
        gc.collect()
        self.device = resolve_device(config.device)
        self.opened = opened
        self.shape = opened.shape
        self.recorder = Recorder()
        self.dtype = DTYPES.get(config.dtype, self.opened.store.codec.shape.dtype)
        representation.agree(opened.store, config.codec)
        profile = profiles.wanted(config.profile, opened, self.device.type, config.memory_budget)
        self.config = config
        # Drafts are refused before weights are loaded, and even where the budget has no room.
        with contextlib.closing(self._draft_source()) as draft:
            self._draft_layout = draft.layout
            self.course = self._course(profile, first_context)
            self.config = self.course.config
            self.opened = replace(opened, store=self._represented(first_context))
            self.demand = self._demand_of(self.config)
            self.plan = self._first_plan(first_context)
            self._check_room()
            library.report_backends(self.device.type)
            self.model = moe_model.load(
                self.opened.family, self.opened.checkpoint, self.dtype, self.device
            )
            self._arena = self._draft_arena(draft, progress) if self.plan.has_draft else None
        self.draft_bank = self._draft_bank()
        self._measure_records(progress)
        # What it learns outlives the arenas that are laid out anew.
        self._governor = make_governor(
            config.draft_length, follow_profile.objectives_of(config), profile, self.course.longest
        )
        self._host_tier = HostTier(self.opened.store) if self.device.type == "cuda" else None
        self.engine = self._build(self.plan)

    @property
    def wants_draft(self) -> bool:
        return wants_draft(self.config, self.opened.store)

    def begin_stats(self, start_s: float) -> RunStats:
        """Of a run that began at `start_s`: the budget item by item, and what else it would buy."""
        codec, plan = self.opened.store.codec, self.plan
        rows = []
        for drafted in (False, True):
            demand = self.demand
            if drafted != plan.has_draft:
                length = (self.config.draft_length or None) if drafted else 0
                draft = "auto" if drafted else "none"
                demand = self._demand_of(replace(self.config, draft=draft, draft_length=length))
            ways = representation.side_by_side(codec, demand.draft_bytes if drafted else 0)
            rows += memory.slots_of(demand, plan.budget, plan.context, ways)
        return RunStats(start_s, plan.report(), codec.name, rows, self.course.reason)

    def reserve(self, context: int) -> Engine:
        """An engine whose KV cache holds `context` tokens; the present one if it does.

        Raises SpeqError where the model, the budget or a fixed context_length forbids it.
        """
        limit = self.config.context_length or self.shape.max_context
        if context > limit:
            source = "context_length" if self.config.context_length else "the model's limit"
            raise SpeqError(
                f"the prompt and max_new_tokens need a context of {context} tokens and {source} is "
                f"{limit}; shorten one of them"
            )
        if context > self.plan.context:
            plan = self._roomy_plan(context, limit)
            # The old arenas go first: the budget has no room for both.
            self.engine.close()
            try:
                self.engine = self._build(plan)
            except BaseException:
                self.engine = self._build(self.plan)
                raise
            self.plan = plan
        return self.engine

    def _course(self, profile: Profile | None, first_context: int) -> follow_profile.Course:
        """What the profile's planner makes of the options, in the budget for the first request."""
        config, opened = self.config, self.opened
        if profile is None:
            return follow_profile.Course(config)
        name = str(opened.checkpoint.path)
        subject = Subject.of_draft(name, opened, config.dtype, self._draft_layout)
        budget = Budget(
            config.memory_budget,
            min(config.context_length or first_context, self.shape.max_context),
            self.device.type == "cpu",
            config.reader_threads,
            draft_length_of(config),
        )
        return follow_profile.course_of(config, profile, subject, budget)

    def _first_plan(self, first_context: int) -> memory.MemoryPlan:
        """The plan to load by. Raises SpeqError where the options or the budget cannot be met."""
        limit, fixed = self.shape.max_context, self.config.context_length
        if fixed is not None and fixed > limit:
            raise SpeqError(f"context_length is {fixed}; the model's limit is {limit}")
        context = min(fixed or first_context, limit)
        plan = memory.plan(self.demand, self.config.memory_budget, context)
        if self.wants_draft and not plan.has_draft:
            logger.warning(
                "the INT4 draft takes %s and does not fit the budget: running without one",
                format_bytes(self.demand.draft_bytes),
            )
        return plan

    def _roomy_plan(self, context: int, limit: int) -> memory.MemoryPlan:
        """A plan with some room to grow, where that costs neither the draft nor the request."""
        demand = self.demand if self._arena else replace(self.demand, draft_bytes=0)
        plan = memory.plan(demand, self.config.memory_budget, context)
        rounded = min(-(-context // CONTEXT_STEP) * CONTEXT_STEP, limit)
        with contextlib.suppress(SpeqError):
            roomy = memory.plan(demand, self.config.memory_budget, rounded)
            if roomy.has_draft == plan.has_draft:
                return roomy
        return plan

    def _represented(self, first_context: int) -> ExpertStore:
        """Exact experts in the codec that was asked for, or that suits this machine."""
        store, wanted = self.opened.store, self.config.codec
        if not isinstance(store, SafetensorsExpertStore):
            return store
        if wanted == "auto":
            all_fit = False
            with contextlib.suppress(SpeqError):  # of a budget that is too small for words
                context = self.config.context_length or first_context
                demand = self._demand_of(self.config)
                plan = memory.plan(demand, self.config.memory_budget, context)
                all_fit = plan.slots == store.num_layers * store.num_experts
            readers = self.config.reader_threads
            wanted = representation.automatic(store, all_fit, readers, self.device.type)
        return store if wanted == "raw" else representation.encoding(store, wanted)

    def _measure_records(self, progress: Progress | None) -> None:
        """Learn how large slots must be where no file says so, and plan by that."""
        store = self.opened.store
        if not isinstance(store, EncodingStore):
            return
        told = None if progress is None else _labelled(progress, "measuring encoded experts")
        store.measure(self._arena, self.config.reader_threads, told)
        self.demand = replace(
            self.demand,
            slot_bytes=store.codec.slot_bytes,
            draft_bytes=self.demand.draft_bytes if self._arena else 0,
        )
        self.plan = memory.plan(self.demand, self.config.memory_budget, self.plan.context)

    def _demand_of(self, config: RunConfig) -> memory.Demand:
        opened = self.opened
        return demand_of(
            opened.checkpoint,
            self.shape,
            opened.store,
            self._draft_layout,
            config,
            self.dtype,
            self.device,
        )

    def _check_room(self) -> None:
        """The budget is a promise about memory that must exist."""
        planned = sum(self.plan.items.values())
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info()
            if planned > free:
                raise SpeqError(
                    f"the run would take {format_bytes(planned)} of the memory budget and "
                    f"{format_bytes(free)} are free on the GPU; give a smaller budget"
                )
        elif planned > available_bytes():
            logger.warning(
                "the run would take %s and the machine has %s of memory left",
                format_bytes(planned),
                format_bytes(available_bytes()),
            )

    def _draft_source(self) -> DraftSource:
        checkpoint, store = self.opened.checkpoint, self.opened.store
        if self.config.draft == "none" and needs_draft(self.config, store):
            raise SpeqError(
                "draft is none, and experts of codec residual are read over a draft's codes; leave "
                "draft to be auto"
            )
        named = self.config.draft not in ("auto", "none")
        if not named and not self.wants_draft:
            return RoundedDraft(checkpoint, store, self.shape.experts, owned=False)
        return open_draft(self.config.draft, checkpoint, store, self.shape.experts)

    def _draft_arena(self, draft: DraftSource, progress: Progress | None) -> Int4Arena:
        experts = self.shape.experts
        arena = Int4Arena(
            draft.layout,
            len(experts.layers),
            experts.num_experts,
            self.device,
            keep_orders=encodes_residuals(self.opened.store),
        )
        draft.fill(arena, None if progress is None else _labelled(progress, draft.label))
        tied = self.opened.store.tied_draft
        if tied is not None:
            tied.check(self.opened.checkpoint.path, arena)
        return arena

    def _draft_bank(self) -> DraftExperts | None:
        if self._arena is None:
            return None
        return DraftExperts(self._arena, self.shape.activation)

    def _build(self, plan: memory.MemoryPlan) -> Engine:
        """Lay out what is left of the budget as planned, and put an engine over it."""
        if self._arena is not None and not plan.has_draft:
            logger.warning(
                "the draft leaves no room for a context of %d tokens and is dropped for good; a "
                "context_length given from the start would have planned for it",
                plan.context,
            )
            self._arena = self.draft_bank = None
        shape = self.shape
        slots = aligned_bytes(plan.slots, self.opened.store.codec.slot_bytes, self.device)
        slots.zero_()  # takes the memory now: the first prompt would wait for every page of it
        cache = KVCache(shape.num_layers, shape.kv_shapes, plan.context, self.dtype, self.device)
        drafter: Drafter = PlainDecoding()
        governor: Governor = FixedDraftLength(0, self._no_draft_reason())
        if self.draft_bank is not None:
            drafter = SelfDraft(self.model, self.draft_bank, cache)
            governor = self._governor
        return Engine(
            model=self.model,
            cache=cache,
            offload=self._offload(slots),
            drafter=drafter,
            governor=governor,
            recorder=self.recorder,
            chunk=plan.chunk,
        )

    def _offload(self, slots: Tensor) -> Offload:
        """Two banks of exact experts over one arena of slots."""
        num_layers, num_experts = self.model.num_moe_layers, self.shape.experts.num_experts
        transfer, asynchronous = self._transfer(slots)
        policy = eviction_policy(self.config.cache_policy, len(slots), num_layers, num_experts)
        supply = ExpertSupply(ExpertCache(len(slots), policy), transfer, self.recorder)
        lookahead = LookaheadBuffer(num_layers)
        prefetcher: Prefetcher = OnDemand(supply, lookahead)
        if self.config.prefetch != "none" and not asynchronous:
            logger.warning(
                "prefetch %s needs transfers beside the computation, which the device %s does not "
                "have yet: experts are fetched on demand",
                self.config.prefetch,
                self.device.type,
            )
        elif self.config.prefetch != "none":
            prefetcher = DraftGuided(supply, lookahead, Mode(self.config.prefetch))
        history = RouteHistory(num_layers, num_experts)
        stream = LayerStream(supply, history, num_layers, ahead=asynchronous)
        experts = self.opened.store.codec.experts(slots, self._arena)

        def bank(server: ExpertServer, on_route: Callable[[int, Route], None]) -> ExactExperts:
            table = SlotTable(num_experts, slots.device)
            activation = self.shape.activation
            return ExactExperts(server, experts, table, activation, self.recorder, on_route)

        return Offload(
            target=bank(prefetcher, prefetcher.observe),
            prefetcher=prefetcher,
            reader=bank(stream, stream.observe),
            stream=stream,
            supply=supply,
            slots=slots,
        )

    def _transfer(self, slots: Tensor) -> tuple[TransferEngine, bool]:
        """What fills the slots, and whether it does so beside the computation."""
        source = self._host_tier or self.opened.store
        fetch, moved, recorder = fetch_from(source), moved_from(source), self.recorder
        if self._host_tier is not None:
            return SynchronousTransfer(fetch, slots, moved, recorder), False
        return ReaderThreads(fetch, slots, moved, recorder, self.config.reader_threads), True

    def _no_draft_reason(self) -> str:
        if self.course.gives_up_draft:
            return "a draft is expected to lose"
        return "the draft does not fit the budget" if self.wants_draft else "no draft asked for"

    def close(self) -> None:
        """Give back memory, files and transfers."""
        self.engine.close()
        if self._host_tier is not None:
            self._host_tier.close()
        self.opened.close()


def _labelled(progress: Progress, label: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(label, done, total)
