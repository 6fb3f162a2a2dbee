"""Published experts, encoded as they are read: packed in slots, plain weights on disk.

Slots hold more experts, but each read still moves all weights and encodes them. A packed model has
packed experts on disk.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

from torch import Tensor

from speq.experts.codec import ExpertCodec, usual_bytes
from speq.experts.expert_store import ExpertStore, expert_slot
from speq.experts.int4 import Int4Arena
from speq.experts.packed_draft import TiedDraft
from speq.experts.passes import by_layer, for_each_key
from speq.files.alignment import ALIGNMENT, allocate_aligned
from speq.units import Done

# Called with (layer, expert, packed expert [n] uint8).
Keep = Callable[[int, int, Tensor], None]


def encoding_bytes(words: ExpertCodec, codec: ExpertCodec) -> int:
    """Bytes that an encoding thread holds besides its read buffers: an expert's weights and, for a
    codec with a draft, their copy in its order.
    """
    return (2 if codec.needs_draft else 1) * words.slot_bytes + ALIGNMENT


class EncodingStore:
    """Store that reads plain weights and fills slots with experts packed by `codec`.

    Until `measure` knows the largest packed expert, slots have the smallest possible size, so that
    plans refuse no budget that would be enough.
    """

    published = False

    def __init__(self, words: ExpertStore, codec: ExpertCodec) -> None:
        self.num_layers = words.num_layers
        self.num_experts = words.num_experts
        self.words = words
        self.reading_bytes = words.reading_bytes + encoding_bytes(words.codec, codec)
        self._any_size = codec
        self._codec = codec.with_slot_bytes(codec.record_range[0])
        self._base: Int4Arena | None = None
        self._sizes: list[int] = []
        self._scratch: SimpleQueue[Tensor] = SimpleQueue()

    @property
    def codec(self) -> ExpertCodec:
        return self._codec

    @property
    def usual_bytes(self) -> int:
        """Usual bytes of a packed expert, before any is known."""
        return usual_bytes(self._any_size)

    @property
    def source(self) -> ExpertStore:
        return self.words

    @property
    def files(self) -> tuple[Path, ...]:
        return self.words.files

    @property
    def tied_draft(self) -> TiedDraft | None:
        return None

    def measure(
        self,
        base: Int4Arena | None,
        threads: int,
        progress: Done | None,
        keys: Sequence[tuple[int, int]] | None = None,
        keep: Keep | None = None,
    ) -> None:
        """Encode every expert once, to size slots for the largest.

        base  codes of a draft, for a codec that needs them; they must not change
        keys  all (layer, expert), in order; None: layer by layer
        keep  called by several threads with each packed expert, which it may copy but not keep
        """
        self._base = base
        sizes = [0] * (self.num_layers * self.num_experts)
        # Buffers for the largest possible expert; pages that none reaches are never touched.
        rooms: SimpleQueue[Tensor] = SimpleQueue()
        for room in allocate_aligned(threads, self._any_size.slot_bytes):
            rooms.put(room)

        def encode(layer: int, expert: int) -> None:
            at = layer * self.num_experts + expert
            room = rooms.get()
            try:
                sizes[at] = self._fill(at, room)[0]
                if keep is not None:
                    keep(layer, expert, room[: sizes[at]])
            finally:
                rooms.put(room)

        for_each_key(encode, keys or by_layer(self.num_layers, self.num_experts), threads, progress)
        self._sizes = sizes
        self._codec = self._codec.with_slot_bytes(max(sizes))

    def record_bytes(self, layer: int, expert: int) -> int:
        return self._sizes[layer * self.num_experts + expert]

    def moved_bytes(self, layer: int, expert: int) -> int:
        return self.words.moved_bytes(layer, expert)

    def read(self, layer: int, expert: int, slot: Tensor) -> int:
        return self._fill(layer * self.num_experts + expert, slot)[1]

    def _fill(self, at: int, slot: Tensor) -> tuple[int, int]:
        """Encode an expert into `slot`. Return its bytes, and those read from disk."""
        try:
            words = self._scratch.get_nowait()
        except Empty:  # as many buffers as threads that read at a time
            words = expert_slot(self.words)
        try:
            read_bytes = self.words.read(*divmod(at, self.num_experts), words)
            base = None if self._base is None else self._base.expert(at)
            exact = self.words.codec.decode(words)
            return self._any_size.encode(exact, base, slot), read_bytes
        finally:
            self._scratch.put(words)

    def close(self) -> None:
        self.words.close()
