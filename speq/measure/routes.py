"""Computes distinct experts by number of tokens, and acceptance, from recorded routes."""

from collections import Counter

from speq.errors import FileError
from speq.governor.roofline import Points
from speq.layers.expert_counts import ExpertCounts
from speq.measure.route_trace import RouteTrace
from speq.planning.cost.locality import RouteCurve

# Numbers of tokens of a curve's points, as far as a trace is long enough.
TOKENS = (1, 2, 3, 5, 9, 17, 33, 65, 129, 257)
WINDOWS_OF_A_POINT = 3


def curve_of(trace: RouteTrace) -> RouteCurve:
    """Compute D(t) of the accepted tokens. Raises SpeqError for a trace that is too short."""
    routes = accepted_routes(trace)
    points = distinct_points(routes, trace.num_experts)
    if len(points) < 2:
        raise FileError(
            f"the trace of {trace.model} has {len(routes[0])} tokens; record at least some dozens"
        )
    return RouteCurve(trace.model, trace.num_experts, trace.top_k, points)


def accepted_routes(trace: RouteTrace) -> list[list[list[int]]]:
    """Return the expert ids of accepted tokens, by layer and token."""
    steps = trace.plain().steps
    return [[step.used[layer][0] for step in steps] for layer in range(trace.num_layers)]


def distinct_points(routes: list[list[list[int]]], num_experts: int) -> Points:
    """Compute D(t) of routes (expert ids by layer and token) for all t with enough windows."""
    known = [tokens for tokens in TOKENS if tokens <= len(routes[0]) // WINDOWS_OF_A_POINT]
    points = [(float(tokens), distinct_experts(routes, tokens)) for tokens in known]
    # Windows of different sizes cover different tokens, so D(t) may fail to grow: drop such points.
    grown = [at for at, (_, y) in enumerate(points) if all(y > low for _, low in points[:at])]
    return tuple(points[at] for at in grown if points[at][1] < num_experts)


def distinct_experts(routes: list[list[list[int]]], tokens: int) -> float:
    """Mean over windows of so many tokens, which do not overlap, and layers."""
    counts = [
        len({expert for chosen in layer[at : at + tokens] for expert in chosen})
        for layer in routes
        for at in range(0, len(layer) - tokens + 1, tokens)
    ]
    return sum(counts) / len(counts)


def expert_counts(model: str, routes: list[list[list[int]]], num_experts: int) -> ExpertCounts:
    """Count how often tokens chose each expert. model: its name"""
    chosen = [Counter(expert for ids in layer for expert in ids) for layer in routes]
    counts = [[of_layer[expert] for expert in range(num_experts)] for of_layer in chosen]
    return ExpertCounts(model, len(routes[0]), len(routes[0][0]), counts)


def acceptance_of(trace: RouteTrace) -> float | None:
    """Acceptance of a drafted token, given those before it; None without drafts."""
    tried = accepted = 0
    for step in trace.steps:
        accepted += step.emitted - 1
        tried += min(step.emitted, len(step.drafted))
    return accepted / tried if tried else None
