"""Where the time of a token goes: attention, router, experts, head, and what Python adds.

Modules are timed where they are entered and left, each without what it calls, in passes over the
draft's experts and over the exact ones. On a GPU the device is waited for at each of those moments,
which makes passes slower than they are: read the shares.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from speq.errors import checked_int
from speq.files.atomic_file import check_target
from speq.generator import Generator
from speq.layers.draft_experts import DraftExperts
from speq.measure.report import Column, Report, read_prompts
from speq.models.moe_model import EXPERTS, WHOLE
from speq.runtime import Runtime
from speq.units import Progress, tracked

COLUMNS: dict[str, Column] = {
    "pass": ("pass", "{}"),
    "part": ("part", "{}"),
    "ms": ("time_ms", "{:.3f}"),
    "share": ("share", "{:.1%}"),
}


@dataclass(frozen=True, slots=True)
class Settings:
    memory_budget: str
    draft_length: str
    draft_kernel: str
    prompts: Path | None
    num_prompts: int
    max_new_tokens: int
    device: str
    dtype: str


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
    checked_int("max_new_tokens", settings.max_new_tokens, 2)
    prompts = read_prompts(settings.prompts, settings.num_prompts)
    generator = Generator.from_pretrained(
        model,
        settings.memory_budget,
        draft_length=settings.draft_length,
        profile="none",
        draft_kernel=settings.draft_kernel,
        device=settings.device,
        dtype=settings.dtype,
        progress=progress,
    )
    runtime, clock = generator.runtime, PartClock()
    settle = torch.cuda.synchronize if runtime.device.type == "cuda" else lambda: None
    try:
        longest = max(len(generator.encode(prompt)) for prompt in prompts)
        generator.reserve(longest + settings.max_new_tokens)
        generator.generate(prompts[-1], max_new_tokens=min(8, settings.max_new_tokens))
        watch(runtime, clock, settle)
        stats = [
            generator.generate(
                prompt, max_new_tokens=settings.max_new_tokens, ignore_eos=True
            ).stats
            for prompt in tracked("timing texts", prompts, len(prompts), progress)
        ]
    finally:
        generator.close()
    outside = {"draft token": "draft_s", "verification": "verify_s"}
    rows = []
    for kind, name in outside.items():
        if passes := clock.passes.get(kind):
            whole_s = sum(run[name] for run in stats) / len(passes)
            stall_s = sum(run["stall_s"] for run in stats) / len(passes)
            rows += summarise(kind, passes, whole_s, stall_s if kind == "verification" else 0.0)
    path = settings.prompts and str(settings.prompts)
    report = Report("step", model, asdict(settings) | {"prompts": path}, rows)
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
