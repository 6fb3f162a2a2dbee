"""The Amortization-Roofline (MoE-SpeQ, Figure 8) with the points of a run."""

from dataclasses import dataclass

from speq.dashboard.figures import SYMBOLS, Trace, layout, line, points
from speq.dashboard.panel import Cell, Panel, Table
from speq.dashboard.run_record import RunRecord

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Point:
    """intensity in tokens per MiB moved; tokens_per_s; roof: tokens per second of computing alone,
    without any wait; None: not known. steps: how many the point sums up; 0: an expectation.
    """

    draft_length: int
    intensity: float
    tokens_per_s: float
    roof: float | None
    steps: int


def measured(run: RunRecord) -> list[Point]:
    """Of each draft length that the run used and moved anything with."""
    found = []
    decode = [step for step in run.steps if step.phase == "decode"]
    for length in sorted({int(step.figures["draft_length"]) for step in decode}):
        of_length = [step for step in decode if step.figures["draft_length"] == length]
        tokens = sum(step.figures["emitted"] for step in of_length)
        moved = sum(step.figures["moved_bytes"] for step in of_length)
        time_ms = sum(step.end_ms - step.start_ms for step in of_length)
        computed_ms = time_ms - sum(step.figures["stall_ms"] for step in of_length)
        if moved and time_ms:
            roof = tokens / computed_ms * 1e3 if computed_ms > 0 else None
            point = Point(
                length, tokens / moved * MIB, tokens / time_ms * 1e3, roof, len(of_length)
            )
            found.append(point)
    return found


def expected(run: RunRecord) -> list[Point]:
    """Of each draft length that the governor weighed last."""
    return [
        Point(
            int(cycle["draft_length"]),
            cycle["tokens"] / cycle["moved_bytes"] * MIB,
            cycle["tokens"] / cycle["cycle_s"],
            cycle["tokens"] / cycle["compute_s"] if cycle["compute_s"] > 0 else None,
            0,
        )
        for cycle in run.cycles
        if cycle["moved_bytes"] > 0 and cycle["cycle_s"] > 0
    ]


def bandwidth_of(run: RunRecord) -> float:
    """MiB per second of the link while it was busy behind the prompt; 0 where it never was."""
    decode = [step for step in run.steps if step.phase == "decode"]
    link_ms = sum(step.figures["link_ms"] for step in decode)
    moved = sum(step.figures["moved_bytes"] for step in decode)
    return moved / MIB / link_ms * 1e3 if link_ms else 0.0


def panel(run: RunRecord) -> Panel:
    title = "Amortization-Roofline"
    aid = (
        "A point is a draft length k: the more tokens it yields for each MiB moved, the farther "
        "right it lies; it cannot lie above the slanted line, which the link sets, nor above the "
        "level one of its k, which computing sets."
    )
    ran, hoped, bandwidth = measured(run), expected(run), bandwidth_of(run)
    data: list[Trace] = []
    if ran and bandwidth:
        ends = [each.intensity for each in ran + hoped]
        roofs = [each.roof for each in ran + hoped if each.roof is not None]
        low, high = min(ends) / 2, max(*ends, *(roof / bandwidth for roof in roofs)) * 2
        data.append(
            line(
                f"roof of the link: {bandwidth:,.0f} MiB/s over {run.link}",
                [low, high],
                [low * bandwidth, high * bandwidth],
                "transfer",
                "dash",
                None,
            )
        )
        for at, each in enumerate(ran):
            if each.roof is not None:
                data.append(
                    line(
                        f"roof of computing, k={each.draft_length}",
                        [low, high],
                        [each.roof, each.roof],
                        "verify",
                        ("dot", "dashdot", "longdash", "longdashdot")[at % 4],
                        None,
                    )
                )
        if hoped:
            data.append(
                points(
                    "expected by the governor",
                    [each.intensity for each in hoped],
                    [each.tokens_per_s for each in hoped],
                    "expected",
                    "circle-open",
                    mode="markers+text",
                    text=[f"k={each.draft_length}" for each in hoped],
                    textposition="bottom center",
                )
            )
        for at, each in enumerate(ran):
            data.append(
                points(
                    f"measured, k={each.draft_length} ({each.steps} steps)",
                    [each.intensity],
                    [each.tokens_per_s],
                    str(at % 8 + 1),
                    SYMBOLS[at % len(SYMBOLS)],
                    mode="markers+text",
                    text=[f"k={each.draft_length}"],
                    textposition="top center",
                )
            )
    rows: list[list[Cell]] = [
        [
            "expected" if not each.steps else "measured",
            each.draft_length,
            each.steps or None,
            each.intensity,
            each.tokens_per_s,
            each.roof,
            each.intensity * bandwidth if bandwidth else None,
        ]
        for each in ran + hoped
    ]
    return Panel(
        "roofline",
        title,
        aid,
        data,
        layout(
            "tokens per MiB moved (amortization intensity)",
            "tokens per second",
            xaxis_type="log",
            yaxis_type="log",
        ),
        Table(
            (
                *("point", "draft length k", "steps", "tokens per MiB", "tokens/s"),
                *("roof of computing (tokens/s)", "roof of the link (tokens/s)"),
            ),
            rows,
        ),
        absent=""
        if data
        else "The run moved no expert behind its prompt: the link sets no roof, and computing "
        "alone decides.",
        height_px=460,
    )
