"""The KV cache of a text: fixed storage, and a length.

Rolling back is setting the length; keeping the accepted path of a tree moves its entries together.
Draft and target share it. Addresses never move. Texts that run side by side have a cache each, so
that each of them grows, is rolled back and is forgotten by itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from speq.errors import Broken
from speq.models.attention import KVShapes
from speq.models.length import Length
from speq.models.states import NO_STATES, StateShape
from speq.models.tree import Tree

# What was done to the KV cache of that number: the name of the method, and what it was given.
Change = tuple[int, str, Any]


class KVLayer(CacheLayerMixin):
    """Keys and values of one layer, [1, heads, C, width].

    row  both without the first dimension
    """

    is_croppable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, length: Length) -> None:
        super().__init__()
        self.keys, self.values, self.length = keys, values, length
        self.row = keys[0], values[0]
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    @property
    def tensors(self) -> list[Tensor]:
        return [self.keys, self.values]

    def keep(self, start: int, nodes: Tensor) -> None:
        """Of entries from `start` on keep those at `nodes`, in that order."""
        for entries in self.row:
            entries[:, start : start + len(nodes)] = entries[:, nodes]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, kwargs: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Write T entries behind the length; return all entries up to the last of them.

        kwargs  what attention is given besides, of which transformers 5.24 tells caches of its own
        """
        start = self.length.count
        end = start + key_states.shape[2]
        if end > self.keys.shape[2]:
            raise Broken(f"{end} tokens do not fit into a KV cache of {self.keys.shape[2]}")
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length.count + query_length, 0

    def get_seq_length(self) -> int:
        return self.length.count

    def get_max_length(self) -> int:
        return self.keys.shape[2]

    def get_max_cache_shape(self) -> int:
        return self.keys.shape[2]


