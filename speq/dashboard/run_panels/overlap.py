"""Transfer against compute over time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speq.dashboard.figures import layout
from speq.dashboard.panel import Cell, Panel, Table
from speq.dashboard.run_panels.link import act_of
from speq.dashboard.run_record import RunRecord
from speq.stats import Interval, merge, overlap

BINS = 240
Shares = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Shares of the time of each bin, from 0 to 1.

    edges_ms  of the bins: one more than there are bins
    compute   a step was under way and did not wait
    transfer  the link was busy; exposed: it was busy while the computation waited
    waited    the computation waited
    """

    edges_ms: Shares
    compute: Shares
    transfer: Shares
    exposed: Shares
    waited: Shares

    @property
    def hidden(self) -> Shares:
        return self.transfer - self.exposed


def overlap_of(run: RunRecord, bins: int = BINS) -> Overlap:
    """Compute the shares over the steps that are kept, in bins of equal length."""
    edges_ms = np.linspace(run.steps[0].start_ms, run.steps[-1].end_ms, bins + 1)
    transfers = merge((span[0], span[1]) for step in run.steps for span in step.transfers)
    stalls = merge((start_ms, end_ms) for step in run.steps for start_ms, end_ms in step.stalls)
    steps = merge((step.start_ms, step.end_ms) for step in run.steps)
    waited = busy(stalls, edges_ms)
    return Overlap(
        edges_ms,
        busy(steps, edges_ms) - waited,
        busy(transfers, edges_ms),
        busy(overlap(transfers, stalls), edges_ms),
        waited,
    )


def busy(spans: Sequence[Interval], edges_ms: Shares) -> Shares:
    """Return the share of each bin that lies within separate intervals."""
    if not spans:
        return np.zeros(len(edges_ms) - 1)
    ends = np.array(spans).reshape(-1)
    # Time within intervals up to each of their ends: it grows within them and not between.
    lengths = np.diff(ends, prepend=ends[0])
    lengths[::2] = 0.0
    within = np.interp(edges_ms, ends, np.cumsum(lengths))
    return np.diff(within) / np.diff(edges_ms)


def panel(run: RunRecord) -> Panel:
    title = "Transfer against compute"
    aid = (
        "Above the line is the share of time in which the processor computed, below it the share "
        "in which the link moved experts. Dotted parts were hidden behind computation; hatched "
        "parts made it wait."
    )
    found = overlap_of(run)
    middles = (found.edges_ms[:-1] + found.edges_ms[1:]) / 2e3
    widths = np.diff(found.edges_ms) / 1e3
    series = {
        "computing": (found.compute, "verify", ""),
        f"{act_of(run)}, hidden": (-found.hidden, "hidden", "."),
        f"{act_of(run)} while waiting": (-found.exposed, "stall", "/"),
    }
    data = [
        {
            "type": "bar",
            "name": name,
            "x": middles.round(4).tolist(),
            "width": widths.round(4).tolist(),
            "y": shares.round(4).tolist(),
            "marker": {
                "color": f"@{colour}",
                "line": {"width": 0},
                "pattern": {
                    "shape": pattern,
                    "fgcolor": "@text",
                    "fillmode": "overlay",
                    "size": 5,
                },
            },
            "hovertemplate": "%{x:.2f} s: %{y:.0%}<extra>%{fullData.name}</extra>",
        }
        for name, (shares, colour, pattern) in series.items()
    ]
    ticks = [-1, -0.5, 0, 0.5, 1]
    rows: list[list[Cell]] = [
        [*(round(float(value), 4) for value in values)]
        for values in zip(
            found.edges_ms[:-1] / 1e3,
            found.edges_ms[1:] / 1e3,
            found.compute,
            found.hidden,
            found.exposed,
            found.waited,
            strict=True,
        )
    ]
    return Panel(
        "overlap",
        title,
        aid,
        data,
        layout(
            "time since the request (s)",
            f"share of time: link below, compute above ({run.link})",
            barmode="relative",
            bargap=0,
            yaxis_range=[-1.02, 1.02],
            yaxis_tickvals=ticks,
            yaxis_ticktext=[f"{abs(at):.0%}" for at in ticks],
            yaxis_zeroline=True,
        ),
        Table(
            ("from (s)", "to (s)", "computing", "hidden", "exposed", "waiting"),
            rows,
        ),
        height_px=420,
    )
