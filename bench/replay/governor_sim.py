"""The governor against every fixed draft length, in simulation.

Recorded routes go through the real scheduler, on a simulated clock and link. What differs from one
setting to the next (how many drafted tokens stand and how that drifts, slots, policies, the speeds
of link, draft and experts, and how noisy they are) is drawn at random; within a setting all draft
lengths see the same text, the same tokens of which would stand. Nothing here knows the governor's
model: a cycle takes what the scheduler makes of it.
"""

import math
import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from speq.bench.replay.replay import Replay, Scheduling, Times
from speq.bench.settings import GovernorSimSettings as Settings
from speq.errors import checked_int
from speq.files.atomic_file import check_target
from speq.governor.adaptive import AdaptiveDraftLength
from speq.governor.draft_length import Decision, FixedDraftLength, Governor
from speq.governor.roofline import StepEstimate
from speq.measure.report import Column, Report
from speq.measure.route_trace import Choice, RouteTrace, TraceStep
from speq.stats import StepStats
from speq.units import Progress, track

FIXED = (0, 1, 2, 4, 6, 8, 12)
# What the prompt leaves in the slots: so many tokens are decoded before time is taken.
PROMPT = 24
# Eviction and prefetching.
SYSTEMS = (("lru", "none"), ("lookahead", "none"), ("lookahead", "three-phase"))

COLUMNS: dict[str, Column] = {
    "settings": ("settings", "{}"),
    "within 3% of the best k": ("within_3_percent_of_best", "{:.1%}"),
    "of k = 0": ("within_3_percent_of_plain", "{:.1%}"),
    "worst": ("worst", "{:.3f}"),
    "its seed": ("worst_seed", "{}"),
    "mean": ("mean", "{:.4f}"),
    "us a decision": ("decision_us", "{:.0f}"),
}


@dataclass(frozen=True, slots=True)
class TokenRoutes:
    """What one token of the text wants: by layer, exactly, as drafted, and as guessed."""

    used: list[list[int]]
    drafted: list[Choice]
    guessed: list[Choice]


@dataclass(frozen=True, slots=True)
class Text:
    """A recorded text, one token after the other, that begins anew where it ends."""

    tokens: list[TokenRoutes]
    num_layers: int
    num_experts: int

    @classmethod
    def of(cls, trace: RouteTrace, num_layers: int) -> "Text":
        """The accepted tokens of a trace, in its first layers."""
        layers = range(num_layers)
        tokens = []
        for step in trace.steps:
            for node in step.path:
                used = [step.used[layer][node] for layer in layers]
                # The last token of a draft has no route of its own; the exact one stands for it.
                drafted = (
                    step.drafted[node][:num_layers]
                    if node < len(step.drafted)
                    else [(ids, [1.0] * len(ids)) for ids in used]
                )
                guessed = [step.guessed[layer][node] for layer in layers[1:]]
                tokens.append(TokenRoutes(used, drafted, guessed))
        return cls(tokens, num_layers, trace.num_experts)

    def token(self, position: int) -> TokenRoutes:
        return self.tokens[position % len(self.tokens)]


@dataclass(frozen=True, slots=True)
class Drift:
    """How the share of drafted tokens that stand changes along the text: steady, a wave, a step at
    half of it, or a slope. depth: of the way to the nearer of 0.05 and 0.99.
    """

    kind: str
    mean: float
    depth: float

    def share(self, progress: float) -> float:
        """At a place in the text from 0 to 1."""
        room = self.depth * min(self.mean - 0.05, 0.99 - self.mean)
        sign = {
            "steady": 0.0,
            "wave": math.sin(4 * math.pi * progress),
            "step": -1.0 if progress < 0.5 else 1.0,
            "slope": 1 - 2 * progress,
        }[self.kind]
        return self.mean + room * sign


