"""The KV cache of a sequence: fixed storage and a length.

Rollback sets the length; keeping the accepted path of a tree moves its KV together. Draft and
target share the cache. Addresses never move. Each sequence of a batch has its own cache, so that it
grows, rolls back and is forgotten independently.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from speq.errors import Broken, present
from speq.kernels.decoder_ops import Positions
from speq.models.attention import KVShapes
from speq.models.length import Length
from speq.models.states import NO_STATES, StateShape, StateSnapshot
from speq.models.tree import Tree

# A change to the KV cache of a KV slot: the slot, the name of the method, and its argument.
Change = tuple[int, str, Any]

NO_INDEXER = "an indexer's keys were given to a layer without an indexer"


class KVLayer(CacheLayerMixin):
    """Keys and values of one layer, [1, heads, C, width].

    index_keys  [1, 1, C, width], keys of an indexer; None: the layer has none
    row         all of them without the first dimension; used by the fused decoder
    """

    is_croppable = True
    is_sliding = False
    # transformers would keep the positions of all tokens here; ours are found by masks.
    indexer_position_ids = property(lambda self: None, lambda self, given: None)

    def __init__(
        self, keys: Tensor, values: Tensor, length: Length, index_keys: Tensor | None = None
    ) -> None:
        super().__init__()
        self.keys, self.values, self.length = keys, values, length
        self.index_keys = index_keys
        self.row = tuple(each[0] for each in self.tensors)
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    @property
    def tensors(self) -> list[Tensor]:
        both = [self.keys, self.values]
        return both if self.index_keys is None else [*both, self.index_keys]

    def keep(self, start: int, nodes: Tensor) -> None:
        """Keep, of the KV from `start` on, that at positions `nodes`, in that order."""
        for storage in self.row:
            storage[:, start : start + len(nodes)] = storage[:, nodes]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, kwargs: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Write the KV of T tokens after the length. Return all KV up to the last of them.

        kwargs  further arguments that transformers 5.24 passes to caches
        """
        start = self.length.count
        end = start + key_states.shape[2]
        if end > self.keys.shape[2]:
            raise Broken(f"{end} tokens do not fit into a KV cache of {self.keys.shape[2]}")
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def update_indexer(self, index_keys: Tensor) -> Tensor:
        """Write an indexer's keys [1, T, width] as `update` does. Return all of them."""
        held, start = present(self.index_keys, NO_INDEXER)[:, 0], self.length.count
        end = start + index_keys.shape[1]
        held[:, start:end] = index_keys
        return held[:, :end]

    def choose(self, indexer: Any, positions: Positions, *rows: Tensor) -> Tensor | None:
        """Have an indexer choose for tokens after the length, whose keys it writes: [T, ...] bool
        of cached tokens; None: all that they see.

        rows  [T, ...] each, what it chooses by
        """
        keys = present(self.index_keys, NO_INDEXER)[0, 0]
        chosen: Tensor | None = indexer.choose_cached(*rows, positions, self.length.count, keys)
        return chosen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length.count + query_length, 0

    def get_seq_length(self) -> int:
        return self.length.count

    def get_max_length(self) -> int:
        return self.keys.shape[2]

    def get_max_cache_shape(self) -> int:
        return self.keys.shape[2]


