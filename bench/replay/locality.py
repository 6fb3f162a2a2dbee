"""The planner's curve of distinct experts, from recorded routes, beside what policies really miss.

Texts' accepted tokens are decoded anew in windows, through the real scheduler: windows of one as
without a draft, longer ones as if every draft stood. `by_curve` is what `speq plan` counts with.
"""

from itertools import product
from pathlib import Path
from typing import Any

from speq.bench.replay.replay import Replay, Scheduling, Times
from speq.bench.settings import LocalitySettings as Settings
from speq.errors import checked_int
from speq.files.atomic_file import check_target
from speq.measure.report import Column, Report
from speq.measure.route_trace import RouteTrace, TraceStep
from speq.measure.routes import curve_of
from speq.planning.cost.locality import Locality
from speq.units import Progress, tracked

# Eviction and prefetching.
POLICIES = {"lru": ("lru", "none"), "lookahead": ("lookahead", "none")}
# Misses are counted, not timed: any times do, of a link that carries an expert at a time.
TIMES = Times(1e-3, 1e-3, 0.0, 1e-3, begun=2, moved_bytes=1)
# Of the windows, one in so many only fills the slots.
WARM_UP = 8

COLUMNS: dict[str, Column] = {
    "tokens": ("tokens", "{}"),
    "distinct": ("distinct", "{:.2f}"),
    "slots": ("slots", "{}"),
    "lru": ("lru", "{:.2f}"),
    "lookahead": ("lookahead", "{:.2f}"),
    "by the curve": ("by_curve", "{:.2f}"),
    "independent": ("independent", "{:.2f}"),
}


def run(
    trace_file: Path,
    settings: Settings,
    json_file: Path | None,
    force: bool,
    progress: Progress | None = None,
) -> Report:
    """Misses of a layer and pass. Raises SpeqError for nonsense settings."""
    check_target(json_file, force)
    trace = RouteTrace.read(trace_file)
    curve = curve_of(trace)
    tokens = len(trace.plain().steps)
    for window in settings.windows:
        checked_int("windows", window, 1, tokens // 2)
    for slots in settings.slots:
        checked_int("slots", slots, trace.top_k, trace.num_experts)
    measured = Locality(trace.num_experts, trace.top_k, curve)
    independent = Locality(trace.num_experts, trace.top_k, None)
    cells = list(product(settings.windows, settings.slots))
    rows = [
        {
            "tokens": window,
            "distinct": measured.distinct(window),
            "slots": slots,
            **{name: replayed(trace, window, slots, *POLICIES[name]) for name in POLICIES},
            "by_curve": measured.misses(slots, window),
            "independent": independent.misses(slots, window),
        }
        for window, slots in tracked("replaying routes", cells, len(cells), progress)
    ]
    given: dict[str, Any] = {"trace": str(trace_file), "tokens": tokens, "curve": curve.points}
    report = Report("locality", trace.model, given, rows)
    if json_file is not None:
        report.write(json_file)
    return report


def notes(report: Report) -> list[str]:
    """What readers of the table need to know besides."""
    curve = report.settings["curve"]
    points = ", ".join(f"({tokens:.0f}, {distinct:.2f})" for tokens, distinct in curve)
    return [
        f"of {report.settings['tokens']} tokens; misses of a layer and pass",
        f"distinct experts by tokens: {points}",
    ]


def replayed(trace: RouteTrace, window: int, slots: int, policy: str, prefetch: str) -> float:
    """Experts of a layer that a pass over `window` tokens moved."""
    routes = in_windows(trace, window)
    scheduling = Scheduling(slots * trace.num_layers, policy, prefetch)
    run = Replay(routes, TIMES, scheduling).run(len(routes.steps) // WARM_UP)
    moved = sum(step.moved for step in run.stats.steps)
    return moved / (len(run.stats.steps) * trace.num_layers)


def in_windows(trace: RouteTrace, window: int) -> RouteTrace:
    """The accepted tokens in rounds of `window`, as a draft that foretells all would have them."""
    plain = trace.plain().steps
    even = [1 / trace.top_k] * trace.top_k
    rounds = []
    for at in range(0, len(plain) - window + 1, window):
        steps = plain[at : at + window]
        layers = range(trace.num_layers)
        used = [[step.used[layer][0] for step in steps] for layer in layers]
        # A draft runs every token but the last that it names.
        drafted = [[(used[layer][token], even) for layer in layers] for token in range(window - 1)]
        guessed = [[node for step in steps for node in step.guessed[layer]] for layer in layers]
        weights = [[step.weights[layer][0] for step in steps] for layer in layers]
        path = list(range(window))
        leads: list[float | None] = [None] * (window - 1)
        rounds.append(TraceStep(drafted, used, guessed, path, weights, leads))
    return RouteTrace(
        trace.model, window - 1, trace.num_layers, trace.num_experts, trace.top_k, rounds
    )
