"""The Amortization-Roofline (MoE-SpeQ, Figure 8) with the points of a run."""

from dataclasses import dataclass

from speq.dashboard.figures import SYMBOLS, Trace, layout, line, points
from speq.dashboard.panel import Cell, Panel, Table
from speq.dashboard.run_record import RunRecord

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Point:
    """A draft length on the roofline.

    intensity  tokens per MiB moved
    roof       tokens per second of computing alone, without waits; None: unknown
    steps      number of steps that the point sums up; 0: an estimate
    """

    draft_length: int
    intensity: float
    tokens_per_s: float
    roof: float | None
    steps: int


def measured_points(run: RunRecord) -> list[Point]:
    """Make a point for each draft length with which the run moved experts."""
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


def expected_points(run: RunRecord) -> list[Point]:
    """Make a point for each draft length of the governor's last estimates."""
    return [
        Point(
            int(step["draft_length"]),
            step["tokens"] / step["moved_bytes"] * MIB,
            step["tokens"] / step["step_s"],
            step["tokens"] / step["compute_s"] if step["compute_s"] > 0 else None,
            0,
        )
        for step in run.estimates
        if step["moved_bytes"] > 0 and step["step_s"] > 0
    ]


def bandwidth_of(run: RunRecord) -> float:
    """MiB per second of the link while it was busy in decode; 0 if it never was."""
    decode = [step for step in run.steps if step.phase == "decode"]
    link_ms = sum(step.figures["link_ms"] for step in decode)
    moved = sum(step.figures["moved_bytes"] for step in decode)
    return moved / MIB / link_ms * 1e3 if link_ms else 0.0


def panel(run: RunRecord) -> Panel:
    title = "Amortization-Roofline"
    aid = (
        "A point is a draft length k: the more tokens it yields for each MiB moved, the farther "
        "right it is. It cannot be above the slanted line, which the link sets, nor above the "
        "horizontal one of its k, which computing sets."
    )
    measured, expected = measured_points(run), expected_points(run)
    bandwidth = bandwidth_of(run)
    data: list[Trace] = []
    if measured and bandwidth:
        ends = [each.intensity for each in measured + expected]
        roofs = [each.roof for each in measured + expected if each.roof is not None]
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
        for at, each in enumerate(measured):
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
        if expected:
            data.append(
                points(
                    "expected by the governor",
                    [each.intensity for each in expected],
                    [each.tokens_per_s for each in expected],
                    "expected",
                    "circle-open",
                    mode="markers+text",
                    text=[f"k={each.draft_length}" for each in expected],
                    textposition="bottom center",
                )
            )
        for at, each in enumerate(measured):
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
        for each in measured + expected
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
        absent="" if data else "The run moved no expert in decode, so only computing limits it.",
        height_px=460,
    )
