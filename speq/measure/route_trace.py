"""Traces of a generation's routes, draft and verification, for replays of expert scheduling."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from speq.errors import FileError, checked_int, present
from speq.files.atomic_file import write_whole
from speq.files.json_file import read_json
from speq.generator import Generator
from speq.measure.runs import steps_of
from speq.routing import Route
from speq.scheduler.lookahead import LookaheadBuffer
from speq.stats import RunStats
from speq.units import Progress

FORMAT = "speq-routes-2"
RECORD_AGAIN = "record it again with `python -m bench.lab.hit_rate --routes`"
# Layers, experts and drafted tokens that any model or draft could have.
MOST = 1 << 20
# Ids and weights of one token in one layer.
Choice = tuple[list[int], list[float]]


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One step.

    drafted  [token][layer]: (ids, weights) of the draft's route
    used     [layer][node]: expert ids of the exact model
    guessed  [layer][node]: (ids, margins) predicted one layer earlier; empty for the first layer
    path     accepted nodes
    weights  [layer][node]: of `used`
    leads    logit margin of each drafted token; None: the drafter has no margins
    """

    drafted: list[list[Choice]]
    used: list[list[list[int]]]
    guessed: list[list[Choice]]
    path: list[int]
    weights: list[list[list[float]]]
    leads: list[float | None]

    @property
    def emitted(self) -> int:
        return len(self.path)

    def cut(self, draft_length: int) -> "TraceStep":
        """Return the step as if its draft, a chain, had ended after `draft_length` tokens."""
        if draft_length >= len(self.drafted):
            return self
        rows = draft_length + 1
        return TraceStep(
            self.drafted[:draft_length],
            [nodes[:rows] for nodes in self.used],
            [nodes[:rows] for nodes in self.guessed],
            self.path[:rows],
            [nodes[:rows] for nodes in self.weights],
            self.leads[:draft_length],
        )


@dataclass(frozen=True, slots=True)
class RouteTrace:
    """Decode steps of one or more sequences."""

    model: str
    draft_length: int
    num_layers: int
    num_experts: int
    top_k: int
    steps: list[TraceStep]

    def plain(self) -> "RouteTrace":
        """Return a trace of the accepted tokens, decoded one by one without drafts."""
        steps = [
            TraceStep(
                [],
                [[nodes[node]] for nodes in step.used],
                [[nodes[node]] if nodes else [] for nodes in step.guessed],
                [0],
                [[nodes[node]] for nodes in step.weights],
                [],
            )
            for step in self.steps
            for node in step.path
        ]
        return RouteTrace(self.model, 0, self.num_layers, self.num_experts, self.top_k, steps)

    def write(self, path: Path) -> None:
        """Write as JSON, whole or not at all. Raises SpeqError if that fails."""
        write_whole(path, json.dumps({"format": FORMAT} | asdict(self)).encode())

    @classmethod
    def read(cls, path: Path) -> "RouteTrace":
        """Read a trace. Raises SpeqError if the file is not one."""
        content = read_json(path, RECORD_AGAIN, "give a file that `--trace` of a bench wrote")
        try:
            if content.pop("format") != FORMAT:
                raise ValueError("another format")
            steps = [TraceStep(**step) for step in content.pop("steps")]
            trace = cls(steps=steps, **content)
            trace.check()
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise FileError(
                f"{path} is no trace of format {FORMAT}: {error!r}; {RECORD_AGAIN}"
            ) from error
        return trace

    def check(self) -> None:
        """Raise ValueError or TypeError if sizes and ids do not agree with each other."""
        if not isinstance(self.model, str):
            raise ValueError(f"the model {self.model!r}")
        for name, least in (
            *(("draft_length", 0), ("num_layers", 1)),
            *(("num_experts", 1), ("top_k", 1)),
        ):
            checked_int(name, getattr(self, name), least, MOST)
        for step in self.steps:
            choices = [choice for token in step.drafted for choice in token]
            choices += [choice for layer in step.guessed for choice in layer]
            chosen = [node for layer in step.used for node in layer] + [ids for ids, _ in choices]
            layers = {len(step.used), len(step.weights), len(step.guessed)}
            layers |= set(map(len, step.drafted))
            nodes = {len(layer) for layer in step.used}
            if layers != {self.num_layers} or len(nodes) != 1:
                raise ValueError("a step has other layers than the model")
            if not {len(layer) for layer in step.guessed} <= {0, *nodes}:
                raise ValueError("predictions for some tokens only")
            if any(len(ids) != self.top_k for ids in chosen):
                raise ValueError(f"a token with other than {self.top_k} experts")
            weighed = [list(map(len, layer)) for layer in step.weights]
            if any(len(ids) != len(weights) for ids, weights in choices) or weighed != [
                list(map(len, layer)) for layer in step.used
            ]:
                raise ValueError("experts without weights")
            if len(step.leads) != len(step.drafted):
                raise ValueError("drafted tokens without leads")
            if not all(type(e) is int and 0 <= e < self.num_experts for ids in chosen for e in ids):
                raise ValueError("an expert that the model does not have")
            if not step.path or min(step.path) < 0 or max(step.path) >= nodes.pop():
                raise ValueError("a path of tokens that are not there")


def record(
    model: str,
    memory_budget: str,
    draft_length: int,
    prompts: list[str],
    max_new_tokens: int,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[RouteTrace, RunStats]:
    """Generate from each prompt; return the routes of every step, and the statistics."""
    generator = Generator.from_pretrained(
        model,
        memory_budget,
        draft_length=draft_length,
        profile="none",
        progress=progress,
        **options,
    )
    try:
        runtime = generator.runtime
        run, steps = runtime.begin_stats(0.0), []
        for stats in steps_of(generator, prompts, max_new_tokens, progress=progress):
            run.record(stats)
            lookahead = runtime.engine.lookahead
            # The tokens of a chain are accepted from the front.
            path = list(range(stats.accepted + 1))
            steps.append(_step(lookahead, runtime.engine.steps[0].draft.logit_margins, path))
    finally:
        generator.close()
    experts = runtime.shape.experts
    top_k = len(steps[0].used[0][0])
    num_layers = len(steps[0].used)
    trace = RouteTrace(model, draft_length, num_layers, experts.num_experts, top_k, steps)
    return trace, run


def _step(lookahead: LookaheadBuffer, margins: list[float | None], path: list[int]) -> TraceStep:
    layers = range(lookahead.num_layers)
    drafted = [
        [_choice(lookahead.predicted[token, layer]) for layer in layers]
        for token in range(len(margins))
    ]
    routes = [lookahead.used[layer] for layer in layers]
    predicted: list[list[Choice]] = [[]]
    for route in routes[:-1]:
        prediction = route.predict_next_layer([*range(len(route.ids))])
        prediction = present(prediction, "a layer before the last predicts nothing of the next one")
        predicted.append(
            [
                (ids, [round(margin, 3) for margin in by_expert])
                for ids, by_expert in zip(prediction.ids, prediction.margins, strict=True)
            ]
        )
    return TraceStep(
        drafted,
        [route.ids for route in routes],
        predicted,
        path,
        [[_round(weights) for weights in route.weights] for route in routes],
        [None if margin is None else round(margin, 4) for margin in margins],
    )


def _choice(route: Route) -> Choice:
    (ids,), (weights,) = route.ids, route.weights
    return ids, _round(weights)


def _round(weights: list[float]) -> list[float]:
    return [round(weight, 4) for weight in weights]
