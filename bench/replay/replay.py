"""Recorded routes through the real scheduler, on a simulated clock and link."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from speq.bench.replay.simulated_link import SimulatedClock, SimulatedLink
from speq.measure.route_trace import Choice, RouteTrace, TraceStep
from speq.registries import CACHE_POLICIES, PREFETCHERS
from speq.routing import Route
from speq.scheduler.expert_cache import ExpertCache
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.prefetch import Prefetcher
from speq.scheduler.supply import ExpertSupply
from speq.stats import Recorder, RunStats, StepStats

# Asked before each further token of a draft: (tokens drafted, new experts so far).
GoOn = Callable[[int, int], bool]


@dataclass(frozen=True, slots=True)
class Times:
    """What the machine takes, in seconds.

    draft_layer_s   of a draft token's pass, a layer
    layer_s         of a verification, a layer, without its experts; expert_s: an expert of it
    transfer_s      the link's time for an expert
    begun           transfers that may have begun at a time
    moved_bytes     of an expert
    """

    draft_layer_s: float
    layer_s: float
    expert_s: float
    transfer_s: float
    begun: int
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class Scheduling:
    """slots  of the whole arena; policy and prefetch as on the command line."""

    slots: int
    policy: str
    prefetch: str


@dataclass(slots=True)
class Replayed:
    """What a replay found. needs: (layer, expert) pairs of verifications, of which `ready` were
    resident when the verification began; choices: of single tokens, `served` of them by experts
    that were resident when their layer was ready.
    """

    stats: RunStats
    tokens: int = 0
    needs: int = 0
    ready: int = 0
    choices: int = 0
    served: int = 0


class Replay:
    """One scheduler over one trace."""

    def __init__(
        self,
        trace: RouteTrace,
        times: Times,
        scheduling: Scheduling,
        transfer_s: Callable[[], float] | None = None,
    ) -> None:
        self._trace = trace
        self._times = times
        self._clock = SimulatedClock()
        self._recorder = Recorder(self._clock)
        layers, experts = trace.num_layers, trace.num_experts
        policy = CACHE_POLICIES[scheduling.policy](scheduling.slots, layers, experts)
        self._link = SimulatedLink(
            self._clock,
            self._recorder,
            transfer_s or (lambda: times.transfer_s),
            times.moved_bytes,
            times.begun,
        )
        cache = ExpertCache(scheduling.slots, policy)
        self._supply = ExpertSupply(cache, self._link, self._recorder)
        lookahead = LookaheadBuffer(layers)
        self._prefetcher: Prefetcher = PREFETCHERS[scheduling.prefetch](self._supply, lookahead)

    def run(self, warm_up: int = 0) -> Replayed:
        """Replay all steps; the first `warm_up` fill the slots and do not count."""
        result = Replayed(RunStats(0.0, {}))
        for number, step in enumerate(self._trace.steps):
            if number == warm_up:
                result = Replayed(RunStats(self._clock.now, {}))
            result.stats.record(self.step(step, self._times, result))
        return result

    def step(
        self, step: TraceStep, times: Times, result: Replayed, go_on: GoOn = lambda *_: True
    ) -> StepStats:
        """Replay one round, drafted as far as `go_on` lets it; add to the counts of `result`."""
        stats = self._recorder.begin("decode")
        self._prefetcher.begin(len(step.drafted))
        with self._recorder.timed("draft"):
            step = step.cut(self._draft(step, times, go_on))
        self._arrive()
        for layer, nodes in enumerate(step.used):
            needs = {e for node in nodes for e in node}
            result.needs += len(needs)
            result.ready += sum(ExpertKey(layer, e) in self._supply.cache for e in needs)
        with self._recorder.timed("verify"):
            for layer in range(self._trace.num_layers):
                self._verify(step, layer, times, result)
        stats.draft_length = len(step.drafted)
        stats.accepted = len(step.path) - 1
        stats.emitted = len(step.path)
        result.tokens += stats.emitted
        self._recorder.rejected(self._prefetcher.lookahead.rejected(step.path))
        return self._recorder.finish()

    def _draft(self, step: TraceStep, times: Times, go_on: GoOn) -> int:
        """Draft token by token; how many they became."""
        for token, layers in enumerate(step.drafted):
            if token and not go_on(token, self._prefetcher.new_experts):
                return token
            for layer, choice in enumerate(layers):
                self._clock.now += times.draft_layer_s
                self._prefetcher.request(token, layer, drafted_route(choice))
        return len(step.drafted)

    def _arrive(self) -> None:
        """Take in all that has arrived: the link learns of the time only when it is asked."""
        self._link.report()
        self._supply.land()

    def _verify(self, step: TraceStep, layer: int, times: Times, result: Replayed) -> None:
        nodes = step.used[layer]
        self._clock.now += times.layer_s
        self._arrive()
        experts = sorted({e for node in nodes for e in node})
        there = {e for e in experts if ExpertKey(layer, e) in self._supply.cache}
        result.choices += sum(len(node) for node in nodes)
        result.served += sum(e in there for node in nodes for e in node)
        self._prefetcher.observe(layer, verified_route(step, layer))
        with self._recorder.timed("layer", layer):
            for wave in self._prefetcher.serve(layer, experts):
                self._clock.now += times.expert_s * len(wave)


def drafted_route(choice: Choice) -> Route:
    ids, weights = choice
    return Route(torch.tensor([ids]), torch.tensor([weights]))


def verified_route(step: TraceStep, layer: int) -> Route:
    """The exact route, with what the next layer's router said of it."""
    nodes = torch.tensor(step.used[layer])
    following = None
    if layer + 1 < len(step.used) and step.guessed[layer + 1]:
        guesses = step.guessed[layer + 1]

        def following(rows: list[int]) -> torch.Tensor:
            # One more than was named: margins are over the first that is not among the top K.
            logits = torch.zeros(len(rows), 2 + max(max(ids) for ids, _ in guesses))
            for at, row in enumerate(rows):
                ids, margins = guesses[row]
                logits[at, ids] = torch.tensor(margins)
            return logits

    return Route(nodes, torch.ones(nodes.shape), None, following)