@dataclass(frozen=True, slots=True)
class Setting:
    """One machine and one text. noise: deviations of the logarithms of times."""

    seed: int
    drift: Drift
    scheduling: Scheduling
    times: Times
    compute_noise: float
    link_noise: float

    @classmethod
    def draw(cls, seed: int, num_layers: int, top_k: int, num_experts: int) -> "Setting":
        """Any machine. A plain token's computation takes a second, more or less."""
        rng = random.Random(seed)
        policy, prefetch = rng.choice(SYSTEMS)
        experts_share = rng.uniform(0.2, 0.8)
        layer_s = (1 - experts_share) / num_layers
        expert_s = experts_share / (num_layers * top_k)
        transfer_s = expert_s * math.exp(rng.uniform(math.log(0.05), math.log(20)))
        return cls(
            seed,
            Drift(
                rng.choice(("steady", "wave", "step", "slope")),
                rng.uniform(0.2, 0.98),
                rng.uniform(0.2, 1.0),
            ),
            Scheduling(round(num_layers * num_experts * rng.uniform(0.15, 0.9)), policy, prefetch),
            Times(
                draft_layer_s=rng.uniform(0.15, 0.9) / num_layers,
                layer_s=layer_s,
                expert_s=expert_s,
                transfer_s=transfer_s,
                begun=2,
                moved_bytes=1 << 20,
            ),
            compute_noise=rng.uniform(0.02, 0.12),
            link_noise=rng.uniform(0.05, 0.4),
        )


