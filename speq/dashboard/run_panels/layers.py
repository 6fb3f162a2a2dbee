"""Hits, late and wasted prefetches, by layer."""

from speq.dashboard.figures import heat, layout
from speq.dashboard.panel import Cell, Panel, Table
from speq.dashboard.run_record import RunRecord

# Places in `StepRecord.layers`.
REQUESTS, HITS, LATE, USED, WASTED, STALL_MS = range(6)
KINDS = ("in a slot", "being loaded", "missing", "prefetched, used", "prefetched, wasted")
# Most layers for which cells have numbers.
LEGIBLE = 32


def sums_of(run: RunRecord) -> list[list[float]]:
    """Sum `StepRecord.layers` by layer over all decode steps that are kept."""
    decode = [step for step in run.steps if step.phase == "decode"]
    return [
        [sum(step.layers[layer][at] for step in decode) for at in range(STALL_MS + 1)]
        for layer in range(run.layers)
    ]


def shares(run: RunRecord) -> Panel:
    sums = sums_of(run)
    asked = sum(each[REQUESTS] for each in sums)

    def parts(each: list[float]) -> list[float]:
        missing = each[REQUESTS] - each[HITS] - each[LATE]
        whole = each[REQUESTS] or 1
        return [
            round(part / whole, 5)
            for part in (each[HITS], each[LATE], missing, each[USED], each[WASTED])
        ]

    cells = [parts(each) for each in sums]
    rows: list[list[Cell]] = [
        [layer, *each[:STALL_MS], round(each[STALL_MS], 3)] for layer, each in enumerate(sums)
    ]
    written = {"texttemplate": "%{z:.0%}"} if run.layers <= LEGIBLE else {}
    return Panel(
        "layers",
        "Requests of each layer",
        "Each row is a layer, and each cell a share of the experts that it requested; the first "
        "three add up to all.",
        [heat(KINDS, list(range(run.layers)), cells, "share of requests", ".0%", zmin=0, **written)]
        if asked
        else [],
        layout(
            "result of requests",
            "MoE layer",
            yaxis_autorange="reversed",
            yaxis_dtick=tick(run.layers),
        ),
        Table(
            (
                *("layer", "requested", "in a slot", "being loaded", "prefetched, used"),
                *("prefetched, wasted", "waiting (ms)"),
            ),
            rows,
        ),
        absent="" if asked else "No layer requested experts in decode.",
        height_px=max(300, 120 + 14 * run.layers),
    )


def misses(run: RunRecord) -> Panel:
    decode = [step for step in run.steps if step.phase == "decode"]
    numbers = [step.number for step in decode]
    cells = [
        [step.layers[layer][REQUESTS] - step.layers[layer][HITS] for step in decode]
        for layer in range(run.layers)
    ]
    any_missed = any(map(any, cells))
    return Panel(
        "misses",
        "Experts that were not loaded in time",
        "Each row is a layer and each column a step; the brighter a cell, the more experts the "
        "layer had to wait for.",
        [heat(numbers, list(range(run.layers)), cells, "experts", "d", zmin=0)]
        if any_missed
        else [],
        layout("step", "MoE layer", yaxis_autorange="reversed", yaxis_dtick=tick(run.layers)),
        Table(
            ("step", *(f"layer {layer}" for layer in range(run.layers))),
            [
                [step.number, *(cells[layer][at] for layer in range(run.layers))]
                for at, step in enumerate(decode)
            ],
        ),
        absent="" if any_missed else "Every requested expert was in a slot.",
        height_px=max(300, 120 + 10 * run.layers),
    )


def tick(layers: int) -> int:
    """Return the interval between numbers on an axis of layers."""
    return max(1, layers // 12)
