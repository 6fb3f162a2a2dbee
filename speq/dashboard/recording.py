"""Records what a generator does, step by step, as little of it as pictures need.

While a run goes on, a step costs what it takes to copy some lists. What takes longer is done when
a record is asked for.
"""

import base64
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Generator as Coroutine
from dataclasses import asdict, dataclass, fields
from types import TracebackType
from typing import Any, Unpack

import numpy as np

from speq.config import RunConfig
from speq.dashboard.run_record import Residency, RunRecord, StepRecord, TokenRecord
from speq.generator import Generator, Token
from speq.machine import describe_machine
from speq.measure.report import current_commit
from speq.options.declared import REQUIRED, Options, declared_options
from speq.options.typed import SamplingOptions
from speq.scheduler.expert_key import ExpertKey
from speq.stats import LayerStats, Origin, RunStats, StepStats, TimeSpan
from speq.text.prompts import Prompt
from speq.units import Progress
from speq.version import __version__

# Steps that are kept, the last ones: a page of more could not be read.
KEPT_STEPS = 256
# Of times in milliseconds.
DECIMALS = 3


@dataclass(frozen=True, slots=True)
class Noted:
    """What is kept of a step until a record is asked for; the run itself forgets its events."""

    number: int
    step: StepStats
    events: list[TimeSpan]
    by_layer: dict[int, LayerStats]
    positions: list[tuple[bool, int, int]]
    residents: list[ExpertKey]
    used: dict[int, list[int]]


