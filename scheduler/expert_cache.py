"""Which expert lies in which slot, and which one makes room for the next."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol


class ExpertKey(NamedTuple):
    """An expert of the model: its MoE layer (counted among MoE layers) and its index there."""

    layer: int
    expert: int


class EvictionPolicy(Protocol):
    """Says how many slots a layer may fill, and orders residents by how soon they may go."""

    def quota(self, layer: int) -> int:
        """Slots the layer may fill at a time, at least one."""

    def touch(self, key: ExpertKey) -> None:
        """`key` was asked for and is, or is about to be, resident."""

    def forget(self, key: ExpertKey) -> None:
        """`key` is no longer resident."""

    def clear(self) -> None:
        """No key is resident."""

    def candidates(self, layer: int) -> Iterable[ExpertKey]:
        """Residents to evict for an expert of `layer`, the first to go first."""


class LruPolicy:
    """An equal share of slots for each layer, least recently used out first.

    The policy of Mixtral-Offloading (arXiv:2312.17238). A single order over all layers would be
    useless below the experts of a whole pass: layers are visited in turn, so that each would find
    its experts evicted by the layers since.
    """

    def __init__(self, num_slots: int, num_layers: int) -> None:
        self._share, self._rest = divmod(num_slots, num_layers)
        self._num_layers = num_layers
        self.clear()

    def clear(self) -> None:
        self._all: OrderedDict[ExpertKey, None] = OrderedDict()
        self._own: list[OrderedDict[ExpertKey, None]] = [
            OrderedDict() for _ in range(self._num_layers)
        ]

    def quota(self, layer: int) -> int:
        return max(1, self._share + (layer < self._rest))

    def touch(self, key: ExpertKey) -> None:
        for order in (self._all, self._own[key.layer]):
            order[key] = None
            order.move_to_end(key)

    def forget(self, key: ExpertKey) -> None:
        del self._all[key], self._own[key.layer][key]

    def candidates(self, layer: int) -> Iterable[ExpertKey]:
        # With fewer slots than layers a layer may have none of its own to give.
        own = self._own[layer]
        return own if len(own) >= self.quota(layer) else self._all


class ExpertCache:
    """One arena of slots, divided among layers by the policy. Bookkeeping only: it moves no bytes.

    A slot is free, being filled (claimed, not yet published) or holds an expert; experts in use
    are pinned and are not evicted.
    """

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        assert num_slots > 0
        self.num_slots = num_slots
        self.policy = policy
        self.clear()

    def clear(self) -> None:
        """Empty every slot, whatever was in it or under way to it."""
        self.policy.clear()
        self._slots: dict[ExpertKey, int] = {}
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._filled: Counter[int] = Counter()
        self._pins: Counter[ExpertKey] = Counter()

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def lookup(self, key: ExpertKey) -> int | None:
        """The slot that holds `key`, which counts as a use, or None."""
        slot = self._slots.get(key)
        if slot is not None:
            self.policy.touch(key)
        return slot

    def claim(self, layer: int) -> int:
        """A slot for an expert of `layer`, emptied if need be. Publish or release it."""
        if self._free and self._filled[layer] < self.policy.quota(layer):
            self._filled[layer] += 1
            return self._free.pop()
        victim = next((k for k in self.policy.candidates(layer) if k not in self._pins), None)
        assert victim is not None, "every slot is pinned or being filled"
        self.policy.forget(victim)
        self._filled[victim.layer] -= 1
        self._filled[layer] += 1
        return self._slots.pop(victim)

    def publish(self, key: ExpertKey, slot: int) -> None:
        """`slot`, claimed for its layer before, now holds `key`."""
        assert key not in self._slots
        self._slots[key] = slot
        self.policy.touch(key)

    def release(self, layer: int, slot: int) -> None:
        """Give back a slot claimed for `layer` that was not filled."""
        self._filled[layer] -= 1
        self._free.append(slot)

    @contextmanager
    def pinned(self, keys: Iterable[ExpertKey]) -> Iterator[None]:
        """Keep `keys` from eviction inside the block."""
        held = list(keys)
        self._pins.update(held)
        try:
            yield
        finally:
            for key in held:
                if self._pins[key] > 1:
                    self._pins[key] -= 1
                else:  # or the cache was cleared meanwhile
                    self._pins.pop(key, None)