class PlacedKVLayer(KVLayer):
    """A view of a KVLayer that writes at positions given by a tensor.

    Its shapes do not depend on the length, so a recorded pass is valid for any length.

    places  [T] int64 on the device: where the next KV is written
    seen    cached tokens that attention reads; the mask hides those after each of `places`
    """

    def __init__(self, layer: KVLayer, places: Tensor, seen: int) -> None:
        super().__init__(layer.keys, layer.values, layer.length, layer.index_keys)
        if seen > layer.keys.shape[2]:
            raise Broken(f"attention over {seen} tokens of a KV cache of {layer.keys.shape[2]}")
        self._places, self._seen = places, seen

    def update(
        self, key_states: Tensor, value_states: Tensor, kwargs: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Write the KV of T tokens. Return that of the first `seen`."""
        self.keys.index_copy_(2, self._places, key_states)
        self.values.index_copy_(2, self._places, value_states)
        return self.keys[:, :, : self._seen], self.values[:, :, : self._seen]

    def update_indexer(self, index_keys: Tensor) -> Tensor:
        held = present(self.index_keys, NO_INDEXER)[:, 0]
        held.index_copy_(1, self._places, index_keys)
        return held[:, : self._seen]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._seen, 0


class NoLayer(KVLayer):
    """Placeholder for a layer whose KV is on another machine."""

    def __init__(self, dtype: torch.dtype, device: torch.device, length: Length) -> None:
        nothing = torch.empty(1, 0, 0, 0, dtype=dtype, device=device)
        super().__init__(nothing, nothing, length)
        self.row = ()

    @property
    def tensors(self) -> list[Tensor]:
        return []


class KVCache(Cache):
    """KV of up to `capacity` tokens of one sequence.

    kv_shapes  (heads, width) of what each layer caches, as `AttentionShape` has it
    by_layer   kv_shapes of each layer, where they differ
    number     KV slot
    states     layers that keep states in place of KV
    snapshots  copies of all states that are kept at most, for later sequences
    own        layers that are held here; None: all of them
    known      first cached tokens, if a later sequence may reuse them
    written    tokens that passes have written, kept or not, where the cache mirrors another: no
               length exceeds it
    ends       lengths at which the passes ended that wrote the KV
    owner      owner of the sequence: sequences of other owners do not reuse its KV
    changes    log of changes for caches that mirror this one; None: not logged
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
        snapshots: int = 0,
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
            kind = states.kind_of(layer)
            if kind is not None:
                return kind.layer(dtype, device, length)
            keys, values, *others = map(storage, by_layer[layer] if by_layer else kv_shapes)
            return KVLayer(keys, values, length, *others)

        super().__init__(layers=[made(layer) for layer in range(num_layers)])
        held = [each for each in states.layers if own is None or each in own]
        self._snapshots = [
            StateSnapshot({each: self.layers[each].new_snapshot() for each in held})
            for _ in range(snapshots if held else 0)
        ]

    @property
    def length(self) -> int:
        """Number of cached tokens."""
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
        for snapshot in self._snapshots:
            snapshot.count = snapshot.count if snapshot.count <= count else 0
        del self.known[count:]
        self.ends = [end for end in self.ends if end <= count]

    def settle(self) -> None:
        """Mark all cached tokens as final: they will not be rolled back as long as the sequence
        lasts.
        """
        self._note("settle")
        self._length.settled = self._length.count

    def begin_pass(self, tree: Tree | None, reading: bool = False) -> None:
        """Begin a pass over tokens after the length.

        tree     the tree whose nodes they are; None: a chain
        reading  the tokens are of a prompt and are never rolled back
        """
        self._length.tree, self._length.reading = tree, reading

    def tensors(self) -> list[Tensor]:
        copies = [each for kept in self._snapshots for each in kept.tensors.values()]
        return [each for part in (*(at.tensors for at in self.layers), *copies) for each in part]

    def placed(self, places: Tensor, seen: int) -> Cache:
        """View of the same KV with layers of `PlacedKVLayer`."""
        return Cache(layers=[PlacedKVLayer(layer, places, seen) for layer in self.layers])

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def clear(self) -> None:
        self.length = 0

    def erase(self) -> None:
        """Forget everything and overwrite the storage with zeros.

        Recorded passes give no weight to KV after the length, but a NaN there would spread.
        """
        self._note("erase")
        self._cut(0)
        for tensor in self.tensors():
            tensor.zero_()

    def save_states(self) -> None:
        """Keep a copy of all states after the cached tokens, in place of the oldest one. The tokens
        are final.
        """
        if not self._snapshots or not self.length:
            return
        self.settle()
        kept = self._snapshot(self.length)
        kept.count = 0
        for layer, tensors in kept.tensors.items():
            self.layers[layer].save(tensors)
        kept.count = self.length

    def _snapshot(self, count: int) -> StateSnapshot:
        """The copy of the states after so many tokens, or the oldest, which another replaces."""
        return min(self._snapshots, key=lambda each: (each.count != count, each.count))

    def chunk(self, start: int, end: int) -> list[Tensor]:
        """Return what a chunk of a prompt leaves: its `entries`, and the states after it, to be
        read or filled.
        """
        return [*self.entries(start, end), *self.states_to_fill(end)]

    def entries(self, start: int, end: int) -> list[Tensor]:
        """Return views [heads, end - start, width] of the KV of each layer that has any."""
        layers = [layer for layer in self.layers if isinstance(layer, KVLayer)]
        return [storage[:, start:end] for layer in layers for storage in layer.row]

    def states_after(self, count: int) -> list[Tensor]:
        """Return the copy of the states after so many tokens; nothing where there is none."""
        kept = [each for each in self._snapshots if each.count == count]
        return [each for tensors in kept[0].tensors.values() for each in tensors] if kept else []

    def states_to_fill(self, count: int) -> list[Tensor]:
        """Return `states_after`, or else the oldest copy, which is to be filled with these."""
        if not self._snapshots:
            return []
        kept = self._snapshot(count)
        kept.count = count if kept.count == count else 0
        return [each for tensors in kept.tensors.values() for each in tensors]

    def extend(self, token_ids: list[int], ends: list[int]) -> None:
        """Add tokens that passes with these ends ran. Their `entries` were filled, and so were the
        states after them.
        """
        self.advance(len(token_ids))
        self.known += token_ids
        self.ends += ends
        if self._snapshots:
            self._snapshot(0).count = self.length
        self.settle()
        self._restore(self, self.length)

    def resumable(self, count: int) -> int:
        """Most tokens, of the first `count`, that another sequence can go on from."""
        if self.keeps_entries:
            return count
        return max((each.count for each in self._snapshots if each.count <= count), default=0)

    def resume(self, count: int) -> None:
        """Keep the first `count` tokens, which are `resumable`, for another sequence."""
        self.length = count
        self._restore(self, count)

    def _restore(self, other: "KVCache", count: int) -> None:
        """Take the states after the first `count` tokens from another cache, or from this one."""
        if self.keeps_entries or not count:
            return
        kept = next(each for each in other._snapshots if each.count == count)
        self.settle()
        for layer, tensors in kept.tensors.items():
            self.layers[layer].restore(tensors)

    def take(self, other: "KVCache", count: int) -> None:
        """Copy the first `count` tokens, which are `resumable`, from another cache: their KV, the
        states after them, and their token ids.
        """
        self._note("take", (other.number, count))
        self._cut(0)
        for layer, theirs in zip(self.layers, other.layers, strict=True):
            if isinstance(layer, KVLayer):
                for storage, found in zip(layer.row, theirs.row, strict=True):
                    storage[:, :count] = found[:, :count]
        self._cut(count)
        self._restore(other, count)
        self.save_states()
        self.written = count
        self.known = other.known[:count]
        self.ends = [end for end in other.ends if end <= count]

    def advance(self, count: int) -> None:
        """Extend the cached length by `count` tokens just written."""
        self.length += count

    def rewind(self, count: int) -> None:
        """Roll back the last `count` tokens."""
        self.length -= count

    def keep_path(self, path: list[int]) -> None:
        """Keep the nodes of `path` of the tree last written, in that order."""
        self._note("keep_path", path)
        start = self.length
        if path != list(range(len(path))):
            nodes = torch.tensor(path, device=self.tensors()[0].device) + start
            for layer in self.layers:
                layer.keep(start, nodes)
        self._cut(start + len(path))


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def causal_mask(positions: Tensor, end: int, window: int | None) -> Tensor:
    """Attention mask of tokens that follow one another.

    positions  [B, T] int64 of the tokens in their sequences, where their KV is stored too
    end        cached tokens
    window     tokens a query may look back, itself included; None: all
    returns    [B, 1, T, end] bool, true where seen
    """
    key = torch.arange(end, device=positions.device)
    query = positions[:, :, None]
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    return visible[:, None]


def attention_mask(
    roots: Tensor, depths: Tensor, ancestors: Tensor, end: int, window: int | None
) -> Tensor:
    """Attention mask of the last T of a tree's N nodes: each sees its sequence's past and its own
    ancestors.

    roots      [B] int64, position of each sequence's root; the other nodes follow
    depths     [N] int64, distance from the tree's root
    ancestors  [T, N] bool, true at a node itself and above it
    end        cached tokens: max(roots) + N
    window     tokens a query may look back, itself included; None: all
    returns    [B, 1, T, end] bool, true where seen
    """
    nodes = len(depths)
    key = torch.arange(end, device=roots.device)
    node = key - roots[:, None]  # [B, end]; negative: past; beyond the tree: another sequence's
    inside = (node >= 0) & (node < nodes)
    node = node.clamp(0, nodes - 1)
    visible = (key < roots[:, None])[:, None] | (
        inside[:, None] & ancestors[:, node].permute(1, 0, 2)
    )
    if window is not None:
        position = torch.where(inside, roots[:, None] + depths[node], key)
        query = roots[:, None] + depths[nodes - len(ancestors) :]
        visible &= position[:, None] > query[:, :, None] - window
    return visible[:, None]
