"""Prefetches the experts that a verification needs.

`OnDemand` fetches what is missing when it is asked for, as Mixtral-Offloading does: the baseline
(`--prefetch none`) that everything cleverer is compared with. `ThreePhase` fetches what the draft
names, as it names it (MoE-SpeQ 3.3.2), and for tokens that no draft spoke of what the next layer's
router would say now. Names that no router chose, as a head's, are guesses as well: each kind is
believed as far as it came true so far.
`speq.registries.PREFETCHERS` has them by name.
"""

from collections.abc import Generator, Sequence
from functools import partial
from operator import itemgetter
from typing import ClassVar, Protocol

from speq.routing import Route, RoutePrediction
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.prediction_record import PredictionRecord

# Least probability of a prediction that is acted on: a wrong one costs a transfer, a right one
# hides less than one.
PAYS = 0.65
# During a draft, an expert is worth a transfer if at least this many of the tokens that name it are
# expected to be accepted. An expert of less than its even share of a token's weight counts for
# LIGHT: the exact router often prefers another.
WORTH, LIGHT = 0.6, 0.5
# A prediction costs a router's product, which is lost if all experts are resident. A layer that
# missed nothing for this many visits is not predicted until it does.
QUIET_VISITS = 32
# A pass over residents asks the host nothing while fewer of the predictions than this fetch
# something: the host takes a tenth of such a layer's time or more, and hides a part of a transfer.
# It is a mean of late, in which each prediction has the weight RATE.
SELDOM, RATE = 1 / 8, 1 / 256


class Allowance(Protocol):
    """Limits the experts that a verification may use."""

    def begin(self) -> None:
        """Begin another draft."""

    def named(self, layer: int, route: Route, accept_prob: float) -> None:
        """A drafted token that is accepted with this probability has this route (T = 1)."""

    def predicted(
        self, layer: int, prediction: RoutePrediction, accept_prob: Sequence[float]
    ) -> None:
        """Tokens that no draft has run will probably want these; accept_prob: of each."""

    def worth(self, layer: int, experts: list[int]) -> list[int]:
        """List those of a layer's experts that are worth a transfer, in the same order."""


class AllAllowed:
    """Allows all experts: the exact model."""

    def begin(self) -> None:
        pass

    def named(self, layer: int, route: Route, accept_prob: float) -> None:
        pass

    def predicted(
        self, layer: int, prediction: RoutePrediction, accept_prob: Sequence[float]
    ) -> None:
        pass

    def worth(self, layer: int, experts: list[int]) -> list[int]:
        return experts


class Prefetcher(Protocol):
    """Serves verifications, and observes the draft before them.

    new_experts          number of (layer, expert) pairs that the current draft named and that were
                         neither resident nor under way then: |E_new| of MoE-SpeQ 3.2.2
    predicts_next_layer  True if it predicts the next layer's experts from exact routes
    allowance            limits the experts that are worth a transfer
    """

    predicts_next_layer: ClassVar[bool]
    allowance: Allowance
    lookahead: LookaheadBuffer

    @property
    def new_experts(self) -> int: ...

    def begin(self, draft_length: int, batch_size: int = 1) -> None:
        """A step follows that drafts so many tokens at most for each of some sequences."""

    def request(self, token: int, layer: int, route: Route) -> None:
        """Request the experts of a drafted token, numbered as in `LookaheadBuffer`."""

    def end(self) -> None:
        """End the draft, which may be shorter than announced."""

    def observe(self, layer: int, route: Route) -> None:
        """Learn the exact model's route, just before the layer is served."""

    def serve(self, layer: int, experts: list[int]) -> Generator[dict[int, int], None, None]:
        """Yield {expert: slot} in waves that together name each of `experts` once."""

    @property
    def rests(self) -> bool:
        """True if layers of resident experts need not be served: `passed` is enough."""

    def passed(self, layer: int, route: Route) -> None:
        """Learn the exact route of a layer that ran over its experts in slots."""


class OnDemand:
    """Loads a layer's missing experts when the layer needs them."""

    predicts_next_layer: ClassVar[bool] = False

    def __init__(self, loader: ExpertLoader, lookahead: LookaheadBuffer) -> None:
        self.lookahead = lookahead
        self.allowance: Allowance = AllAllowed()
        self._loader = loader
        self._new: set[ExpertKey] = set()

    @property
    def new_experts(self) -> int:
        return len(self._new)

    def begin(self, draft_length: int, batch_size: int = 1) -> None:
        self.lookahead.clear(batch_size)
        self.allowance.begin()
        self._new.clear()

    def request(self, token: int, layer: int, route: Route) -> None:
        self.lookahead.record(token, layer, route)
        (experts,) = route.ids
        if route.from_router:
            self.allowance.named(layer, route, self.lookahead.accept_prob_of(token))
            self._new |= self._loader.missing(layer, self.allowance.worth(layer, experts))
        self._loader.cache.policy.hint_next_use(layer, experts)

    def end(self) -> None:
        pass

    def observe(self, layer: int, route: Route) -> None:
        self.lookahead.observe(layer, route)
        self._loader.cache.policy.observe(layer, *route.arrays)

    def serve(self, layer: int, experts: list[int]) -> Generator[dict[int, int], None, None]:
        return self._loader.serve(layer, experts)

    @property
    def rests(self) -> bool:
        return True

    def passed(self, layer: int, route: Route) -> None:
        self.observe(layer, route)
        self._loader.passed(layer, route.experts)


