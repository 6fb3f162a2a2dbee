"""`plan`: estimates what fits a memory budget and how fast it runs, before anything is loaded."""

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

import torch

from speq.config import COUNTS_ALONE, DEFAULT_READER_THREADS, SamplingParams
from speq.devices.allocator import overhead_bytes
from speq.devices.device import Processor
from speq.devices.named import find_device
from speq.errors import OptionError, SpeqError
from speq.files.checkpoint import has_weights, locate_config
from speq.files.packing import INT4
from speq.files.published_format import FP8, WORDS
from speq.governor.profile import Profile
from speq.heads.head_file import HeadLabel, head_path, model_digest, read_label
from speq.heads.predicted_experts import AUTO, open_head
from speq.machine import default_host_bytes
from speq.measure.route_trace import RouteTrace
from speq.measure.routes import acceptance_of, curve_of
from speq.measure.settings import PlanSettings
from speq.measure.this_machine import machine_rates
from speq.models.opened import Opened, open_model
from speq.options.declared import build
from speq.options.typed import PlanOptions
from speq.planning import profiles
from speq.planning.assumptions import DEFAULT_ACCEPTANCE, Assumptions, routes_of
from speq.planning.budget_plan import BudgetPlan, plan_budget
from speq.planning.candidates import candidates_of, check_parts
from speq.planning.cost import presets
from speq.planning.cost.locality import CURVES, Locality, nearest_curve
from speq.planning.cost.presets import Rates
from speq.planning.cost.survey import Survey
from speq.planning.demand import Budget, DeviceOverhead
from speq.planning.dense import DenseTrial, MemoryContext, choose_dense_form
from speq.planning.model_spec import ModelSpec
from speq.planning.peers import peers_of
from speq.planning.reader_survey import reader_threads
from speq.planning.run_budget import CONTEXT_STEP, check_host_budget
from speq.planning.trials import machine_survey
from speq.planning.used_experts import DraftPart, UsedExperts, used_experts, warn_without_counts
from speq.units import Progress

# Context of a run whose prompt has up to CONTEXT_STEP tokens.
DEFAULT_CONTEXT = CONTEXT_STEP + SamplingParams().max_new_tokens
# Of matrices outside the experts where none was timed: records are read as fast as words.
UNTRIED = DenseTrial(raw_s=1.0, lossless_s=0.7, record_share=0.7)


def plan(
    model: str | Path, memory_budget: str | int = "auto", **options: Unpack[PlanOptions]
) -> BudgetPlan:
    """Plan what fits a budget, the expected speed with and without a draft, and the break-even.

    A model's config.json is enough, in a folder or on the hub. Expected times are good for
    comparing candidates; a run measures its own. Raises SpeqError if a file is missing or damaged,
    or if options exclude each other.

    options  facts about the machine and the routes; see docs/options.md
    """
    return plan_of(model, build(PlanSettings, {"memory_budget": memory_budget, **options}))


