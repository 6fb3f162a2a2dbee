"""Where the time of a token goes: attention, router, experts, head, and what Python adds.

Modules are timed where they are entered and left, each without what it calls, in passes over the
draft's experts and over the exact ones. On a GPU the device is waited for at each of those moments,
which makes passes slower than they are: read the shares.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from speq.bench.settings import StepSettings as Settings
from speq.files.atomic_file import check_target
from speq.generator import Generator
from speq.kernels import ops
from speq.layers.draft_experts import DraftExperts
from speq.measure.report import Column, Report, read_prompts
from speq.measure.runs import runs_of
from speq.models.moe_model import EXPERTS, WHOLE
from speq.runtime import Runtime
from speq.units import Progress

WARM_UP_TOKENS = 8
# All experts of a route in one call; the baseline, a call for each expert and projection.
DRAFT_KERNELS = {"fused": ops.moe_int4, "unfused": ops.moe_int4_unfused}

COLUMNS: dict[str, Column] = {
    "pass": ("pass", "{}"),
    "part": ("part", "{}"),
    "ms": ("time_ms", "{:.3f}"),
    "share": ("share", "{:.1%}"),
}


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


def watch(runtime: Runtime, clock: PartClock, settle: Callable[[], None]) -> None:
    """Have a model's modules tell the clock when they are entered and left, for good."""

    def begin(*_: Any) -> None:
        exact = not isinstance(runtime.model.bank, DraftExperts)
        phase = runtime.recorder.step.phase
        clock.begin(phase if phase != "decode" else "verification" if exact else "draft token")

    def enter(part: str) -> None:
        settle()
        clock.enter(part)

    def leave() -> None:
        settle()
        clock.leave()

    parts = runtime.model.parts()
    for part, modules in parts.items():
        for module in modules:
            module.register_forward_pre_hook(lambda *_, part=part: enter(part))
            module.register_forward_hook(lambda *_: leave())
    for module in parts[WHOLE]:
        module.register_forward_pre_hook(begin, prepend=True)


def run(
    model: str,
    settings: Settings,
    json_file: Path | None,
    force: bool,
    progress: Progress | None = None,
) -> Report:
    """Time the parts of every pass while texts are generated. Raises SpeqError for nonsense."""
    check_target(json_file, force)
    kernel = DRAFT_KERNELS[settings.draft_kernel]
    prompts = read_prompts(settings.prompts, settings.num_prompts)
    generator = Generator.from_pretrained(
        model,
        settings.memory_budget,
        draft_length=settings.draft_length,
        profile="none",
        device=settings.device,
        dtype=settings.dtype,
        progress=progress,
    )
    runtime, clock = generator.runtime, PartClock()
    if runtime.draft_bank is not None:
        runtime.draft_bank.kernel = kernel
    settle = torch.cuda.synchronize if runtime.device.type == "cuda" else lambda: None
    try:
        runs_of(generator, prompts[-1:], min(WARM_UP_TOKENS, settings.max_new_tokens))
        watch(runtime, clock, settle)
        runs = runs_of(generator, prompts, settings.max_new_tokens, progress=progress)
    finally:
        generator.close()
    outside = {"draft token": "draft_s", "verification": "verify_s"}
    rows = []
    for kind, name in outside.items():
        if passes := clock.passes.get(kind):
            whole_s = sum(run.total(name) for run in runs) / len(passes)
            stall_s = sum(run.total("stall_s") for run in runs) / len(passes)
            rows += summarise(kind, passes, whole_s, stall_s if kind == "verification" else 0.0)
    report = Report("step", model, settings.as_json(), rows)
    if json_file is not None:
        report.write(json_file)
    return report


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
