"""Where the time of a token goes: attention, router, experts, head, and what Python adds.

Modules are timed where they are entered and left, each without what it calls, in passes over the
draft's experts and over the exact ones. On a GPU the device is waited for at each of those moments,
which makes passes slower than they are: read the shares. There the draft's passes are timed as a
whole as well, with nobody listening: launched kernel by kernel, and recorded as graphs. On the CPU
recorded passes are timed, and the native ops in them: what is left is the host's part.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Annotated, Any

from bench.lab.command import main
from bench.lab.options import BudgetText
from speq.bench.neighbours import beside_neighbours
from speq.bench.settings import Neighbours
from speq.config import Device, DraftLength, Dtype
from speq.engine.draft_pass import RecordedPass
from speq.engine.drafters.int4 import Int4Drafter
from speq.generator import Generator
from speq.kernels import ops
from speq.layers.draft_experts import DraftExperts
from speq.measure.picture import Axis, Picture
from speq.measure.report import Column, Report, read_prompts
from speq.measure.runs import runs_of
from speq.measure.settings import MaxNewTokens, NumPrompts, Prompts
from speq.models.moe_model import EXPERTS, WHOLE
from speq.options.declared import Option, Options
from speq.options.kinds import Choice
from speq.runtime import Runtime
from speq.units import Progress


@dataclass(frozen=True, slots=True)
class StepSettings(Options):
    memory_budget: BudgetText
    draft_length: DraftLength = None
    draft_kernel: Annotated[
        str,
        Option(
            "How the draft runs; unfused, a call for each expert, is a baseline.",
            Choice(("fused", "unfused")),
        ),
    ] = "fused"
    prompts: Prompts = None
    num_prompts: NumPrompts = 4
    max_new_tokens: MaxNewTokens = 64
    device: Device = "auto"
    dtype: Dtype = "auto"
    neighbours: Neighbours = 0


WARM_UP_TOKENS = 8
# All experts of a route in one call; the baseline, a call for each expert and projection.
DRAFT_KERNELS = {"fused": ops.moe_int4, "unfused": ops.moe_int4_unfused}

COLUMNS: dict[str, Column] = {
    "pass": ("pass", "{}"),
    "part": ("part", "{}"),
    "ms": ("time_ms", "{:.3f}"),
    "share": ("share", "{:.1%}"),
}
TIME = Axis("time_ms", "time, ms")
PICTURES = (
    Picture(
        *("parts", "Where the time of a pass goes", (Axis("pass", "pass"),), (TIME,)),
        by=(Axis("part", "part"),),
        mark="stack",
        without="all",
        aid="The thicker a part of a bar, the more of the pass's time it takes.",
    ),
)


@dataclass(slots=True)
class PartClock:
    """Time spent in each part of a pass, calls into other parts left out.

    passes  seconds by part, of each pass that ended, by kind of pass
    """

    clock: Callable[[], float] = time.perf_counter
    passes: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    _stack: list[tuple[str, float]] = field(default_factory=list)
    _since: float = 0.0
    _parts: dict[str, float] = field(default_factory=dict)

    def begin(self, kind: str) -> None:
        """A pass begins; what is entered from now on belongs to it."""
        self._parts = {}
        self.passes.setdefault(kind, []).append(self._parts)

    def enter(self, part: str) -> None:
        now = self.clock()
        self._charge(now)
        self._stack.append((part, now))

    def leave(self) -> None:
        self._charge(self.clock())
        self._stack.pop()

    def _charge(self, now: float) -> None:
        if self._stack:
            part = self._stack[-1][0]
            self._parts[part] = self._parts.get(part, 0.0) + now - self._since
        self._since = now


@dataclass(frozen=True, slots=True)
class Drafting:
    """Time of drafting so many tokens, with nobody listening to modules.

    recorded  whether their passes were graphs
    """

    tokens: int
    total_s: float
    recorded: bool

    @property
    def token_s(self) -> float:
        return self.total_s / self.tokens

    def row(self, launched: "Drafting") -> dict[str, Any]:
        """launched: what it is a share of."""
        return {
            "pass": f"draft token, {'a graph' if self.recorded else 'launched'}",
            "part": "all",
            "time_ms": self.token_s * 1e3,
            "share": self.token_s / launched.token_s,
            "passes": self.tokens,
        }


def drafting(
    generator: Generator, prompts: list[str], max_new_tokens: int, progress: Progress | None
) -> Drafting | None:
    """Time the drafts of texts; None where nothing was drafted."""
    runs = runs_of(generator, prompts, max_new_tokens, progress=progress)
    tokens = sum(step.draft_length for run in runs for step in run.decode)
    drafter = generator.runtime.engine.drafters[0]
    if not tokens or not isinstance(drafter, Int4Drafter):
        return None
    made = drafter.draft_pass
    recorded = isinstance(made, RecordedPass) and bool(made.passes.shapes)
    return Drafting(tokens, sum(run.total("draft_s") for run in runs), recorded)


def recorded_passes(
    generator: Generator, prompts: list[str], max_new_tokens: int, progress: Progress | None
) -> list[dict[str, Any]]:
    """Rows of the passes that were lists of ops: all of a pass up to the head, its native ops, and
    what the host adds for each layer. No rows where none was.
    """
    recordings = generator.runtime.model.recordings
    if recordings is None:
        return []
    run, spans_s = recordings.run, []

    def timed(*arguments: Any) -> Any:
        begun_s = time.perf_counter()
        made = run(*arguments)
        if made is not None:
            spans_s.append(time.perf_counter() - begun_s)
        return made

    before_s = recordings.native_s
    vars(recordings)["run"] = timed
    runs_of(generator, prompts, max_new_tokens, progress=progress)
    if not spans_s:
        return []
    whole_s = fmean(spans_s)
    native_s = (recordings.native_s - before_s) / len(spans_s)
    layers = generator.runtime.model.num_moe_layers
    parts = {
        "all": whole_s,
        "native ops": native_s,
        "the host": whole_s - native_s,
        "the host, a layer": (whole_s - native_s) / layers,
    }
    return [
        {
            "pass": "drafts and verifications, recorded",
            "part": part,
            "time_ms": seconds * 1e3,
            "share": seconds / whole_s,
            "passes": len(spans_s),
        }
        for part, seconds in parts.items()
    ]


def watch(runtime: Runtime, clock: PartClock) -> None:
    """Have a model's modules tell the clock when they are entered and left, for good."""

    def begin(*_: Any) -> None:
        exact = not isinstance(runtime.model.backend, DraftExperts)
        phase = runtime.recorder.step.phase
        clock.begin(phase if phase != "decode" else "verification" if exact else "draft token")

    def enter(part: str) -> None:
        runtime.synchronize()
        clock.enter(part)

    def leave() -> None:
        runtime.synchronize()
        clock.leave()

    parts = runtime.model.parts()
    for part, modules in parts.items():
        for module in modules:
            module.register_forward_pre_hook(lambda *_, part=part: enter(part))
            module.register_forward_hook(lambda *_: leave())
    for module in parts[WHOLE]:
        module.register_forward_pre_hook(begin, prepend=True)


