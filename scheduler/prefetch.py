"""Has the experts a layer needs in slots when it computes.

`OnDemand` fetches what is missing when it is asked for, as Mixtral-Offloading does: the baseline
(`--prefetch none`) that everything cleverer is compared with.
"""

from collections.abc import Generator

from speq.routing import Route
from speq.scheduler.expert_cache import ExpertCache, ExpertKey
from speq.scheduler.lookahead import LookaheadBuffer
from speq.scheduler.transfer import Priority, TransferEngine
from speq.stats import Recorder


class OnDemand:
    """Serve a layer's experts out of the slots, fetching those that are missing one by one."""

    def __init__(
        self,
        cache: ExpertCache,
        transfer: TransferEngine,
        lookahead: LookaheadBuffer,
        recorder: Recorder,
    ) -> None:
        self.cache = cache
        self.lookahead = lookahead
        self._transfer = transfer
        self._recorder = recorder

    def request(self, token: int, layer: int, route: Route) -> None:
        """A draft's route, as soon as it is known. Recorded; nothing is fetched ahead."""
        self.lookahead.record(token, layer, route)

    def serve(self, layer: int, experts: list[int]) -> Generator[dict[int, int], None, None]:
        """Yield {expert: slot} in waves that together name each of `experts` once.

        A wave's slots stay valid until the next wave is asked for. Experts already in slots come
        in the first wave, before a miss could evict them; with enough slots there is one wave.
        """
        keys = [ExpertKey(layer, expert) for expert in experts]
        resident = {key: slot for key in keys if (slot := self.cache.lookup(key)) is not None}
        missing = [key for key in keys if key not in resident]
        self._recorder.served(requests=len(keys), hits=len(resident))

        size = self.cache.policy.quota(layer)
        waves = [(resident, missing)]
        if len(keys) > size:
            waves = [(resident, [])] if resident else []
            waves += [({}, missing[at : at + size]) for at in range(0, len(missing), size)]
        for held, wanted in waves:
            with self.cache.pinned([*held, *wanted]):
                slots = held | {key: self._fetch(key) for key in wanted}
                yield {key.expert: slot for key, slot in slots.items()}

    def _fetch(self, key: ExpertKey) -> int:
        slot = self.cache.claim(key.layer)
        try:
            self._transfer.wait(self._transfer.submit(key, slot, Priority.DEMAND))
        except BaseException:  # Ctrl-C included: the slot must not be lost
            self.cache.release(key.layer, slot)
            raise
        self.cache.publish(key, slot)
        return slot

    def forget(self) -> None:
        """Take every slot for empty, whatever state an interrupt left them in."""
        self.cache.clear()

    def close(self) -> None:
        self._transfer.close()
