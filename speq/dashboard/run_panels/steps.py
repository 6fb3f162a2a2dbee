"""Time of each step by activity, and of its link."""

from dataclasses import dataclass

from speq.dashboard.figures import bars, layout, mirrored_ticks
from speq.dashboard.panel import Panel, Table
from speq.dashboard.run_panels.link import act_of
from speq.dashboard.run_record import RunRecord, StepRecord


@dataclass(frozen=True, slots=True)
class Parts:
    """A step's milliseconds: of the computation, which add up to the step, and of the link.

    draft, verify  without stalls of the verification, and without host; prefill has neither
    host           on the host, of a verification on a GPU
    prompt         prefill, without stalls
    """

    draft: float
    verify: float
    host: float
    prompt: float
    stall: float
    rest: float
    hidden: float
    exposed: float


def parts_of(step: StepRecord) -> Parts:
    """Divide a step's time. Stalls occur in verification and in prefill."""
    figures, whole_ms = step.figures, step.end_ms - step.start_ms
    stall_ms = min(figures["stall_ms"], whole_ms)
    hidden_ms = max(figures["link_ms"] - figures["exposed_ms"], 0.0)
    if step.phase != "decode":
        return Parts(0, 0, 0, whole_ms - stall_ms, stall_ms, 0, hidden_ms, figures["exposed_ms"])
    # While the host computes, the device may wait for copies as well.
    host_ms = max(figures.get("host_ms", 0.0) - stall_ms, 0.0)
    verify_ms = max(figures["verify_ms"] - stall_ms - host_ms, 0.0)
    rest_ms = max(whole_ms - figures["draft_ms"] - verify_ms - stall_ms - host_ms, 0.0)
    return Parts(
        *(figures["draft_ms"], verify_ms, host_ms, 0, stall_ms, rest_ms),
        *(hidden_ms, figures["exposed_ms"]),
    )


def panel(run: RunRecord) -> Panel:
    decode = [step for step in run.steps if step.phase == "decode"]
    parts = [parts_of(step) for step in decode]
    numbers = [step.number for step in decode]
    above = {
        "drafting": ([each.draft for each in parts], "draft", "\\"),
        "verifying": ([each.verify for each in parts], "verify", ""),
        "experts on the host": ([each.host for each in parts], "host", "|"),
        "waiting for experts": ([each.stall for each in parts], "stall", "/"),
        "the rest": ([each.rest for each in parts], "rest", "+"),
    }
    below = {
        f"{act_of(run)}, hidden": ([-each.hidden for each in parts], "hidden", "."),
        f"{act_of(run)} while waiting": ([-each.exposed for each in parts], "transfer", "x"),
    }
    hover = "step %{x}: %{customdata:.2f} ms<extra>%{fullData.name}</extra>"
    if not any(each.host for each in parts):
        del above["experts on the host"]
    data = [
        bars(
            name,
            numbers,
            [round(value, 3) for value in values],
            colour,
            pattern,
            customdata=[abs(value) for value in values],
            hovertemplate=hover,
        )
        for name, (values, colour, pattern) in (above | below).items()
    ]
    places, texts = mirrored_ticks(
        max((each.hidden + each.exposed for each in parts), default=0.0),
        max((step.end_ms - step.start_ms for step in decode), default=0.0),
    )
    return Panel(
        "steps",
        "Time of each step",
        "A bar above the line is one step's time by activity; the bar below it is the time in "
        "which the link was busy.",
        data if decode else [],
        layout(
            "step",
            "ms: link below, step above",
            barmode="relative",
            bargap=0.15,
            yaxis_tickvals=places,
            yaxis_ticktext=texts,
        ),
        Table(
            (
                *("step", "drafted", "accepted", "emitted", "step (ms)", "drafting (ms)"),
                *("verifying (ms)", "waiting (ms)", "the rest (ms)"),
                *("link, hidden (ms)", "link, exposed (ms)", "transfers, summed (ms)"),
            ),
            [
                [
                    step.number,
                    step.figures["draft_length"],
                    step.figures["accepted"],
                    step.figures["emitted"],
                    round(step.end_ms - step.start_ms, 3),
                    each.draft,
                    round(each.verify, 3),
                    each.stall,
                    round(each.rest, 3),
                    round(each.hidden, 3),
                    each.exposed,
                    step.figures["transfer_ms"],
                ]
                for step, each in zip(decode, parts, strict=True)
            ],
        ),
        absent="" if decode else "The run has no decode step.",
        height_px=420,
    )
