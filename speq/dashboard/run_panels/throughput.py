"""Throughput of the link over time."""

import numpy as np
from numpy.typing import NDArray

from speq.dashboard.figures import Trace, layout, line
from speq.dashboard.panel import Panel, Table
from speq.dashboard.run_panels.link import NAMES
from speq.dashboard.run_record import RunRecord

BINS = 120
MIB = 1 << 20


def rates_of(run: RunRecord, bins: int = BINS) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the bins' edges in ms and the bytes per second in each bin.

    The bytes of a transfer count evenly over its time.
    """
    edges_ms = np.linspace(run.steps[0].start_ms, run.steps[-1].end_ms, bins + 1)
    moved = np.zeros(bins)
    for step in run.steps:
        for start_ms, end_ms, moved_bytes in step.transfers:
            shares = np.clip(edges_ms, start_ms, max(end_ms, start_ms + 1e-6))
            moved += np.diff(shares) / max(end_ms - start_ms, 1e-6) * moved_bytes
    return edges_ms, moved / np.diff(edges_ms) * 1e3


def panel(run: RunRecord) -> Panel:
    edges_ms, rates = rates_of(run)
    times = ((edges_ms[:-1] + edges_ms[1:]) / 2e3).round(4).tolist()
    found = (rates / MIB).round(3).tolist()
    data: list[Trace] = [
        line(f"experts over {NAMES[run.link]}", times, found, "transfer", symbol=None)
        | {"line": {"color": "@transfer", "shape": "hvh", "width": 1.5}, "fill": "tozeroy"}
    ]
    busy_s = sum(end - start for step in run.steps for start, end, _ in step.transfers) / 1e3
    moved_bytes = sum(bytes_ for step in run.steps for *_, bytes_ in step.transfers)
    if busy_s:
        mean = moved_bytes / busy_s / MIB
        ends = [times[0], times[-1]]
        data.append(line("mean while busy", ends, [mean, mean], "expected", "dash", None))
    if run.card:
        read = [each["time_ms"] / 1e3 for each in run.card]
        received = [each["received_bytes_per_s"] / MIB for each in run.card]
        data.append(line("PCIe as the driver counts it", read, received, "4", "dot", "diamond"))
    return Panel(
        "throughput",
        f"Throughput of {NAMES[run.link]}",
        "The line shows the rate of the link in each interval; where it is below the dashed line, "
        "the link was idle for a part of the interval.",
        data if busy_s else [],
        layout(
            "time since the request (s)", f"MiB per second, {run.link}", yaxis_rangemode="tozero"
        ),
        Table(
            ("from (s)", "to (s)", "MiB/s"),
            [
                [round(float(left) / 1e3, 4), round(float(right) / 1e3, 4), rate]
                for left, right, rate in zip(edges_ms[:-1], edges_ms[1:], found, strict=True)
            ],
        ),
        absent="" if busy_s else "No expert was moved in these steps.",
    )
