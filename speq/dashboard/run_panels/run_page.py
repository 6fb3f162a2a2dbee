"""The page of a run: facts, panels in order, and notes."""

from speq.dashboard.panel import Page, Panel
from speq.dashboard.run_panels import (
    bytes_moved,
    drafts,
    expectations,
    layers,
    memory,
    overlap,
    residency,
    roofline,
    steps,
    throughput,
)
from speq.dashboard.run_record import RunRecord
from speq.measure.approximation import approximate
from speq.units import format_bytes

# A smaller share of the time is not worth a sentence.
LEAST_WAITED = 0.01


def panels_of(run: RunRecord) -> list[Panel]:
    """Make all panels of a run; one without data says why."""
    return [
        overlap.panel(run),
        steps.panel(run),
        throughput.panel(run),
        bytes_moved.panel(run),
        roofline.panel(run),
        drafts.lengths(run),
        drafts.positions(run),
        layers.shares(run),
        layers.misses(run),
        residency.panel(run),
        memory.panel(run),
        expectations.plan(run),
        expectations.forecasts(run),
    ]


def facts_of(run: RunRecord) -> list[tuple[str, str]]:
    """List the facts above the panels."""
    stats = run.stats
    found = [
        ("model", run.model),
        ("machine", f"{run.machine.get('processor')}, {run.machine.get('cores')} cores"),
        ("device", run.device),
        ("memory budget", format_bytes(run.memory["budget"])),
        ("experts", f"{run.experts} in each of {run.layers} layers, as {stats['codec']}"),
        ("prompt", f"{run.prompt_tokens} tokens"),
        ("generated", f"{stats['new_tokens']} tokens"),
        ("time per output token (TPOT)", format_figure(stats["tpot_ms"], "{:.1f} ms")),
        ("time to first token (TTFT)", format_figure(stats["ttft_ms"], "{:.0f} ms")),
        ("experts found in slots", format_figure(stats["hit_rate"], "{:.1%}")),
        ("loaded per token", amount(stats["moved_bytes_per_token"])),
        ("transfer time hidden", format_figure(stats["hidden_share"], "{:.1%}")),
        ("drafted tokens accepted", format_figure(stats["acceptance_rate"], "{:.1%}")),
        ("speq", run.version if run.commit is None else f"{run.version} at {run.commit}"),
    ]
    options = [f"{name}={value}" for name, value in run.options.items() if name != "memory_budget"]
    if options:
        found.append(("options", ", ".join(options)))
    if run.planned is not None:
        found.append(("planned", run.planned))
    return found


def page_of(run: RunRecord) -> Page:
    """Make the page of a run."""
    notes = ["Times were measured on the machine above, with all its other load."]
    if run.stats.get("budget") is not None:
        notes.insert(0, approximate(run.stats["budget"]) + ".")
    if run.left_out:
        notes.append(
            f"Panels by step show the last {len(run.steps)} steps and leave out the {run.left_out} "
            "before. The figures above cover all steps."
        )
    return Page(f"speq: {run.model}", facts_of(run), panels_of(run), notes, summary_of(run))


def summary_of(run: RunRecord) -> str:
    """How fast the run was, and how fast it would have been without waiting for experts."""
    stats = run.stats
    tpot_ms, tokens = stats["tpot_ms"], stats["new_tokens"]
    if not tpot_ms or tokens < 2:
        return ""
    whole_ms = tpot_ms * (tokens - 1)
    waited = stats["stall_s"] * 1e3 / whole_ms
    speed = f"{1e3 / tpot_ms:.3g} tokens per second after the first."
    if not LEAST_WAITED < waited < 1 - LEAST_WAITED:
        much = "Nearly none" if waited < LEAST_WAITED else "Nearly all"
        return f"{speed} {much} of that time was spent waiting for experts."
    return (
        f"{speed} {waited:.0%} of that time was spent waiting for experts from the {run.link}; "
        f"without that it would have been {1e3 / tpot_ms / (1 - waited):.3g}."
    )


def format_figure(value: float | None, form: str) -> str:
    return "none" if value is None else form.format(value)


def amount(size: float | None) -> str:
    return "none" if size is None else format_bytes(int(size))
