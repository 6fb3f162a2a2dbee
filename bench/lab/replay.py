"""Recorded routes through the engine's loop and the real scheduler, on a simulated clock."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.lab.simulated_link import SimulatedClock, SimulatedLink
from speq.config import SamplingParams
from speq.engine.draft import Draft
from speq.engine.drafter import DraftRequest
from speq.engine.engine import Engine
from speq.engine.offload import Offload
from speq.engine.request import Request
from speq.governor.batches import Governors
from speq.governor.draft_length import FixedDraftLength
from speq.measure.route_trace import Choice, RouteTrace, TraceStep
from speq.models.moe_model import Scored
from speq.models.packed_batch import SequenceTokens
from speq.registries import CACHE_POLICIES, PREFETCHERS
from speq.routing import Route
from speq.scheduler.expert_cache import ExpertCache
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.row_pruning import RowPruner
from speq.stats import Recorder, RunStats

# The drafted token that the exact model chooses where the draft was right: any other there is not.
STANDS = 1
# What an engine has besides, and no replay asks for.
NOTHING: Any = None


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
class ReplayScheduling:
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


class RecordedRoutes:
    """The round at hand as the engine's drafter and model: its routes, its outcome, its times.

    round  the next one, its draft as long as was recorded; found: is added to
    """

    def __init__(
        self,
        times: Times,
        clock: SimulatedClock,
        recorder: Recorder,
        link: SimulatedLink,
        offload: Offload,
    ) -> None:
        self._times = times
        self._clock = clock
        self._recorder = recorder
        self._link = link
        self._loader = offload.loader
        self._prefetcher = offload.prefetcher
        self.round: TraceStep
        self.found = Replayed(RunStats(0.0, {}))

    def propose(self, asked: DraftRequest) -> Draft:
        """Name the drafted routes, token by token, as far as `continue_draft` lets it."""
        whole, drafted = self.round.cut(asked.limits.length), 0
        for token, layers in enumerate(whole.drafted):
            if token and not asked.continue_draft(token, whole.leads[token - 1]):
                break
            for layer, choice in enumerate(layers):
                self._clock.now += self._times.draft_layer_s
                asked.on_route(token, layer, drafted_route(choice))
            drafted += 1
        self._round = whole.cut(drafted)
        return Draft.chain([STANDS] * drafted, self._round.leads)

    def score(self, batch: Sequence[SequenceTokens]) -> list[Scored]:
        """Serve every layer of the verification; logits are such that the path is accepted."""
        nodes_scored = len(batch[0].token_ids)
        step, found = self._round, self.found
        self._arrive()
        for layer, nodes in enumerate(step.used):
            needs = {e for node in nodes for e in node}
            found.needs += len(needs)
            found.ready += sum(ExpertKey(layer, e) in self._loader.cache for e in needs)
        for layer in range(len(step.used)):
            self._verify(step, layer)
        found.tokens += step.emitted
        accepted = torch.arange(nodes_scored) < len(step.path) - 1
        logits = torch.stack([~accepted, accepted], dim=1).float()
        return [Scored(logits, logits)]

    def settle(self) -> None:
        """Nothing waits to be kept or forgotten."""

    def keep_path(self, path: list[int]) -> None:
        """There is no KV cache to keep anything in."""

    def _arrive(self) -> None:
        """Take in all that has arrived: the link learns of the time only when it is asked."""
        self._link.report()
        self._loader.collect_finished()

    def _verify(self, step: TraceStep, layer: int) -> None:
        nodes, found = step.used[layer], self.found
        self._clock.now += self._times.layer_s
        self._arrive()
        experts = sorted({e for node in nodes for e in node})
        there = {e for e in experts if ExpertKey(layer, e) in self._loader.cache}
        found.choices += sum(len(node) for node in nodes)
        found.served += sum(e in there for node in nodes for e in node)
        self._prefetcher.observe(layer, verified_route(step, layer))
        with self._recorder.timed("layer", layer):
            for wave in self._prefetcher.serve(layer, experts):
                self._clock.now += self._times.expert_s * len(wave)


class Replay:
    """One scheduler over one trace, by the engine's own loop."""

    def __init__(self, trace: RouteTrace, times: Times, scheduling: ReplayScheduling) -> None:
        self._trace = trace
        self._clock = clock = SimulatedClock()
        recorder = Recorder(clock)
        layers, experts = trace.num_layers, trace.num_experts
        policy = CACHE_POLICIES[scheduling.policy](scheduling.slots, layers, experts)
        link = SimulatedLink(clock, recorder, times.transfer_s, times.moved_bytes, times.begun)
        loader = ExpertLoader(ExpertCache(scheduling.slots, policy), link, recorder)
        prefetcher = PREFETCHERS[scheduling.prefetch](loader, LookaheadBuffer(layers))
        rows = RowPruner(loader, prefetcher.lookahead, None)
        offload = Offload(
            NOTHING, prefetcher, NOTHING, NOTHING, loader, NOTHING, NOTHING, rows, NOTHING
        )
        self._recorded = RecordedRoutes(times, clock, recorder, link, offload)
        model: Any = self._recorded
        self._engine = Engine(
            model=model,
            caches=[model],
            offload=offload,
            verification=model,
            drafters=[model],
            governors=Governors(FixedDraftLength(0), most_rows=sys.maxsize),
            recorder=recorder,
            chunk=0,
        )
        self._request = Request([0], SamplingParams(max_new_tokens=sys.maxsize))

    def run(self, warm_up: int = 0) -> Replayed:
        """Replay all steps; the first `warm_up` fill the slots and do not count."""
        recorder, recorded = self._engine.recorder, self._recorded
        for number, step in enumerate(self._trace.steps):
            if number in (0, warm_up):
                recorded.found = Replayed(recorder.begin_run(RunStats(self._clock.now, {})))
            recorded.round = step
            self._engine.step([self._request], len(step.drafted))
        return recorded.found


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

    return Route(nodes, torch.tensor(step.weights[layer]), None, following)