@beside_neighbours
def run(model: str, settings: StepSettings, progress: Progress | None = None) -> Report:
    """Time the parts of every pass while texts are generated. Raises SpeqError for nonsense."""
    kernel = DRAFT_KERNELS[settings.draft_kernel]
    prompts = read_prompts(settings.prompts, settings.num_prompts)
    load = partial(
        Generator.from_pretrained,
        model,
        settings.memory_budget,
        draft_length=settings.draft_length,
        profile="none",
        device=settings.device,
        dtype=settings.dtype,
        progress=progress,
    )
    # Passes that are listened to are no graphs: nobody hears of what runs within one.
    generator, clock = load(graphs="none"), PartClock()
    runtime = generator.runtime
    alone = runtime.device.type != "cpu" and kernel is ops.moe_int4
    launched, recorded, listed = None, None, []
    if runtime.draft_backend is not None:
        runtime.draft_backend.kernel = kernel
    try:
        runs_of(generator, prompts[-1:], min(WARM_UP_TOKENS, settings.max_new_tokens))
        if alone:
            launched = drafting(generator, prompts, settings.max_new_tokens, progress)
        watch(runtime, clock)
        runs = runs_of(generator, prompts, settings.max_new_tokens, progress=progress)
    finally:
        generator.close()
    if launched is not None:
        generator = load(graphs="auto")
        try:
            runs_of(generator, prompts[-1:], min(WARM_UP_TOKENS, settings.max_new_tokens))
            recorded = drafting(generator, prompts, settings.max_new_tokens, progress)
        finally:
            generator.close()
    elif runtime.device.type == "cpu" and kernel is ops.moe_int4:
        generator = load(graphs="auto")
        try:
            runs_of(generator, prompts, settings.max_new_tokens)  # which records their passes
            listed = recorded_passes(generator, prompts, settings.max_new_tokens, progress)
        finally:
            generator.close()
    outside = {"draft token": "draft_s", "verification": "verify_s"}
    rows = [
        drafted.row(launched)
        for drafted in (launched, recorded)
        if drafted is not None and launched is not None
    ]
    for kind, name in outside.items():
        if passes := clock.passes.get(kind):
            whole_s = sum(run.total(name) for run in runs) / len(passes)
            stall_s = sum(run.total("stall_s") for run in runs) / len(passes)
            rows += summarise(kind, passes, whole_s, stall_s if kind == "verification" else 0.0)
    return Report("step", model, settings.as_json(), rows + listed)


def summarise(
    kind: str, passes: list[dict[str, float]], whole_s: float, stall_s: float
) -> list[dict[str, Any]]:
    """A row for each part, the largest first, and one for the whole.

    whole_s  mean time of a pass with all around it; what no part accounts for is "around the model"
    stall_s  mean time a pass waited for experts, which their modules were charged with
    """
    parts = dict.fromkeys((part for run in passes for part in run), 0.0)
    seconds = {part: fmean(run.get(part, 0.0) for run in passes) for part in parts}
    if stall_s:
        seconds[EXPERTS] -= stall_s
        seconds["waiting for experts"] = stall_s
    seconds["around the model"] = max(whole_s - sum(seconds.values()), 0.0)
    rows = [
        {"pass": kind, "part": part, "time_ms": value * 1e3, "share": value / whole_s}
        for part, value in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    total = {"pass": kind, "part": "all", "time_ms": whole_s * 1e3, "share": 1.0}
    return [total | {"passes": len(passes)}, *(row | {"passes": len(passes)} for row in rows)]


if __name__ == "__main__":
    main("step")