class Recording:
    """Listens to a generator within a `with` block: to one run after another, of which it has the
    last one. `record` may be called from any thread.
    """

    def __init__(self, generator: Generator, kept_steps: int = KEPT_STEPS) -> None:
        self._generator = generator
        self._run: RunStats | None = None
        self._noted: deque[Noted] = deque(maxlen=kept_steps)
        self._tokens: list[TokenRecord] = []
        self._of_step = 0
        self._prompt_tokens = 0
        self._sampling: dict[str, Any] = {}
        self._lock = threading.Lock()
        # Both ask other programs or files, and records are made while a run goes on.
        self._commit, self._machine = current_commit(), describe_machine()

    def __enter__(self) -> "Recording":
        self._generator.runtime.recorder.listeners.append(self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._generator.runtime.recorder.listeners.remove(self._note)

    def stream(
        self,
        prompt: Prompt,
        *,
        on_finish: Callable[[str, dict[str, Any]], None] | None = None,
        progress: Progress | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Coroutine[TokenRecord, None, None]:
        """Generate, as `Generator.stream`, and say of each token where it is from."""
        self.begin(len(self._generator.encode(prompt)), dict(sampling))
        stream = self._generator.stream(prompt, on_finish=on_finish, progress=progress, **sampling)
        with contextlib.closing(stream):
            for token in stream:
                yield self.place_token(token)

    def begin(self, prompt_tokens: int, sampling: dict[str, Any]) -> None:
        """A text is about to begin: what a record says of it beside the steps."""
        with self._lock:
            self._prompt_tokens, self._sampling, self._tokens = prompt_tokens, sampling, []

    def place_token(self, token: Token, origin: Origin | None = None) -> TokenRecord:
        """Note where a token is from that the generator has just given out: each, once and in
        their order.

        origin  where it is known; a step of a batch does not tell
        """
        noted = self._noted[-1]
        if origin is None:
            same = bool(self._tokens) and self._tokens[-1].step == noted.number
            self._of_step = self._of_step + 1 if same else 0
            origin = origin_of(noted.step, self._of_step)
        found = TokenRecord(
            token.id,
            token.text,
            noted.number,
            origin,
            milliseconds(noted.step.stall_s),
        )
        self._tokens.append(found)
        return found

    def _note(self, step: StepStats) -> None:
        runtime = self._generator.runtime
        run = runtime.recorder.run
        engine = runtime.engine
        with self._lock:
            if run is not self._run:
                self._run, self._tokens = run, []
                self._noted.clear()
            positions, used = [], {}
            if step.phase == "decode":
                lookahead = engine.lookahead
                # Positions are those of one draft, and a batch has several.
                for depth in range(step.draft_length + 1) if step.sequences == 1 else ():
                    stood = depth < len(engine.steps[0].outcome.path)
                    recall = (
                        lookahead.recall_at(engine.steps[0].outcome.path[depth])
                        if stood
                        else (0, 0)
                    )
                    positions.append((stood, *recall))
                used = {layer: route.experts for layer, route in lookahead.used.items()}
            self._noted.append(
                Noted(
                    self._noted[-1].number + 1 if self._noted else 0,
                    step,
                    list(step.events),
                    dict(step.by_layer),
                    positions,
                    engine.offload.loader.cache.residents(),
                    used,
                )
            )

    def record(self) -> RunRecord | None:
        """The last run as far as it has come; None before the first one."""
        with self._lock:
            run, noted, tokens = self._run, list(self._noted), list(self._tokens)
        if run is None:
            return None
        generator = self._generator
        runtime = generator.runtime
        layers, experts = runtime.model.num_moe_layers, runtime.shape.experts.num_experts
        expected = runtime.residency_plan.expected
        below = runtime.engine.offload.loader.held_below()
        return RunRecord(
            model=runtime.opened.checkpoint.path.name,
            version=__version__,
            commit=self._commit,
            machine=self._machine,
            device=str(runtime.device),
            link=runtime.link,
            options=options_given(runtime.config, RunConfig),
            sampling={name: value for name, value in self._sampling.items() if value is not None},
            prompt_tokens=self._prompt_tokens,
            layers=layers,
            experts=experts,
            memory=dict(run.memory),
            planned=run.planned,
            expected=None
            if expected is None
            else {
                "draft_length": expected.draft_length,
                "tpot_ms": runtime.residency_plan.tpot_s * 1e3,
                "moved_bytes_per_token": runtime.residency_plan.moved_bytes_per_token,
                "tokens": expected.tokens,
                "draft_ms": expected.draft_s * 1e3,
                "verify_ms": expected.verify_s * 1e3,
                "transfer_ms": expected.new_s * 1e3,
            },
            stats=run.summary(),
            tokens=tokens,
            steps=[step_record(each, run.start_s, layers) for each in noted],
            left_out=noted[0].number if noted else 0,
            residency=Residency(
                [each.number for each in noted],
                [bits_of(each.residents, layers, experts) for each in noted],
                [
                    bits_of(
                        ((at, expert) for at, chosen in each.used.items() for expert in chosen),
                        layers,
                        experts,
                    )
                    for each in noted
                ],
                None if below is None else bits_of(below, layers, experts),
            ),
            estimates=[
                estimate._asdict() | {"step_s": estimate.step_s, "compute_s": estimate.compute_s}
                for estimate in runtime.engine.governors.alone.outlook()
            ],
            card=[
                asdict(reading) | {"time_ms": milliseconds(reading.time_s - run.start_s)}
                for reading in list(run.readings)
            ],
        )


def options_given(config: Options, kind: type[Options]) -> dict[str, Any]:
    """The options that are not their defaults, as JSON has them."""
    values = config.as_json()
    return {
        each.name: values[each.name]
        for each in declared_options(kind)
        if each.default is REQUIRED or getattr(config, each.name) != each.default
    }


def origin_of(step: StepStats, of_step: int) -> Origin:
    """The origin of the token at place `of_step` of those that a step emitted."""
    if step.phase != "decode":
        return "prompt"
    return "accepted" if of_step < step.accepted else "exact"


def milliseconds(time_s: float) -> float:
    return round(time_s * 1e3, DECIMALS)


# Numbers of a step that pictures read; times go by other names.
COUNTS = tuple(
    each.name
    for each in fields(StepStats)
    if each.type in (int, float, "int", "float") and not each.name.endswith("_s")
)
TIMES = (
    *("draft_s", "verify_s", "host_s"),
    *("transfer_s", "link_s", "exposed_s", "stall_s", "late_s"),
)


def step_record(noted: Noted, start_s: float, layers: int) -> StepRecord:
    """Times in milliseconds since `start_s`."""
    step = noted.step
    forecast = step.forecast
    return StepRecord(
        noted.number,
        step.phase,
        milliseconds(step.start_s - start_s),
        milliseconds(step.end_s - start_s),
        {name: getattr(step, name) for name in COUNTS}
        | {f"{name[:-1]}ms": milliseconds(getattr(step, name)) for name in TIMES},
        step.ground,
        step.reason,
        None
        if forecast is None
        else {
            "draft_length": forecast.draft_length,
            "serial_ms": milliseconds(forecast.serial_s),
            "overlapped_ms": milliseconds(forecast.overlapped_s),
            "step_ms": milliseconds(forecast.step_s),
            "tokens": forecast.tokens,
        },
        noted.positions,
        spans_of((e for e in noted.events if e.kind == "transfer"), start_s, moved=True),
        spans_of((e for e in noted.events if e.kind == "stall"), start_s, moved=False),
        [layer_row(noted.by_layer.get(layer)) for layer in range(layers)],
    )


def layer_row(figures: LayerStats | None) -> list[float]:
    """Figures of a layer as `StepRecord.layers` has them."""
    if figures is None:
        return [0, 0, 0, 0, 0, 0.0]
    counts = (figures.requests, figures.hits, figures.late, figures.used, figures.wasted)
    return [*counts, milliseconds(figures.stall_s)]


def spans_of(events: Iterable[TimeSpan], start_s: float, moved: bool) -> list[list[float]]:
    """Times at which any of the events was under way, as separate intervals in order, in
    milliseconds since `start_s`; moved: with the bytes that they moved.
    """
    spans: list[list[float]] = []
    for event in sorted(events, key=lambda each: each.start_s):
        if spans and event.start_s <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], event.end_s)
            spans[-1][2] += event.moved_bytes
        else:
            spans.append([event.start_s, event.end_s, event.moved_bytes])
    return [
        [milliseconds(begin_s - start_s), milliseconds(end_s - start_s)] + [bytes_] * moved
        for begin_s, end_s, bytes_ in spans
    ]


def bits_of(keys: Iterable[tuple[int, int]], layers: int, experts: int) -> str:
    """A bit for each (layer, expert), as `Frames` has them."""
    flags = np.zeros((layers, experts), np.bool_)
    pairs = np.array(list(keys), np.int64).reshape(-1, 2)
    flags[pairs[:, 0], pairs[:, 1]] = True
    return base64.b64encode(np.packbits(flags.reshape(-1), bitorder="little").tobytes()).decode()