def plan_of(
    model: str | Path, settings: PlanSettings, progress: Progress | None = None
) -> BudgetPlan:
    """Plan as `plan` does. progress: called with (what, done, total) during measurements"""
    return PlannedModel.of(model, settings, progress).plan(settings.memory_budget)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model and a machine to plan for, in any budget.

    flops_per_s  of products on that machine; None: not known
    is_here      whether the model's files are on this machine
    readers      threads that read experts
    dense_trial  of this machine's processor, with a matrix of the model; None: it was not tried
    """

    model_spec: ModelSpec
    used: UsedExperts
    machine: Rates | Profile | Survey
    settings: PlanSettings
    flops_per_s: float | None
    is_here: bool
    readers: int = DEFAULT_READER_THREADS
    dense_trial: DenseTrial | None = None

    @classmethod
    def of(
        cls, model: str | Path, settings: PlanSettings, progress: Progress | None = None
    ) -> "PlannedModel":
        check_exclusions(settings)
        model_spec, opened = model_spec_of(str(model), settings.dtype, settings.head)
        with contextlib.closing(opened) if opened else contextlib.nullcontext():
            machine, flops_per_s, readers = machine_of(model_spec, opened, settings, progress)
            used = used_of(model_spec, opened, settings)
            parts = parts_of(used, model_spec, settings)
            planned = cls(
                replace(model_spec, draft_parts=parts),
                used,
                machine,
                settings,
                flops_per_s,
                opened is not None,
                readers,
            )
            if opened is None or not planned.tries_dense:
                return planned
            names = opened.family.names
            trial = DenseTrial.of(opened.checkpoint, names.is_expert, settings.memory_budget // 2)
            return replace(planned, dense_trial=trial)

    @property
    def on_cpu(self) -> bool:
        if self.settings.device != "auto":
            return self.settings.device == "cpu"
        return not device_of(self.machine).startswith("cuda")

    @property
    def tries_dense(self) -> bool:
        """True if a run on this machine would try how matrices outside the experts are held."""
        settings, spec = self.settings, self.model_spec
        given = (settings.preset, settings.link, settings.memory_bandwidth)
        here = self.on_cpu and given == (None, None, None)
        return here and settings.dense == "auto" and spec.dtype == torch.bfloat16

    def instead(self) -> "dict[str, PlannedModel]":
        """What may run faster: experts in fewer bits, if they are published so, or two disks."""
        found: dict[str, PlannedModel] = {}
        if self.model_spec.codec.shape.published == WORDS:
            for name, published in (("in FP8", FP8), ("in INT4", INT4)):
                with contextlib.suppress(SpeqError):  # sizes that the format does not allow
                    model_spec = self.model_spec.published_as(published)
                    found[name] = replace(self, model_spec=model_spec)
        machine, link = self.machine, self.settings.link
        if self.settings.peer_budget:
            found["one GPU"] = replace(self, settings=replace(self.settings, peer_budget=()))
        if self.on_cpu and not isinstance(machine, Profile):
            twice = replace(machine, link_bytes_per_s=2 * machine.link_bytes_per_s)
            settings = replace(self.settings, link=None if link is None else 2 * link)
            found["two disks"] = replace(self, machine=twice, settings=settings)
        return found

    def plan(self, memory_budget: int) -> BudgetPlan:
        """Plan for a budget. Raises SpeqError for one that is too small."""
        settings, model_spec, on_cpu = self.settings, self.model_spec, self.on_cpu
        check_host_budget(settings.host_budget, on_cpu)
        if on_cpu and settings.host_bandwidth is not None:
            raise OptionError(
                "host_bandwidth is given and the model runs on the CPU: its memory is the host's; "
                "give memory_bandwidth, or the preset of a card"
            )
        if on_cpu and settings.peer_budget:
            raise OptionError(
                "peer_budget is given and the model runs on the CPU; further GPUs help a first "
                "one: leave peer_budget out, or give the preset of a card"
            )
        context = settings.context_length or min(DEFAULT_CONTEXT, model_spec.shape.max_context)
        budget = Budget.of(memory_budget, context, on_cpu, model_spec.shape)
        budget = replace(budget, batch_size=settings.max_batch, readers=self.readers)
        if not on_cpu:
            # The most that any GPU takes: it need not be at hand. Graphs are as runs have them that
            # do not say otherwise.
            beside = DeviceOverhead(host_bytes_of(settings), overhead_bytes)
            budget = replace(budget, beside=beside, graphs=True)
        room = MemoryContext(budget, partial(candidates_of, on_cpu=on_cpu))
        if on_cpu and model_spec.has_table and not room.holds_all(model_spec):
            model_spec = model_spec.with_table_on_disk()
        trial = self.dense_trial or (UNTRIED if on_cpu else None)

        def planned(form: ModelSpec) -> BudgetPlan:
            sized = room.with_dense(form, form.dense.name, usual=True)
            sized = replace(sized, dense_byte_cost=form.dense_byte_cost)
            peers = peers_of(sized, settings.peer_budget, self.used, budget)
            given = replace(assumptions(sized, self.machine, settings), peers=peers)
            return plan_budget(sized, budget, given)

        return planned(
            choose_dense_form(
                model_spec,
                settings.dense,
                room,
                None if trial is None else lambda: trial,
                lambda form: planned(form).best_s,
            )
        )


def used_of(model_spec: ModelSpec, opened: Opened | None, settings: PlanSettings) -> UsedExperts:
    """What is known of which experts are used most, where a draft or further GPUs hold some."""
    wanted, checkpoint = settings.draft_experts, None if opened is None else opened.checkpoint
    asked = "auto" if settings.peer_budget else wanted
    return used_experts(asked, settings.draft_counts, checkpoint, model_spec.shape)


def parts_of(
    used: UsedExperts, model_spec: ModelSpec, settings: PlanSettings
) -> tuple[DraftPart, ...]:
    """List the parts of the experts that an INT4 draft may hold."""
    wanted = settings.draft_experts
    parts = used.parts(wanted)
    check_parts(parts, model_spec.codec)
    warn_without_counts(used, wanted)
    return parts


def host_bytes_of(settings: PlanSettings) -> int | None:
    """Host memory for experts: as given, else this machine's if it has the GPU; None: any."""
    if settings.host_budget is not None:
        return settings.host_budget
    here = settings.preset is None and torch.cuda.is_available()
    return default_host_bytes() if here else None


def check_exclusions(settings: PlanSettings) -> None:
    """Raise SpeqError for options that exclude each other."""
    by_file = settings.profile not in ("auto", "none")
    if by_file and (settings.preset is not None or settings.memory_bandwidth is not None):
        raise OptionError(
            "profile is given with preset or memory_bandwidth; a profile says how fast the machine "
            "computes: give one of them"
        )
    if settings.draft_counts is not None and settings.draft_experts is None:
        raise OptionError(COUNTS_ALONE)
    if settings.locality is not None and settings.routes is not None:
        raise OptionError("locality and routes are given together; give one of them")


