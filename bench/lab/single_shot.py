"""Prefetching once a draft, sooner or later: what `three-phase` is compared with.

MoE-SpeQ's Table 3 has both. They are not of the product: `offered` adds them to the modes that
`--prefetch` may name for as long as a bench runs.
"""

from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager

from speq.registries import PREFETCHERS
from speq.routing import Route
from speq.scheduler.expert_cache import ExpertKey
from speq.scheduler.expert_loader import ExpertLoader
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.prefetch import OnDemand


class SingleShot(OnDemand):
    """Ask for all that the draft named so far, at one moment of it."""

    def __init__(self, loader: ExpertLoader, lookahead: LookaheadBuffer) -> None:
        super().__init__(loader, lookahead)
        self.begin(0)

    def begin(self, draft_length: int, texts: int = 1) -> None:
        super().begin(draft_length, texts)
        self._loader.throttle.pause()
        self._draft_length = draft_length
        # By layer: how many tokens want each expert.
        self._wanted: list[Counter[int]] = [Counter() for _ in range(self.lookahead.num_layers)]

    def request(self, token: int, layer: int, route: Route) -> None:
        self.lookahead.record(token, layer, route)
        (experts,) = route.ids
        self._new |= self._loader.missing(layer, experts)
        self._wanted[layer].update(experts)
        known = (self.lookahead.node(token) + 1) / (self._draft_length + 1)
        self._loader.cache.policy.hint_next_use(layer, experts, known)

    def serve(self, layer: int, experts: list[int]) -> Generator[dict[int, int], None, None]:
        yield from self._loader.serve(layer, experts)
        self._loader.cancel_prefetch(layer)

    def _load(self) -> None:
        """Ask for what is wanted and missing, by layer, what most tokens want first."""
        for layer, wanted in enumerate(self._wanted):
            keys = [ExpertKey(layer, expert) for expert, _ in wanted.most_common()]
            self._loader.load_ahead(keys, len(keys))


class SingleSooner(SingleShot):
    """When the first drafted token has named its experts."""

    def request(self, token: int, layer: int, route: Route) -> None:
        super().request(token, layer, route)
        first = token + 1 == self.lookahead.batch_size  # of the last request
        if first and layer + 1 == self.lookahead.num_layers:
            self._load()


class SingleLater(SingleShot):
    """When the last drafted token has."""

    def end(self) -> None:
        self._load()


MODES = {
    "single-sooner": (SingleSooner, "once, when the first drafted token has named its experts"),
    "single-later": (SingleLater, "once, when the last drafted token has"),
}


@contextmanager
def offer_single_shots() -> Iterator[None]:
    """Have both modes among the choices, where they are not yet, until the block ends."""
    with ExitStack() as stack:
        for name, (prefetcher, summary) in MODES.items():
            if name not in PREFETCHERS:
                stack.enter_context(PREFETCHERS.registered(name, prefetcher, summary))
        yield
