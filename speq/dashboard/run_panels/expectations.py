"""Estimates of planner and governor, compared with the run."""

from speq.dashboard.figures import bars, layout, points
from speq.dashboard.panel import Panel, Table
from speq.dashboard.run_record import RunRecord
from speq.stats import ratio

MIB = 1 << 20


def plan(run: RunRecord) -> Panel:
    title = "Plan and run"
    aid = (
        "A bar shows a figure of the run as a share of the planner's estimate: at 100% the "
        "estimate was right, and above it the run took more."
    )
    table = Table(("figure", "expected", "happened", "of expected"), [])
    axes = layout("", "happened, of expected", yaxis_tickformat=".0%", yaxis_rangemode="tozero")
    axes["xaxis"]["title"]["text"] = "figure"
    if run.expected is None:
        absent = "There was nothing to plan: the options left one candidate."
        return Panel("plan", title, aid, [], axes, table, absent)
    stats, estimate = run.stats, run.expected
    pairs = {
        "ms per token": (estimate["tpot_ms"], stats["tpot_ms"]),
        "MiB moved per token": (
            estimate["moved_bytes_per_token"] / MIB,
            None
            if stats["moved_bytes_per_token"] is None
            else stats["moved_bytes_per_token"] / MIB,
        ),
        "tokens of a step": (estimate["tokens"], stats["accept_length_mean"]),
        "drafted tokens of a step": (estimate["draft_length"], stats["draft_length_mean"]),
    }
    for name, (expected, happened) in pairs.items():
        share = None if happened is None else ratio(happened, expected)
        table.rows.append([name, expected, happened, share])
    names = [str(row[0]) for row in table.rows if row[3] is not None]
    shares = [float(str(row[3])) for row in table.rows if row[3] is not None]
    data = [bars("happened, of expected", names, shares, "expected", "", showlegend=False)]
    axes["shapes"] = [
        {
            "type": "line",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": 1,
            "y1": 1,
            "line": {"color": "@text", "dash": "dash", "width": 1},
        }
    ]
    absent = "" if names else "The run ended after prefill."
    return Panel("plan", title, aid, data if names else [], axes, table, absent, height_px=320)


def forecasts(run: RunRecord) -> Panel:
    found = [
        (step, step.forecast)
        for step in run.steps
        if step.forecast is not None
        and step.forecast["draft_length"] == step.figures["draft_length"]
    ]
    times = [round(step.end_ms - step.start_ms, 3) for step, _ in found]
    expected = [forecast["step_ms"] for _, forecast in found]
    top = max([*times, *expected], default=1.0) * 1.05
    data = [
        points(
            "a step",
            expected,
            times,
            "verify",
            "circle-open",
            text=[f"step {step.number}, k={step.figures['draft_length']:.0f}" for step, _ in found],
            hovertemplate="%{text}<br>expected %{x:.1f} ms, took %{y:.1f} ms<extra></extra>",
        ),
        {
            "type": "scatter",
            "name": "as expected",
            "x": [0, top],
            "y": [0, top],
            "mode": "lines",
            "line": {"color": "@text", "dash": "dash", "width": 1},
            "hoverinfo": "skip",
        },
    ]
    return Panel(
        "forecasts",
        "The governor's forecasts",
        "A circle is a step: on the dashed line it took as long as the governor expected, above "
        "the line longer.",
        data if found else [],
        layout("expected (ms)", "took (ms)", xaxis_rangemode="tozero", yaxis_rangemode="tozero"),
        Table(
            (
                "step",
                "draft length",
                "expected (ms)",
                "by Eq. 3 (ms)",
                "all hidden (ms)",
                "took (ms)",
            ),
            [
                [
                    step.number,
                    forecast["draft_length"],
                    forecast["step_ms"],
                    forecast["serial_ms"],
                    forecast["overlapped_ms"],
                    time_ms,
                ]
                for (step, forecast), time_ms in zip(found, times, strict=True)
            ],
        ),
        absent=""
        if found
        else "The governor gave no forecasts: the draft length was fixed, or the run was short.",
    )