def model_spec_of(model: str, dtype: str, head_name: str) -> tuple[ModelSpec, Opened | None]:
    """Make the model's spec, and open the model if its weights are here; they are not read.

    head_name  value of the option `head`
    """
    path = locate_config(model)
    if not has_weights(path):
        if head_name != AUTO:
            raise OptionError(
                f"head is {head_name} and {path} holds no weights, which are needed to plan for a "
                "head; give the folder of the whole model, or leave head out"
            )
        return ModelSpec.of_config(model, path, dtype), None
    opened = open_model(path)
    try:
        model_spec = ModelSpec.of_model(model, opened, dtype)
        opened.family.check_dtype(model_spec.dtype)
        head = head_beside_model(opened) if head_name == AUTO else open_head(head_name, opened)
        if head is not None:
            model_spec = replace(model_spec, head=head.shape, head_acceptance=head.acceptance_rates)
        return model_spec, opened
    except BaseException:
        opened.close()
        raise


def head_beside_model(opened: Opened) -> HeadLabel | None:
    """Read the label of the head file in the model's folder; None if none fits the model."""
    checkpoint = opened.checkpoint
    with contextlib.suppress(SpeqError):
        digest = model_digest(checkpoint, opened.family.names)
        path = head_path(checkpoint.path)
        return read_label(path, digest, opened.shape.hidden_size)
    return None


def machine_of(
    model_spec: ModelSpec,
    opened: Opened | None,
    settings: PlanSettings,
    progress: Progress | None = None,
) -> tuple[Rates | Profile | Survey, float | None, int]:
    """Choose the rates to plan with: given ones, a tuned profile, measured ones, or a preset; the
    rate of products, where it is known; and the threads that read, by this machine's disk where the
    rates are.

    A model whose files are here is surveyed as a load does it. Of others the disk of the cache
    folder is measured.
    """
    link, memory, readers = settings.link, settings.memory_bandwidth, DEFAULT_READER_THREADS
    if settings.profile not in ("auto", "none"):
        return profiles.read(Path(settings.profile)), None, readers
    if settings.preset is not None:
        return presets.preset(settings.preset).but(link, memory), None, readers
    device = "cpu" if settings.device == "auto" and opened is None else settings.device
    here = "cpu" if find_device(device).torch.type == "cpu" else "cuda"
    if settings.profile == "auto" and opened is not None and link is None and memory is None:
        kept = profiles.read_kept(profiles.key_of(opened, here, settings.memory_budget))
        if kept is not None:
            readers = reader_threads(opened.store, settings.memory_budget, progress)
            return kept, None, readers
    if link is not None and memory is not None:
        given = Rates("bandwidths as given", "cpu" if here == "cpu" else "cuda", link, memory)
        return given, None, readers
    if here == "cuda":
        return presets.preset(presets.DEFAULT_CARD).but(link, memory), None, readers
    if opened is None:
        found = machine_rates(progress)
        return found.rates.but(link, memory), found.flops_per_s, readers
    flops_per_s = None
    with contextlib.suppress(SpeqError):  # of the cache folder's disk nothing is asked
        flops_per_s = machine_rates(progress).flops_per_s
    if link is None:
        readers = reader_threads(opened.store, settings.memory_budget, progress)
    survey = survey_of(model_spec, opened, settings.memory_budget, readers)
    return (
        replace(
            survey,
            link_bytes_per_s=link or survey.link_bytes_per_s,
            memory_bytes_per_s=memory or survey.memory_bytes_per_s,
        ),
        flops_per_s,
        readers,
    )


def survey_of(model_spec: ModelSpec, opened: Opened, budget_bytes: int, readers: int) -> Survey:
    """Measure what a load of the model would, of every way to hold its experts."""
    names = dict.fromkeys(way.codec for way in candidates_of(model_spec, on_cpu=True))
    budget = Budget.of(budget_bytes, None, True, model_spec.shape)
    budget = replace(budget, readers=readers)
    return machine_survey(opened, Processor(), model_spec, budget).survey(tuple(names))


def device_of(machine: Rates | Profile | Survey) -> str:
    return machine.key.device if isinstance(machine, Profile) else machine.device


def assumptions(
    model_spec: ModelSpec, machine: Rates | Profile | Survey, settings: PlanSettings
) -> Assumptions:
    """Collect the assumptions about the machine, the routes and the draft."""
    experts, top_k = model_spec.shape.experts, model_spec.shape.top_k
    known = nearest_curve(experts.num_experts)
    curve = known if settings.locality is None else CURVES[settings.locality]
    acceptance = settings.acceptance
    if settings.routes is not None:
        recorded = RouteTrace.read(settings.routes)
        curve = curve_of(recorded)
        acceptance = acceptance_of(recorded) if acceptance is None else acceptance
    if isinstance(machine, Profile):
        if settings.routes is None and settings.locality is None:
            curve = routes_of(machine, model_spec.shape) or curve
        acceptance = machine.acceptance if acceptance is None else acceptance
    return Assumptions(
        machine,
        Locality(experts.num_experts, top_k, curve),
        DEFAULT_ACCEPTANCE if acceptance is None else acceptance,
        settings.link,
        settings.host_bandwidth,
    )
