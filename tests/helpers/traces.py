"""Traces of routes written by hand, and what must hold of the figures of any step."""

import pytest

from speq.measure.route_trace import Choice, RouteTrace, TraceStep
from speq.stats import StepStats


def drafted(*tokens: list[list[int]]) -> list[list[Choice]]:
    """What the draft's tokens chose, layer by layer, all with the same weight."""
    return [[(ids, [1.0] * len(ids)) for ids in token] for token in tokens]


def step(
    used: list[list[list[int]]], path: list[int], draft: list[list[Choice]] | None = None
) -> TraceStep:
    """What each layer used, token by token; what was accepted of it; and what the draft chose."""
    return traced(draft or [], used, [[] for _ in used], path)


def traced(
    draft: list[list[Choice]],
    used: list[list[list[int]]],
    guessed: list[list[Choice]],
    path: list[int],
) -> TraceStep:
    """The exact experts all with the same weight, and nothing known of the draft's leads."""
    weights = [[[1.0] * len(ids) for ids in layer] for layer in used]
    return TraceStep(draft, used, guessed, path, weights, [None] * len(draft))


def trace_of(*steps: TraceStep, experts: int = 4, top_k: int = 1) -> RouteTrace:
    drafts = max(len(step.drafted) for step in steps)
    return RouteTrace("by hand", drafts, len(steps[0].used), experts, top_k, list(steps))


DRAFTED = trace_of(
    step([[[0], [0]], [[1], [1]]], [0, 1], drafted([[0], [1]])),
    step([[[0], [2]], [[1], [3]]], [0], drafted([[0], [1]])),
)


def check_sums(step: StepStats) -> None:
    """A step's figures are the sums of its layers', and what was moved has one cause."""
    by_layer = step.by_layer.values()
    for name in ("requests", "hits", "late", "used", "wasted", "ahead_bytes", "rejected_bytes"):
        assert getattr(step, name) == sum(getattr(figures, name) for figures in by_layer), name
    for name in ("stall_s", "late_s", "covered"):
        total = sum(getattr(figures, name) for figures in by_layer)
        assert getattr(step, name) == pytest.approx(total), name
    moved = sum(figures.ahead_bytes + figures.demand_bytes for figures in by_layer)
    assert step.moved_bytes == moved
    assert step.rejected_bytes <= step.moved_bytes
    assert step.hits + step.late <= step.requests
    assert step.late_s <= step.stall_s + 1e-9
