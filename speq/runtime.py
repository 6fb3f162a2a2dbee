"""Lays out a loaded model's arenas for a context, grows them, and gives them back.

The KV cache and the expert slots share what weights and draft leave of the budget.
"""

import contextlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch

from speq.config import RunConfig
from speq.devices.card import summary, watch_card
from speq.devices.device import Processor
from speq.engine.engine import Engine
from speq.engine.spilled_prefixes import SpilledPrefixes
from speq.engine_layout import EngineLayout
from speq.errors import OptionError, SpeqError
from speq.experts.encoding_store import EncodingStore
from speq.experts.packed_store import PackedExpertStore, VerifiedBytes
from speq.files.cache_folder import SPILLED, cache_folder
from speq.layers.draft_experts import DraftExperts
from speq.load import Loaded, sums_on
from speq.memory_watch import LiveBudget
from speq.models.layer_range import RemoteStages
from speq.models.moe_model import MoEModel
from speq.models.opened import Opened
from speq.models.shape import ModelShape
from speq.planning import forecasts
from speq.planning.choose_plan import replan
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.demand import demand_of
from speq.planning.fitting import FittingPlan, fit
from speq.planning.forecasts import SteadyTime, way_of
from speq.planning.memory import Demand, MemoryPlan
from speq.planning.run_budget import CONTEXT_STEP, check_context
from speq.stats import Recorder, RunStats
from speq.units import format_bytes

logger = logging.getLogger("speq")


