"""Loads experts into the slots of the expert cache."""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice

from speq.errors import present
from speq.scheduler.eviction import EvictionPolicy
from speq.scheduler.expert_cache import ExpertCache
from speq.scheduler.expert_key import ExpertKey
from speq.scheduler.host_share import HostShare
from speq.scheduler.link_pace import LinkThrottle
from speq.scheduler.peer_devices import PeerDevices
from speq.scheduler.transfer import Priority, State, TransferEngine, TransferTicket
from speq.stats import Recorder


class ExpertLoader:
    """Serves layers from slots and loads missing experts.

    An expert is resident, under way (its slot claimed, its ticket open) or neither.

    share   divides missing experts between loading them and computing them on the host; None: all
            are loaded
    peers   experts that further devices hold; None: there are none
    """

    def __init__(self, cache: ExpertCache, transfer: TransferEngine, recorder: Recorder) -> None:
        self.cache = cache
        self._transfer = transfer
        self._recorder = recorder
        self.throttle = LinkThrottle()
        self.share: HostShare | None = None
        self.peers: PeerDevices | None = None
        self._under_way: dict[ExpertKey, TransferTicket] = {}
        # After an interrupt a transfer may still write to a slot that looks free.
        self._unsettled = False

    def serve(
        self,
        layer: int,
        experts: list[int],
        meanwhile: Callable[[], None] = lambda: None,
        wave: int | None = None,
    ) -> Generator[dict[int, int], None, None]:
        """Yield {expert: slot} in waves that together name each of `experts` once, but for those
        that `share` has the host compute, and that `peers` have.

        A wave's slots are valid until the caller asks for the next wave. Resident experts come
        first; the others follow as they arrive. Later waves reuse the slots of past waves, so a
        layer may use more experts than there are slots.

        meanwhile  called when the layer has requested what it can, to prefetch for later layers
        wave       most experts of a wave; smaller waves free their slots sooner
        """
        if self._unsettled:
            self.forget()
        waiting = [ExpertKey(layer, expert) for expert in experts]
        self.cache.pin(waiting)
        try:
            there = set() if self.peers is None else self.peers.take(layer, waiting)
            self.cache.unpin(there)
            waiting = [key for key in waiting if key not in there]
            self.collect_finished(waiting)
            self.cache.policy.visit(layer, [key.expert for key in waiting])
            ready = self._resident(waiting)
            late = sum(key in self._under_way for key in waiting)
            hits = len(ready) + len(there)
            self._recorder.served(layer, requests=len(experts), hits=hits, late=late)
            if self.share is not None:
                waiting = self._without_host_share(layer, waiting, ready)
            while waiting:
                for key in waiting:
                    if key not in ready and not self.load(key, Priority.DEMAND):
                        break
                meanwhile()
                if not ready:
                    self._await_any(waiting)
                    ready = self._resident(waiting)
                    continue
                passing = dict(islice(ready.items(), wave))
                waiting = [key for key in waiting if key not in passing]
                try:
                    yield {key.expert: slot for key, slot in passing.items()}
                finally:
                    self._transfer.launched(passing.values())
                    self.cache.unpin(passing)
                self.cache.trim(layer)
                self.collect_finished(waiting)
                ready = self._resident(waiting)
        finally:
            self.cache.unpin(waiting)
            self._report()
        meanwhile()

    def passed(self, layer: int, experts: list[int]) -> None:
        """Count a layer that ran over resident experts without being served."""
        self.cache.policy.visit(layer, experts)
        self.cache.count_used(layer, experts)
        self._recorder.served(layer, requests=len(experts), hits=len(experts))
        self._report()

    def _without_host_share(
        self, layer: int, keys: list[ExpertKey], ready: Collection[ExpertKey]
    ) -> list[ExpertKey]:
        """Leave out the experts that the host computes."""
        share = present(self.share, "there is no host to divide with")
        share.visit(layer, keys)
        share.copied(self.throttle.transfer_s)
        missing = [key for key in keys if key not in ready and key not in self._under_way]
        chosen = set(share.choose(missing))
        if chosen:
            share.begin()
        self.cache.unpin(chosen)
        return [key for key in keys if key not in chosen]

    def bring_later(self, layer: int, experts: Sequence[int]) -> None:
        """Load experts that the host has computed, for later tokens, as far as the link is free;
        those that are used most first.
        """
        share = present(self.share, "there is no host to divide with")
        keys = share.by_use(ExpertKey(layer, expert) for expert in experts)
        self.load_ahead(keys[::-1], self.room_ahead())

    def runs_rows(self, rows: int) -> None:
        """Layers run so many rows from now on: of few they may have experts of further devices."""
        if self.peers is not None:
            self.peers.rows = rows

    @property
    def unsettled(self) -> bool:
        """True after an interrupt: what slots hold is not known."""
        return self._unsettled

    def held_below(self) -> list[ExpertKey] | None:
        """Return `TransferEngine.held_below`."""
        return self._transfer.held_below()

    def load(self, key: ExpertKey, priority: Priority) -> bool:
        """Request `key` if it is neither resident nor under way; False if no slot is free now."""
        if key in self._under_way:
            if priority is Priority.DEMAND:
                self._transfer.hasten(self._under_way[key])
            return True
        if key in self.cache:
            return True
        slot = self.cache.claim(key.layer, ahead=priority is Priority.PREFETCH)
        if slot is None:
            return False
        try:
            self._under_way[key] = self._transfer.submit(key, slot, priority)
        except Exception:
            self.cache.release(key.layer, slot)
            raise
        except BaseException:  # it may have begun
            self._unsettled = True
            raise
        return True

    def has(self, key: ExpertKey) -> bool:
        """Tell whether `key` is in a slot or under way, or may be had of a further device."""
        there = self.peers is not None and key in self.peers
        return there or key in self.cache or key in self._under_way

    def at_hand(self, layer: int, experts: Iterable[int]) -> list[int]:
        """List those of a layer's experts that are resident or under way."""
        return [expert for expert in experts if self.has(ExpertKey(layer, expert))]

    def residents(self, layer: int, experts: Iterable[int]) -> list[int]:
        """List those of a layer's experts that are resident, without counting a use."""
        if self._unsettled:
            self.forget()
        self.collect_finished()
        return [expert for expert in experts if ExpertKey(layer, expert) in self.cache]

    @contextmanager
    def lend(self, layer: int, experts: Sequence[int]) -> Iterator[dict[int, int]]:
        """Yield {expert: slot} of resident experts and keep them there inside the block.

        Nothing overwrites them before kernels launched in the block have ended. No use is counted:
        an expert prefetched for a verification still waits for it.
        """
        keys = [ExpertKey(layer, expert) for expert in experts]
        slots = {key.expert: self.cache.slot_of(key) for key in keys}
        self.cache.pin(keys)
        try:
            yield slots
        finally:
            self._transfer.launched(slots.values())
            self.cache.unpin(keys)

    def missing(self, layer: int, experts: list[int]) -> set[ExpertKey]:
        """List those of a layer's experts that are neither resident nor under way, and that no
        further device gives.
        """
        keys = (ExpertKey(layer, expert) for expert in experts)
        return {key for key in keys if not self.has(key)}

    def load_ahead(self, keys: list[ExpertKey], room: int) -> int:
        """Prefetch missing experts, at most `room`, while slots are free; return their number.

        No expert of `keys` is evicted for another one.
        """
        asked = 0
        self.cache.pin(keys)
        try:
            for key in keys:
                if not self.has(key):
                    if asked == room or not self.load(key, Priority.PREFETCH):
                        break
                    asked += 1
        finally:
            self.cache.unpin(keys)
        return asked

    def room_ahead(self) -> int:
        """Number of further prefetches that keep the link busy until the next call."""
        return self.throttle.look(self._recorder.clock()) - self.under_way

    @property
    def under_way(self) -> int:
        """Number of experts under way."""
        return len(self._under_way)

    def cancel_prefetch(self, layer: int) -> None:
        """Cancel prefetches of a layer that has passed, if they have not begun."""
        for key, ticket in list(self._under_way.items()):
            if key.layer == layer and self._transfer.cancel(ticket):
                self._close(key, ticket)

    def collect_finished(self, wanted: Collection[ExpertKey] = ()) -> None:
        """Publish the experts that have arrived.

        Raises the error of a failed transfer if its expert is `wanted`. Other failed experts are
        requested again when they are needed.
        """
        self.report()
        ended = [item for item in self._under_way.items() if item[1].ended]
        for key, ticket in ended:
            self._close(key, ticket)
            if ticket.error is not None and key in wanted:
                raise ticket.error

    def report(self) -> None:
        """Measure the transfers that have ended."""
        for ticket in self._transfer.report():
            self.throttle.ended(ticket)

    def _report(self) -> None:
        """Record which prefetches were used or wasted since the last call."""
        for counts, tell in (
            (self.cache.used, self._recorder.used),
            (self.cache.wasted, self._recorder.wasted),
        ):
            for layer, experts in counts.items():
                tell(layer, experts)
            counts.clear()

    def _resident(self, keys: list[ExpertKey]) -> dict[ExpertKey, int]:
        slots = ((key, self.cache.lookup(key)) for key in keys)
        return {key: slot for key, slot in slots if slot is not None}

    def _await_any(self, waiting: list[ExpertKey]) -> None:
        """Wait for one of `waiting`, or for another transfer if none of them is under way."""
        own = [key for key in waiting if key in self._under_way]
        key = (own or list(self._under_way))[0]
        with suppress(Exception):  # `collect_finished` raises it if the expert is wanted
            self._transfer.wait(self._under_way[key])
        self.collect_finished(waiting)

    def _close(self, key: ExpertKey, ticket: TransferTicket) -> None:
        del self._under_way[key]
        if ticket.state is State.DONE:
            self.cache.publish(key, ticket.slot, ticket.ahead)
        else:
            self.cache.release(key.layer, ticket.slot)

    def forget(self) -> None:
        """Wait until no transfer writes to slots, then empty all of them."""
        self._unsettled = True  # an interrupt may strike here as well
        self._transfer.drain()
        self._under_way.clear()
        self.cache.clear()
        self._unsettled = False

    def limit(self, num_slots: int, policy: EvictionPolicy | None = None) -> None:
        """Wait until no transfer writes to slots, and limit the cache: see `ExpertCache.limit`."""
        if self._unsettled:
            self.forget()
        self._transfer.drain()
        self.collect_finished()
        self.cache.limit(num_slots, policy)

    def close(self) -> None:
        self._transfer.close()