class ThreePhase:
    """Prefetches the experts that the draft names, during the draft and its verification.

    The paper (MoE-SpeQ 3.3.2) lets the link rest for the first part of a draft. Here evictions are
    kept to what will have gone anyway (`LookaheadPolicy`), and the link does not rest. While the
    draft goes on, what is likely to be used is loaded; from its last token on (`_saturated`), and
    through the verification, everything.
    """

    predicts_next_layer: ClassVar[bool] = True

    def __init__(self, loader: ExpertLoader, lookahead: LookaheadBuffer) -> None:
        self.lookahead = lookahead
        self.allowance: Allowance = AllAllowed()
        self._loader = loader
        self._predictions, self._names = PredictionRecord(), PredictionRecord()
        # By layer: visits since an expert was missing, or was predicted to be.
        self._quiet = [0] * lookahead.num_layers
        # Mean of late: share of predictions that fetched something.
        self._fetching = 0.0
        self._new: set[ExpertKey] = set()
        self.begin(0)

    @property
    def new_experts(self) -> int:
        return len(self._new)

    def begin(self, draft_length: int, batch_size: int = 1) -> None:
        self.lookahead.clear(batch_size)
        self.allowance.begin()
        self._new.clear()
        self._loader.throttle.pause()
        self._draft_length = draft_length
        self._saturated = draft_length <= 1
        # By layer: of the tokens that want each expert, how many are expected to be accepted.
        self._wanted: list[dict[int, float]] = [{} for _ in range(self.lookahead.num_layers)]
        # Layers with such an expert.
        self._named: set[int] = set()
        # Layers still to come that may miss an expert.
        self._unsettled: set[int] = set()
        self._route: Route | None = None
        # {expert: margin} predicted for the next layer.
        self._predicted: dict[int, float] = {}
        # By layer: {expert: margin} that a draft head named.
        self._head_named: dict[int, dict[int, float]] = {}

    def request(self, token: int, layer: int, route: Route) -> None:
        self.lookahead.record(token, layer, route)
        if route.margins is not None:
            (experts,) = route.ids
            self._expect(token, layer, dict(zip(experts, route.margins[0], strict=True)))
            return
        self.allowance.named(layer, route, self.lookahead.accept_prob_of(token))
        (experts,) = route.ids
        missing = self._loader.missing(layer, experts)
        if not missing and not self._unsettled and self._loader.cache.policy.keeps_all:
            return  # all are resident or under way, and stay
        worth = self.allowance.worth(layer, experts)
        self._new |= {key for key in missing if key.expert in worth}
        self._want(token, layer, experts, route.weights[0])
        self._go_ahead(token, layer, experts)

    def _expect(self, token: int, layer: int, named: dict[int, float]) -> None:
        """Load the experts {expert: margin} that a draft head named, if they are probable."""
        missing = [key.expert for key in self._loader.missing(layer, [*named])]
        if not missing and self._loader.cache.policy.keeps_all:
            return
        head_named = self._head_named.setdefault(layer, {})
        for expert in missing:
            head_named[expert] = max(head_named.get(expert, 0.0), named[expert])
        probable = [e for e in named if self._names.probability(named[e]) >= PAYS]
        accept_prob = self.lookahead.accept_prob_of(token)
        for expert in probable:
            wanted = self._wanted[layer]
            wanted[expert] = wanted.get(expert, 0.0) + accept_prob
        if probable:
            self._named.add(layer)
            self._go_ahead(token, layer, probable)

    def _go_ahead(self, token: int, layer: int, experts: list[int]) -> None:
        """Load missing experts after a token has named some."""
        node = self.lookahead.node(token)
        known = (node + 1) / (self._draft_length + 1)
        self._loader.cache.policy.hint_next_use(layer, experts, known)
        if node + 1 >= self._draft_length:
            self._saturate()
        self._unsettled.add(layer)
        self._loader.collect_finished()
        self._load()

    def end(self) -> None:
        self._saturate()
        if self._unsettled:
            self._loader.collect_finished()
            self._load()

    def _saturate(self) -> None:
        if not self._saturated:
            self._saturated = True
            self._unsettled = set(self._named)

    def _want(self, token: int, layer: int, experts: list[int], weights: list[float]) -> None:
        """Count a token's experts by its acceptance probability: 1 for a pending token."""
        accept_prob, even = self.lookahead.accept_prob_of(token), sum(weights) / len(experts)
        wanted = self._wanted[layer]
        self._named.add(layer)
        for expert, weight in zip(experts, weights, strict=True):
            chance = (
                accept_prob
                if token < self.lookahead.batch_size or weight >= even
                else accept_prob * LIGHT
            )
            wanted[expert] = wanted.get(expert, 0.0) + chance

    def observe(self, layer: int, route: Route) -> None:
        self.lookahead.observe(layer, route)
        self._loader.cache.policy.observe(layer, *route.arrays)
        self._route = route

    @property
    def rests(self) -> bool:
        return not self._unsettled and self._fetching < SELDOM

    def passed(self, layer: int, route: Route) -> None:
        experts = route.experts
        if self._loader.cache.policy.keeps_all:
            self.lookahead.observe(layer, route)
            self._predicted = {}
        else:
            self.observe(layer, route)
            self._route = None
            self._enter(layer, experts)
            self._loader.cancel_prefetch(layer)
        self._loader.passed(layer, experts)

    def serve(self, layer: int, experts: list[int]) -> Generator[dict[int, int], None, None]:
        self._enter(layer, experts)
        yield from self._loader.serve(layer, experts, partial(self._look_ahead, layer))
        self._loader.cancel_prefetch(layer)

    def _enter(self, layer: int, experts: list[int]) -> None:
        """Compare what was foretold of a layer with its experts."""
        self._saturated = True
        # What had come may have gone again.
        self._unsettled = {at for at in self._named if at > layer}
        self._predictions.learn(self._predicted, set(experts))
        self._names.learn(self._head_named.pop(layer, {}), set(experts))
        quiet = not self._predicted and not self._loader.missing(layer, experts)
        self._quiet[layer] = self._quiet[layer] + 1 if quiet else 0
        self._predicted = {}

    def _look_ahead(self, layer: int) -> None:
        """Predict and load experts of later layers while a layer waits or computes."""
        if self._route is not None:
            route, self._route = self._route, None
            if layer + 1 < len(self._quiet) and self._quiet[layer + 1] < QUIET_VISITS:
                self._predict(layer + 1, route)
            else:
                self._fetching -= RATE * self._fetching
        self._load()

    def _predict(self, layer: int, route: Route) -> None:
        """Predict a layer's experts for rows whose token no draft router has run."""
        knows, token_of = self.lookahead.knows, self.lookahead.token_of
        unnamed = [row for row in route.rows if not knows(token_of(row), layer)]
        prediction = route.predict_next_layer(unnamed) if unnamed else None
        if prediction is None:
            return
        accept_prob = [self.lookahead.accept_prob_of(token_of(row)) for row in unnamed]
        self.allowance.predicted(layer, prediction, accept_prob)
        predicted: dict[int, float] = {}
        for ids, margins in zip(prediction.ids, prediction.margins, strict=True):
            for expert, margin in zip(ids, margins, strict=True):
                predicted[expert] = max(predicted.get(expert, 0.0), margin)
        probable = [e for e in predicted if self._predictions.probability(predicted[e]) >= PAYS]
        self._loader.cache.policy.hint_next_use(layer, probable, known=1.0)
        named = self._wanted[layer]
        self._predicted = {
            expert: margin
            for expert, margin in predicted.items()
            if expert not in named and not self._loader.has(ExpertKey(layer, expert))
        }
        fetched = [expert for expert in probable if expert in self._predicted]
        self._fetching += RATE * (bool(fetched) - self._fetching)
        for expert in fetched:
            named[expert] = 1.0
            self._named.add(layer)
            self._unsettled.add(layer)

    def _load(self) -> None:
        """Load missing experts by layer, those that most tokens use first.

        It loads no more than keeps the link busy until the next call.
        """
        worth = 0.0 if self._saturated else WORTH
        room = self._loader.room_ahead()
        for layer in sorted(self._unsettled):
            if room <= 0:
                return
            wanted = [expert for expert, tokens in self._by_want(layer) if tokens >= worth]
            keys = [ExpertKey(layer, expert) for expert in self.allowance.worth(layer, wanted)]
            if all(map(self._loader.has, keys)):
                self._unsettled.remove(layer)
            else:
                room -= self._loader.load_ahead(keys, room)

    def _by_want(self, layer: int) -> list[tuple[int, float]]:
        """List (expert, tokens) of a layer, those that most tokens use first."""
        return sorted(self._wanted[layer].items(), key=itemgetter(1), reverse=True)