class Runtime:
    """A loaded model under one memory budget.

    residency_plan  how its experts are held, and who drafts
    plan            the memory that is laid out
    """

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self.residency_plan: ResidencyPlan = loaded.decision.residency_plan
        self.plan: MemoryPlan = loaded.decision.memory
        self.recorder = Recorder()
        self._budget = LiveBudget.of(self.config.memory_budget, self.link == "disk")
        # None: the budget has changed, so that the run is no longer what was planned.
        self._steady: SteadyTime | None = SteadyTime()
        self._drop_draft(self.residency_plan, self.plan)
        self._spilled = spilled_prefixes(self.config)
        self.engine = self._lay_out()

    @property
    def config(self) -> RunConfig:
        return self._loaded.config

    @property
    def opened(self) -> Opened:
        return self._loaded.opened

    @property
    def shape(self) -> ModelShape:
        return self._loaded.opened.shape

    @property
    def device(self) -> torch.device:
        return self._loaded.device.torch

    @property
    def link(self) -> Literal["disk", "PCIe"]:
        """What experts come over."""
        return "disk" if self.device.type == "cpu" else "PCIe"

    @property
    def dtype(self) -> torch.dtype:
        return self._loaded.model_spec.dtype

    @property
    def model(self) -> MoEModel:
        return self._loaded.model

    @property
    def draft_backend(self) -> DraftExperts | None:
        """The INT4 copy of the experts, where one is held."""
        return self._loaded.draft_backend

    @property
    def records_passes(self) -> bool:
        """True if passes of a single sequence are recorded and launched as a whole."""
        return self._loaded.graphs_on is not None

    @property
    def demand(self) -> Demand:
        """The memory that the run asks for, as it is held now."""
        loaded = self._loaded
        return demand_of(
            loaded.model_spec, self.residency_plan, loaded.budget_for(self.plan.context)
        )

    @property
    def others(self) -> RemoteStages | None:
        """Stages that run the layers behind these; None: there are none."""
        return self._loaded.others

    @property
    def longest_draft(self) -> int:
        """Tokens of a draft that memory is planned for, at most."""
        return self._loaded.budget.longest_draft

    @property
    def readers(self) -> int:
        """Threads that read experts, as given or as the disk's survey says."""
        return self._loaded.budget.readers

    @property
    def planned(self) -> str | None:
        """Why the planner chose the residency plan, where there was something to weigh."""
        return self._loaded.decision.reason

    def synchronize(self) -> None:
        """Return when all that was asked of the device is done."""
        self._loaded.device.synchronize()

    def finish_copy(self) -> None:
        """Return when the packed copy that this run makes, if it makes one, is whole."""
        if self._loaded.copy is not None:
            self._loaded.copy.wait()

    def begin_stats(self, start_s: float) -> RunStats:
        """The record of a run that began at `start_s`, with the budget item by item."""
        memory, host = self.plan.report(), self._loaded.host
        if host is not None:
            if self._loaded.peers:
                memory["peer_slots"] = sum(peer.slots.nbytes for peer in self._loaded.peers)
            memory |= {"host_records": host.nbytes, "host_pinned": host.pinned_bytes}
        form, sums = self._loaded.model_spec.dense.name, self._loaded.sums
        codec, readers = self.residency_plan.codec, self.readers
        return RunStats(start_s, memory, codec, form, sums, self.planned, readers)

    @contextmanager
    def watched(self, stats: RunStats) -> Iterator[None]:
        """Note in `stats` what the driver says of the card during the block, which generates. A
        copy in the making gives way to it.
        """
        device, copy = self._loaded.device, self._loaded.copy
        store = self._loaded.opened.store
        verified = VerifiedBytes()
        if isinstance(store, PackedExpertStore | EncodingStore):
            verified = store.verified
        before = verified.nbytes, verified.seconds
        with (
            contextlib.nullcontext() if copy is None else copy.giving_way(),
            watch_card(None if isinstance(device, Processor) else device.card()) as readings,
        ):
            stats.readings = readings
            try:
                yield
            finally:
                stats.card = summary(readings)
                context = max(cache.length for cache in self.engine.caches)
                if self._steady is not None and context < forecasts.MOST_CONTEXT:
                    self._steady.add(stats)
                stats.verified_bytes = verified.nbytes - before[0]
                stats.verified_s = verified.seconds - before[1]

    def reserve(self, context: int) -> Engine:
        """An engine whose KV cache holds `context` tokens; the present one if it does.

        Trees have room beside them, as far as the model or a fixed context_length allows.

        Raises SpeqError where the model, the budget or a fixed context_length forbids it.
        """
        context, limit = self._room_for(context)
        if self.engine.closed:  # it could neither be laid out anew nor again as it was
            self.engine = self._lay_out()
        if context > self.plan.context:
            residency_plan, plan = self._roomy(context, limit)
            before = self.residency_plan, self.plan
            if self._drop_draft(residency_plan, plan):  # for good, also where what follows fails
                loaded, plain = self._loaded, self.residency_plan.without_draft
                before = fit(loaded.model_spec, plain, loaded.budget_for(self.plan.context))
            self._lay_out_again(residency_plan, plan, before)
        return self.engine

    def _lay_out_again(
        self, residency_plan: ResidencyPlan, plan: MemoryPlan, before: FittingPlan | None = None
    ) -> None:
        """Lay arenas out by another plan, or by the one before where that fails."""
        before = before or (self.residency_plan, self.plan)
        # The old arenas go first: the budget has no room for both.
        self.engine.prefixes.spill_all()
        self.engine.close()
        self._loaded.device.release_cached()
        try:
            self.residency_plan, self.plan = residency_plan, plan
            self.engine = self._lay_out()
        except BaseException:
            self.residency_plan, self.plan = before
            self.engine = self._lay_out()
            raise

    def resize(self, budget_bytes: int) -> None:
        """Have steps follow another budget, from the next one on. Any thread may ask.

        Raises OptionError where what is loaded leaves no room for slots, where the machine has less
        memory, and on a GPU.
        """
        if self.link != "disk":
            raise OptionError("the budget of a run on a GPU is fixed; load the model again")
        self._budget.ask(budget_bytes, self.least_budget)

    @property
    def wanted_budget(self) -> int:
        """The budget that the next step follows."""
        return self._budget.wanted

    @property
    def least_budget(self) -> int:
        """The smallest budget for what is loaded, with the fewest slots."""
        return self.plan.least_budget(self._loaded.model_spec.count)

    def follow_budget(self, idle: bool = False) -> None:
        """Take expert slots, or give them back, where the budget has changed, between steps.

        idle  no request runs, so that more slots than there were at first can be laid out; the KV
              caches are, too
        """
        if self.engine.closed:
            return  # `reserve` lays memory out by the present plan first
        wanted, before, loaded = self._budget.next(self.least_budget), self.plan, self._loaded
        slots, laid_out = before.slots_in(wanted, loaded.model_spec.count), self._slots_laid_out
        lays_out = idle and slots > laid_out * self._budget.worth_laying_out
        if wanted == before.budget and not lays_out:
            return
        self._loaded = replace(loaded, budget=replace(loaded.budget, budget_bytes=wanted))
        self._steady = None
        if lays_out:
            budget = self._loaded.budget_for(before.context)
            try:
                self._lay_out_again(*replan(loaded.model_spec, self.residency_plan, budget))
            except BaseException:
                self._loaded, self._budget.wanted = loaded, before.budget
                raise
        else:
            slots = min(slots, laid_out)
            self.engine.offload.limit(slots)
            self.plan = before.with_slots(wanted, slots)
            self.residency_plan = replace(self.residency_plan, slots=slots)
        logger.info(
            "memory budget: %s in place of %s, with %d expert slots in place of %d",
            *(format_bytes(wanted), format_bytes(before.budget), self.plan.slots, before.slots),
        )

    @property
    def _slots_laid_out(self) -> int:
        return len(self.engine.offload.slots)

    def has_room(self, context: int) -> bool:
        """True if memory is laid out for so many tokens."""
        return self._room_for(context)[0] <= self.plan.context

    def check(self, context: int) -> None:
        """Raise SpeqError where no memory could be laid out for so many tokens, as `reserve`."""
        context, limit = self._room_for(context)
        if context > self.plan.context:
            self._roomy(context, limit)

    def _room_for(self, context: int) -> tuple[int, int]:
        """The tokens to lay out for a request of so many, and the most that may be."""
        limit = check_context(context, self.config.context_length, self.shape.max_context)
        if self.residency_plan.drafts:
            context = min(context + (self.config.draft_nodes or 0), limit)
        return context, limit

    def _roomy(self, context: int, limit: int) -> FittingPlan:
        """A plan with some room to grow, where that costs neither the draft nor the request."""
        loaded = self._loaded
        needed = replan(loaded.model_spec, self.residency_plan, loaded.budget_for(context))
        rounded = min(-(-context // CONTEXT_STEP) * CONTEXT_STEP, limit)
        with contextlib.suppress(SpeqError):
            roomy = replan(loaded.model_spec, self.residency_plan, loaded.budget_for(rounded))
            if roomy[0].holds_int4 == needed[0].holds_int4:
                return roomy
        return needed

    def _drop_draft(self, residency_plan: ResidencyPlan, plan: MemoryPlan) -> bool:
        """Give the INT4 copy up where a longer context leaves no room for it; whether it was."""
        if self._loaded.arena is None or residency_plan.holds_int4:
            return False
        logger.warning(
            "the draft leaves no room for a context of %d tokens and is dropped for good; a "
            "context_length given from the start would have planned for it",
            plan.context,
        )
        self._loaded = replace(self._loaded, arena=None, draft_backend=None)
        for layer in self.model.dense.values():
            layer.draft = None
        return True

    def _lay_out(self) -> Engine:
        """Spend the rest of the budget as planned, and put an engine over it."""
        layout = EngineLayout(
            self._loaded, self.residency_plan, self.plan, self.recorder, self._spilled
        )
        return layout.engine()

    def forget(self) -> None:
        """Clear all KV caches, and what is kept of earlier ones for this run alone."""
        for cache in self.engine.caches:
            cache.clear()
        if self._spilled is not None:
            self._spilled.close()

    def close(self) -> None:
        """Give back memory, files and transfers. Keep what was expected of the run, and came."""
        with contextlib.ExitStack() as closing:  # also where the device is lost
            closing.callback(self._loaded.close)
            closing.callback(self.engine.close)
            if self._spilled is not None:
                closing.callback(self._spilled.close)
            self._keep_expected()

    def _keep_expected(self) -> None:
        """Keep what was expected of the run, and came, where it was as usual."""
        config, loaded, plan = self.config, self._loaded, self._loaded.decision.residency_plan
        # A run that is slower or faster by its options would correct others wrongly.
        usual = not (config.peer_budget or config.verify_reads) and config.graphs == "auto"
        usual &= config.profile != "none" and loaded.sums == sums_on(loaded.device, "auto")
        whole = loaded.limits is None and loaded.others is None and loaded.copy is None
        if usual and whole and self._steady is not None and plan.expected is not None:
            told, machine = plan.expected, loaded.machine
            seen = told if machine is None else machine.learn(plan, self._steady)
            if config.profile == "auto" and not config.draft_length:
                way = way_of(plan, loaded.budget.on_cpu, machine is None)
                budget_bytes = loaded.decision.memory.budget
                forecasts.keep(loaded.model_spec.name, way, budget_bytes, told, seen, self._steady)


def spilled_prefixes(config: RunConfig) -> SpilledPrefixes | None:
    """The store of a run's own chunks of prompts; None: it keeps none."""
    folder = cache_folder(SPILLED)
    if config.prefix_cache != "auto" or folder is None:
        return None
    return SpilledPrefixes(folder, config.prefix_cache_limit)