class PlacedKVLayer(KVLayer):
    """A view of a KVLayer, written to where a tensor says.

    Its shapes depend on no length: a recorded pass is right for all of them.

    places  [T] int64 on the device: where the next entries go
    seen    entries that attention gets to see; the mask hides those behind each of `places`
    """

    def __init__(self, layer: KVLayer, places: Tensor, seen: int) -> None:
        super().__init__(layer.keys, layer.values, layer.length)
        if seen > layer.keys.shape[2]:
            raise Broken(f"attention over {seen} entries of a KV cache of {layer.keys.shape[2]}")
        self._places, self._seen = places, seen

    def update(
        self, key_states: Tensor, value_states: Tensor, kwargs: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Write T entries; return the first `seen`."""
        self.keys.index_copy_(2, self._places, key_states)
        self.values.index_copy_(2, self._places, value_states)
        return self.keys[:, :, : self._seen], self.values[:, :, : self._seen]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._seen, 0


class NoLayer(KVLayer):
    """Stands for a layer that another machine holds, with its entries."""

    def __init__(self, dtype: torch.dtype, device: torch.device, length: Length) -> None:
        nothing = torch.empty(1, 0, 0, 0, dtype=dtype, device=device)
        super().__init__(nothing, nothing, length)
        self.row = ()  # type: ignore[assignment]

    @property
    def tensors(self) -> list[Tensor]:
        return []


class KVCache(Cache):
    """Room for `capacity` tokens of one text.

    kv_shapes  (heads, width) of keys and of values, in each layer
    by_layer   kv_shapes of each layer, where they differ
    number     among the caches of texts that run side by side
    states     layers that keep states in place of entries
    own        layers that are held here; None: all of them
    known      tokens that the first entries are of, where another text may begin with the same ones
    written    entries that passes have written, kept or not, where caches follow others: no length
               goes beyond them
    ends       where the passes ended that made these entries
    owner      whose text it is: other owners' texts have nothing of it
    changes    where it is noted what is done to it, for caches elsewhere that follow; None: it is
               not
    """

    def __init__(
        self,
        num_layers: int,
        kv_shapes: KVShapes,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        number: int = 0,
        states: StateShape = NO_STATES,
        own: range | None = None,
        by_layer: tuple[KVShapes, ...] = (),
    ) -> None:
        self.capacity, self.number = capacity, number
        self.written = 0
        self.keeps_entries = states.kind is None
        self.changes: list[Change] | None = None
        self.known: list[int] = []
        self.ends: list[int] = []
        self.owner = ""
        self._length = length = Length()

        def storage(shape: tuple[int, int]) -> Tensor:
            heads, width = shape
            return torch.zeros(1, heads, capacity, width, dtype=dtype, device=device)

        def made(layer: int) -> Any:
            if own is not None and layer not in own:
                return NoLayer(dtype, device, length)
            if states.kind is not None and layer in states.layers:
                return states.kind.layer(dtype, device, length)
            keys, values = by_layer[layer] if by_layer else kv_shapes
            return KVLayer(storage(keys), storage(values), length)

        super().__init__(layers=[made(layer) for layer in range(num_layers)])

    @property
    def length(self) -> int:
        """Entries that are kept."""
        return self._length.count

    @length.setter
    def length(self, count: int) -> None:
        self._note("length", count)
        self._cut(count)

    def _note(self, name: str, given: Any = None) -> None:
        if self.changes is not None:
            self.changes.append((self.number, name, given))

    def _cut(self, count: int) -> None:
        if not 0 <= count <= self.capacity:
            raise Broken(f"a KV cache of {self.capacity} tokens is to keep {count}")
        length = self._length
        if not count:
            length.sequence, length.settled, self.written = length.sequence + 1, 0, 0
        length.count, length.settled = count, min(length.settled, count)
        del self.known[count:]
        self.ends = [end for end in self.ends if end <= count]

    def settle(self) -> None:
        """All entries that are kept will not be given up as long as the text lasts."""
        self._note("settle")
        self._length.settled = self._length.count

    def begin_pass(self, tree: Tree | None, reading: bool = False) -> None:
        """Tokens are about to be run behind the length; tree: as whose nodes; reading: all of them
        stay.
        """
        self._length.tree, self._length.reading = tree, reading

    def tensors(self) -> list[Tensor]:
        return [tensor for layer in self.layers for tensor in layer.tensors]

    def placed(self, places: Tensor, seen: int) -> Cache:
        """The same entries, seen and written as `PlacedKVLayer` says."""
        return Cache(layers=[PlacedKVLayer(layer, places, seen) for layer in self.layers])

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def clear(self) -> None:
        self.length = 0

    def erase(self) -> None:
        """Forget everything, and have numbers behind the length.

        Recorded passes give no weight to entries there, but what is no number would remain.
        """
        self._note("erase")
        self._cut(0)
        for tensor in self.tensors():
            tensor.zero_()

    def take(self, other: "KVCache", count: int) -> None:
        """Have the first `count` entries of another text, which are known, and no others."""
        self._note("take", (other.number, count))
        self._cut(0)
        for layer, theirs in zip(self.layers, other.layers, strict=True):
            for entries, found in zip(layer.row, theirs.row, strict=True):
                entries[:, :count] = found[:, :count]
        self._cut(count)
        self.written = count
        self.known = other.known[:count]
        self.ends = [end for end in other.ends if end <= count]

    def advance(self, count: int) -> None:
        """Keep the `count` entries last written."""
        self.length += count

    def rewind(self, count: int) -> None:
        """Forget the last `count` entries."""
        self.length -= count

    def keep_path(self, path: list[int]) -> None:
        """Of the tree last written, keep the nodes of `path`, in that order."""
        self._note("keep_path", path)
        start = self.length
        if path != list(range(len(path))):
            nodes = torch.tensor(path, device=self.tensors()[0].device) + start
            for layer in self.layers:
                layer.keep(start, nodes)
        self._cut(start + len(path))


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def causal_mask(positions: Tensor, end: int, window: int | None) -> Tensor:
    """Which of a row's entries each of its tokens sees, where they follow one another.

    positions  [B, T] int64, of the tokens in their texts; their entries lie there as well
    end        entries there are
    window     tokens a query may look back, itself included; None: all
    returns    [B, 1, T, end] bool, true where seen
    """
    entry = torch.arange(end, device=positions.device)
    query = positions[:, :, None]
    visible = entry <= query
    if window is not None:
        visible &= entry > query - window
    return visible[:, None]


def attention_mask(
    roots: Tensor, depths: Tensor, ancestors: Tensor, end: int, window: int | None
) -> Tensor:
    """Which cached entries the last T of a tree's N nodes see: all of the row's past and their own
    ancestors.

    roots      [B] int64, where the entry of each row's root lies; those of other nodes follow
    depths     [N] int64, distance from the tree's root
    ancestors  [T, N] bool, true at a node itself and above it
    end        entries there are: max(roots) + N
    window     tokens a query may look back, itself included; None: all
    returns    [B, 1, T, end] bool, true where seen
    """
    nodes = len(depths)
    entry = torch.arange(end, device=roots.device)
    node = entry - roots[:, None]  # [B, end]; negative: past, beyond the tree: not this row's
    inside = (node >= 0) & (node < nodes)
    node = node.clamp(0, nodes - 1)
    visible = (entry < roots[:, None])[:, None] | (
        inside[:, None] & ancestors[:, node].permute(1, 0, 2)
    )
    if window is not None:
        position = torch.where(inside, roots[:, None] + depths[node], entry)
        query = roots[:, None] + depths[nodes - len(ancestors) :]
        visible &= position[:, None] > query[:, :, None] - window
    return visible[:, None]