class Simulation:
    """One governor over one setting, cycle by cycle."""

    def __init__(self, text: Text, setting: Setting, tokens: int, governor: Governor) -> None:
        self._text = text
        self._setting = setting
        self._tokens = tokens
        fates = random.Random(setting.seed + 1)
        self._stands = [
            fates.random() < setting.drift.share(min(at / tokens, 1.0))
            for at in range(tokens + 2 * max(FIXED))
        ]
        self._elsewhere = [fates.randrange(len(text.tokens)) for _ in self._stands]
        self._luck = random.Random(setting.seed + 2)
        trace = RouteTrace("simulated", 0, text.num_layers, text.num_experts, 0, [])
        self._replay = Replay(trace, setting.times, setting.scheduling, self._transfer_s, governor)

    def run(self, limit_s: float = math.inf) -> float:
        """Seconds per token; infinite where the time went beyond the limit."""
        for position in range(-PROMPT, 0):
            self._replay.play(partial(self._round, position), self._times(), 0)
        at, taken_s = 0, 0.0
        while at < self._tokens:
            step = self._replay.play(partial(self._round, at), self._times())
            at += step.emitted
            taken_s += step.duration_s
            if taken_s > limit_s * self._tokens:
                return math.inf
        return taken_s / at

    def _round(self, at: int, draft_length: int) -> TraceStep:
        """A draft of so many tokens at a place of the text. Behind a token that does not stand the
        draft goes on as another place of the text does.
        """
        accepted = 0
        while accepted < draft_length and self._stands[at + accepted]:
            accepted += 1
        positions = [at + node for node in range(accepted + 1)]
        if accepted < draft_length:
            begin = self._elsewhere[at + accepted]
            positions += [begin + node for node in range(draft_length - accepted)]
        nodes = [self._text.token(position) for position in positions]
        layers = range(self._text.num_layers)
        return TraceStep(
            [node.drafted for node in nodes[:draft_length]],
            [[node.used[layer] for node in nodes] for layer in layers],
            [[], *([node.guessed[layer] for node in nodes] for layer in layers[:-1])],
            list(range(accepted + 1)),
            [[[1.0] * len(node.used[layer]) for node in nodes] for layer in layers],
            [None] * draft_length,
        )

    def _times(self) -> Times:
        """What this cycle's computation takes: machines are slow at times, as a whole."""
        factor = self._luck.lognormvariate(0.0, self._setting.compute_noise)
        times = self._setting.times
        return replace(
            times,
            draft_layer_s=times.draft_layer_s * factor,
            layer_s=times.layer_s * factor,
            expert_s=times.expert_s * factor,
        )

    def _transfer_s(self) -> float:
        return self._setting.times.transfer_s * self._luck.lognormvariate(
            0.0, self._setting.link_noise
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a setting came to, in seconds per token: with the governor, and with each fixed length
    (infinite where a run took longer than the governor's, and was given up).

    decision_s  mean time of a decision and of learning from its cycle, on this machine
    """

    seed: int
    auto_s: float
    fixed_s: dict[int, float]
    decision_s: float

    @property
    def best(self) -> int | None:
        """The fixed length that was faster than the governor by most, if any was."""
        length = min(self.fixed_s, key=lambda k: self.fixed_s[k])
        return length if self.fixed_s[length] < self.auto_s else None

    @property
    def of_best(self) -> float:
        """The governor's time beside that of the best fixed length; 1 where none was faster."""
        return max(self.auto_s / min(self.fixed_s.values()), 1.0)

    @property
    def of_plain(self) -> float:
        """The same beside k = 0."""
        return max(self.auto_s / self.fixed_s[0], 1.0)


class Timed:
    """A governor, with the time it takes (of this thread: others do not count)."""

    def __init__(self, governor: Governor) -> None:
        self._governor = governor
        self.time_s = 0.0
        self.decisions = 0

    def begin(self) -> None:
        self._governor.begin()

    @property
    def secondary(self) -> str | None:
        return self._governor.secondary

    def decide(self, offered: bool = False) -> Decision:
        start_s = time.thread_time()
        decision = self._governor.decide(offered)
        self.time_s += time.thread_time() - start_s
        self.decisions += 1
        return decision

    def continue_draft(self, drafted: int, new_experts: int, reach: float) -> bool:
        start_s = time.thread_time()
        on = self._governor.continue_draft(drafted, new_experts, reach)
        self.time_s += time.thread_time() - start_s
        return on

    def observe(self, step: StepStats) -> None:
        start_s = time.thread_time()
        self._governor.observe(step)
        self.time_s += time.thread_time() - start_s

    def outlook(self) -> list[StepEstimate]:
        return self._governor.outlook()


def judge(text: Text, setting: Setting, tokens: int) -> Verdict:
    """Run a setting with the governor and with each fixed length."""
    governor = Timed(AdaptiveDraftLength())
    auto_s = Simulation(text, setting, tokens, governor).run()
    fixed_s: dict[int, float] = {}
    for length in FIXED:
        # What takes longer than the best so far is not the best: no need to see its end.
        limit_s = min([auto_s, *fixed_s.values()])
        simulation = Simulation(text, setting, tokens, FixedDraftLength(length))
        fixed_s[length] = simulation.run(limit_s if length else auto_s)
    return Verdict(setting.seed, auto_s, fixed_s, governor.time_s / governor.decisions)


@dataclass(slots=True)
class GovernorSimReport(Report):
    """rows: the one that sums up; verdicts: a row for each setting, where they were asked for."""

    verdicts: list[dict[str, Any]] = field(default_factory=list)


def run(
    settings: Settings,
    json_file: Path | None,
    force: bool,
    progress: Progress | None = None,
) -> GovernorSimReport:
    """Judge all settings, and sum up. Raises SpeqError for nonsense settings."""
    check_target(json_file, force)
    trace = RouteTrace.read(settings.routes)
    checked_int("layers", settings.layers, 1, trace.num_layers)
    seeds = range(settings.seed, settings.seed + settings.settings)
    task = partial(_judge_seed, settings.routes, settings.layers, settings.tokens)
    # Fresh processes: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(settings.processes, context) as pool:
        verdicts = list(track("simulating", pool.map(task, seeds), len(seeds), progress))
    report = GovernorSimReport(
        "governor-sim",
        trace.model,
        settings.as_json(),
        [summary(verdicts)],
        verdicts=verdicts if settings.verdicts else [],
    )
    if json_file is not None:
        report.write(json_file)
    return report


def summary(verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares of settings, and the worst of them, which `Setting.draw` makes again of its seed."""
    of_best = [verdict["of_best"] for verdict in verdicts]
    of_plain = [verdict["of_plain"] for verdict in verdicts]
    return {
        "settings": len(verdicts),
        "within_3_percent_of_best": sum(ratio <= 1.03 for ratio in of_best) / len(verdicts),
        "within_3_percent_of_plain": sum(ratio <= 1.03 for ratio in of_plain) / len(verdicts),
        "worst": max(of_best),
        "worst_seed": verdicts[of_best.index(max(of_best))]["seed"],
        "mean": sum(of_best) / len(verdicts),
        "decision_us": median(verdict["decision_us"] for verdict in verdicts),
    }


def _judge_seed(path: Path, layers: int, tokens: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    trace = RouteTrace.read(path)
    text = Text.of(trace, layers)
    setting = Setting.draw(seed, layers, trace.top_k, trace.num_experts)
    verdict = judge(text, setting, tokens)
    fixed = {str(k): s if math.isfinite(s) else None for k, s in verdict.fixed_s.items()}
    return {
        "seed": seed,
        "setting": asdict(setting),
        "auto_s": verdict.auto_s,
        "fixed_s": fixed,
        "best": verdict.best,
        "of_best": verdict.of_best,
        "of_plain": verdict.of_plain,
        "decision_us": verdict.decision_s * 1e6,
    }
