"""How many experts are in slots when they are needed (MoE-SpeQ, Table 3).

Routes are recorded from a generation and replayed through the real scheduler, on a simulated clock
with the compute times and the link that were measured on this machine. Without a draft (`lru`,
`lru-scaled`) the same tokens are decoded one by one; the others verify the recorded drafts.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from bench.lab import single_shot
from bench.lab.command import main
from bench.lab.options import FixedLength, RecordingBudget
from bench.lab.replay import Replay, ReplayScheduling, Times
from speq.config import DEFAULT_READER_THREADS
from speq.errors import OptionError
from speq.experts.expert_store import mean_moved_bytes
from speq.experts.int4 import Int4Layout
from speq.measure.link import long_link_bytes_per_s
from speq.measure.picture import MOVED, Axis, Picture, percent
from speq.measure.report import Column, Report, read_prompts
from speq.measure.route_trace import RouteTrace, record
from speq.measure.routes import accepted_routes, expert_counts
from speq.measure.settings import MaxNewTokens, NumPrompts, Prompts
from speq.models.opened import open_model
from speq.options.declared import Option, Options
from speq.options.kinds import File, Size, Text
from speq.stats import RunStats
from speq.units import Progress, format_bytes, track


@dataclass(frozen=True, slots=True)
class HitRateSettings(Options):
    """beside, beside_budget: another model, whose times are taken for the same routes as well."""

    memory_budget: RecordingBudget
    draft_length: FixedLength = 8
    prompts: Prompts = None
    num_prompts: NumPrompts = 12
    max_new_tokens: MaxNewTokens = 128
    beside: Annotated[
        str | None,
        Option("A model whose times the routes are replayed with as well.", Text("a model")),
    ] = None
    beside_budget: Annotated[
        str | None, Option("Room for all of its experts.", Size(kept=True))
    ] = None
    routes: Annotated[Path | None, Option("Keep the recorded routes here.", File())] = None
    counts: Annotated[
        Path | None,
        Option("Keep here how often each expert was chosen, for static rankings.", File()),
    ] = None


# Of 64 experts a layer, so many slots: the paper's low, medium and high capacities.
CAPACITIES = (6, 16, 32)
PAPER_EXPERTS = 64
# Name in the table: eviction, prefetching, whether the slots that a draft takes are added.
SYSTEMS = {
    "lru": ("lru", "none", False),
    "lru-scaled": ("lru", "none", True),
    "single-sooner": ("lookahead", "single-sooner", False),
    "single-later": ("lookahead", "single-later", False),
    "speculative": ("lookahead", "three-phase", False),
}
# Of the recorded steps, one in so many only fills the slots.
WARM_UP = 10

# Options that name files it writes beside its JSON.
WRITTEN = ("routes", "counts")
COLUMNS: dict[str, Column] = {
    "slots/layer": ("slots", "{}"),
    "policy": ("policy", "{}"),
    "at start": ("coverage_at_start", "{:.2%}"),
    "in time": ("coverage_in_time", "{:.2%}"),
    "in time, beside": ("coverage_in_time_beside", "{:.2%}"),
    "per request": ("request_hit_rate", "{:.2%}"),
    "moved/token": ("moved_bytes_per_token", format_bytes),
}
SLOTS, POLICY = (Axis("slots", "slots of a layer"),), (Axis("policy", "policy"),)
IN_TIME = percent("coverage_in_time", "experts that were there in time")
PICTURES = (
    Picture(
        *("in-time", "Experts that were there in time", SLOTS, (IN_TIME,), POLICY),
        aid="Higher is better: bars of one colour are a policy, with more slots to the right.",
    ),
    Picture("moved", "Bytes moved per token", SLOTS, (MOVED,), POLICY, aid="Lower is less."),
)


def run(model: str, settings: HitRateSettings, progress: Progress | None = None) -> Report:
    """Record and replay. Raises SpeqError for nonsense settings."""
    if (settings.beside is None) != (settings.beside_budget is None):
        raise OptionError("beside and beside_budget are given together or not at all")
    trace, times = record_routes(
        model, settings.memory_budget, settings, settings.num_prompts, progress
    )
    if settings.routes is not None:
        trace.write(settings.routes)
    if settings.counts is not None:
        expert_counts(model, accepted_routes(trace), trace.num_experts).write(settings.counts)
    beside = None
    if settings.beside is not None and settings.beside_budget is not None:
        beside = record_routes(settings.beside, settings.beside_budget, settings, 1, progress)[1]
    of_draft = draft_slots(model)
    cells = [(policy, slots) for slots in capacities(trace) for policy in SYSTEMS]
    rows = [
        row(trace, times, beside, policy, slots, of_draft)
        for policy, slots in track("replaying routes", cells, len(cells), progress)
    ]
    given = settings.as_json() | {
        "times": asdict(times),
        "times_beside": beside and asdict(beside),
        "tokens": sum(step.emitted for step in trace.steps),
    }
    return Report("hit-rate", model, given, rows)


def capacities(trace: RouteTrace) -> list[int]:
    """Slots a layer, never fewer than one token needs."""
    scaled = (slots * trace.num_experts // PAPER_EXPERTS for slots in CAPACITIES)
    return sorted({max(slots, trace.top_k) for slots in scaled})


def draft_slots(model: str) -> float:
    """Slots a layer that the memory of an INT4 draft would hold."""
    opened = open_model(model)
    try:
        store, experts = opened.store, opened.shape.experts
        draft_bytes = Int4Layout(experts.hidden_size, experts.expert_width).nbytes
        return store.num_experts * draft_bytes / store.codec.slot_bytes
    finally:
        opened.close()


def record_routes(
    model: str, budget: str, settings: HitRateSettings, num_prompts: int, progress: Progress | None
) -> tuple[RouteTrace, Times]:
    """Routes of a generation with all experts in memory, and what it took."""
    prompts = read_prompts(settings.prompts, num_prompts)
    trace, run = record(
        model, budget, settings.draft_length, prompts, settings.max_new_tokens, progress
    )
    return trace, measure_times(run, trace, *link_of(model))


def link_of(model: str) -> tuple[float, int]:
    """(seconds the link takes for an expert, its bytes)."""
    opened = open_model(model)
    try:
        moved_bytes = round(mean_moved_bytes(opened.store))
        return moved_bytes / long_link_bytes_per_s(
            opened.store, DEFAULT_READER_THREADS
        ), moved_bytes
    finally:
        opened.close()


def measure_times(run: RunStats, trace: RouteTrace, transfer_s: float, moved_bytes: int) -> Times:
    """Times of the recorded run, layer by layer, its few transfers left out."""
    steps = run.steps
    layers = trace.num_layers
    drafted = sum(step.draft_length for step in steps)
    draft_s = sum(step.draft_s for step in steps)
    requests = sum(step.requests for step in steps)
    stall_s = sum(step.stall_s for step in steps)
    experts_s = sum(e.duration_s for step in steps for e in step.events if e.kind == "layer")
    verify_s = sum(step.verify_s for step in steps)
    return Times(
        draft_layer_s=draft_s / (drafted * layers) if drafted else 0.0,
        layer_s=(verify_s - experts_s) / (len(steps) * layers),
        expert_s=(experts_s - stall_s) / requests,
        transfer_s=transfer_s,
        begun=DEFAULT_READER_THREADS,
        moved_bytes=moved_bytes,
    )


@single_shot.offer_single_shots()
def row(
    trace: RouteTrace,
    times: Times,
    beside: Times | None,
    policy: str,
    slots: int,
    draft_slots: float,
) -> dict[str, Any]:
    """Figures of one system with so many slots a layer."""
    eviction, prefetch, scaled = SYSTEMS[policy]
    routes = trace if prefetch != "none" else trace.plain()
    of_layer = slots + draft_slots if scaled else slots
    total = min(int(of_layer * trace.num_layers), trace.num_layers * trace.num_experts)
    scheduling = ReplayScheduling(total, eviction, prefetch)
    warm_up = len(routes.steps) // WARM_UP
    found = Replay(routes, times, scheduling).run(warm_up)
    stats = found.stats.summary()
    other = None if beside is None else Replay(routes, beside, scheduling).run(warm_up)
    return {
        "policy": policy,
        "slots": slots,
        "total_slots": total,
        "draft_length": routes.draft_length,
        "coverage_at_start": found.ready / found.needs,
        "coverage_in_time": stats["hit_rate"],
        "coverage_in_time_beside": None if other is None else other.stats.summary()["hit_rate"],
        "request_hit_rate": found.served / found.choices,
        "moved_bytes": stats["moved_bytes"],
        "moved_bytes_per_token": stats["moved_bytes_per_token"],
        "wasted": stats["wasted"],
    }


if __name__ == "__main__":
    main("hit_rate")
