"""Published experts, encoded as they are read: packed in slots, plain weights on disk.

Slots hold more experts, but each read still moves all weights and encodes them, each matrix while
the next one is read. A packed model has packed experts on disk. An expert whose record is in a
packed copy in the making is read from there.

On the CPU slots are made for the largest of some experts that are encoded at load, and a little
more. An expert that turns out larger comes into no slot: its weights are read whenever it is
computed.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from torch import Tensor

from speq.errors import NoRoom
from speq.experts.codec import ExpertCodec, usual_bytes
from speq.experts.expert_store import ExpertStore, SafetensorsExpertStore, expert_slot
from speq.experts.int4 import Int4Arena
from speq.experts.packed_copy import PackedCopy
from speq.experts.packed_draft import TiedDraft
from speq.experts.packed_store import VerifiedBytes
from speq.experts.passes import for_each_key
from speq.experts.slots import PlainWords, SlotExperts, WideBesideSlots
from speq.files.alignment import ALIGNMENT, align, allocate_aligned
from speq.kernels.compact_ops import WHOLE, Part
from speq.kernels.ops import PlainExpert
from speq.stats import Recorder, TimeSpan
from speq.units import Done

logger = logging.getLogger("speq")

# Called with (layer, expert, packed expert [n] uint8).
Keep = Callable[[int, int, Tensor], None]
# Experts that are encoded to find the size of slots: as many as have so many bytes of weights,
# within these bounds.
SAMPLED_BYTES, LEAST_SAMPLED, MOST_SAMPLED = 256 << 20, 8, 32
# Slots are larger than the largest of them by this share: a bit less than a third of a bit per
# weight, or 3 of 100 weights more that have no class.
SLOT_MARGIN = 0.02


def encoding_bytes(words: ExpertCodec, codec: ExpertCodec) -> int:
    """Bytes that an encoding thread holds besides its read buffers: an expert's weights and, for a
    codec with a draft, their copy in its order.
    """
    return (2 if codec.needs_draft else 1) * words.slot_bytes + ALIGNMENT


def run_into(encoding: Future[int], encode: Callable[[], int]) -> None:
    """Encode, unless that was cancelled, and give the result to who waits for it."""
    if encoding.set_running_or_notify_cancel():
        try:
            encoding.set_result(encode())
        except BaseException as error:
            encoding.set_exception(error)


def sampled_slot_bytes(
    words: ExpertStore, codec: ExpertCodec, base: Int4Arena | None = None
) -> int:
    """Bytes of a slot for the experts that `codec` makes, by encoding some of them.

    base  codes of a draft, for a codec that needs them

    Raises SpeqError for experts that cannot be read.
    """
    most = codec.record_range[1]
    count = words.num_layers * words.num_experts
    fits = SAMPLED_BYTES // words.codec.slot_bytes
    sampled = min(max(fits, LEAST_SAMPLED), MOST_SAMPLED, count)
    slot, room = expert_slot(words), allocate_aligned(1, align(most))[0]
    largest = 0
    for at in (number * count // sampled for number in range(sampled)):
        words.read(*divmod(at, words.num_experts), slot)
        codes = None if base is None else base.expert(at)
        largest = max(largest, codec.encode(words.codec.decode(slot), codes, room))
    return align(min(int((1 + SLOT_MARGIN) * largest), most))


class EncodingStore:
    """Store that reads plain weights and fills slots with experts packed by `codec`.

    codec  with the slots of this run, or any until `sample` or `measure` knows their size
    copy   packed copy in the making, of the same codec; None: there is none
    """

    published = False

    def __init__(
        self, words: SafetensorsExpertStore, codec: ExpertCodec, copy: PackedCopy | None = None
    ) -> None:
        self.num_layers = words.num_layers
        self.num_experts = words.num_experts
        self.words = words
        self.codec = codec
        self.reading_bytes = words.reading_bytes + encoding_bytes(words.codec, codec)
        self.verified = VerifiedBytes() if copy is None else copy.verified
        self._copy = copy
        self._base: Int4Arena | None = None
        count = words.num_layers * words.num_experts
        # Of each expert when it was last read: bytes in its slot, and bytes moved.
        self._sizes, self._moved = [0] * count, [words.moved_bytes(0, 0)] * count
        # By layer, experts that fit no slot.
        self._wide: list[set[int]] = [set() for _ in range(words.num_layers)]
        self._fits_all = False
        self._wide_words: Tensor | None = None
        self._scratch: SimpleQueue[Tensor] = SimpleQueue()
        self._encoders = ThreadPoolExecutor(thread_name_prefix="speq-encode")

    @property
    def usual_bytes(self) -> int:
        """Usual bytes of a packed expert, before any is known."""
        return usual_bytes(self.codec)

    @property
    def source(self) -> ExpertStore:
        return self.words

    @property
    def files(self) -> tuple[Path, ...]:
        return self.words.files

    @property
    def tied_draft(self) -> TiedDraft | None:
        return None

    def sample(self, base: Int4Arena | None) -> None:
        """Size slots for the largest of some experts, and a little more.

        base  codes of a draft, for a codec that needs them; they must not change
        """
        self._base = base
        self.codec = self.codec.with_slot_bytes(sampled_slot_bytes(self.words, self.codec, base))

    def measure(
        self,
        base: Int4Arena | None,
        threads: int,
        progress: Done | None,
        keys: Sequence[tuple[int, int]],
        keep: Keep,
    ) -> None:
        """Encode every expert once, for a device's host to hold, and size slots for the largest.

        base  see `sample`
        keys  all (layer, expert), in order
        keep  called by several threads with each packed expert, which it may copy but not keep
        """
        self._base, self._fits_all = base, True
        # Buffers for the largest possible expert; pages that none reaches are never touched.
        rooms: SimpleQueue[Tensor] = SimpleQueue()
        for room in allocate_aligned(threads, align(self.codec.record_range[1])):
            rooms.put(room)

        def encode(layer: int, expert: int) -> None:
            at = layer * self.num_experts + expert
            room = rooms.get()
            try:
                self._sizes[at] = self._fill(at, room)[0]
                keep(layer, expert, room[: self._sizes[at]])
            finally:
                rooms.put(room)

        for_each_key(encode, keys, threads, progress)
        self.codec = self.codec.with_slot_bytes(max(self._sizes))

    def record_bytes(self, layer: int, expert: int) -> int:
        return self._sizes[layer * self.num_experts + expert]

    def moved_bytes(self, layer: int, expert: int) -> int:
        return self._moved[layer * self.num_experts + expert]

    def read(self, layer: int, expert: int, slot: Tensor) -> int:
        at = layer * self.num_experts + expert
        if expert in self._wide[layer]:
            self._moved[at] = 0
            return 0
        record = None if self._copy is None else self._copy.read(at, slot)
        if record is not None:
            self._sizes[at] = self._moved[at] = record.nbytes
            return record.nbytes
        self._moved[at] = self.words.moved_bytes(layer, expert)
        self._sizes[at], read_bytes = self._fill(at, slot)
        if not self._sizes[at]:
            self._set_wide(layer, expert)
        return read_bytes

    def _fill(self, at: int, slot: Tensor) -> tuple[int, int]:
        """Encode an expert into `slot`. Return its bytes, 0 where it does not fit, and those read
        from disk.
        """
        try:
            words = self._scratch.get_nowait()
        except Empty:  # as many buffers as threads that read at a time
            words = expert_slot(self.words)
        exact = self.words.codec.decode(words)
        base = None if self._base is None else self._base.expert(at)
        down_bytes = exact[1].nbytes  # as many as of each other matrix
        ahead: list[tuple[int, Future[int]]] = []

        def part_to(end: int) -> Part:
            """The matrices before `end` that are not encoded, once all others are."""
            return Part(ahead[-1][0], end, ahead[-1][1].result()) if ahead else Part(end=end)

        def arrived(nbytes: int) -> None:
            end = WHOLE.end - (self.codec.shape.nbytes - nbytes) // down_bytes
            if end == WHOLE.end:  # the last one has no reading beside it
                return
            encode = partial(self.codec.encode, exact, base, slot, part_to(end))
            ahead.append((end, Future()))
            try:
                self._encoders.submit(run_into, ahead[-1][1], encode)
            except RuntimeError:  # no thread can begin, or the interpreter ends
                if ahead[-1][1].cancel():
                    ahead.pop()  # the next part has these matrices as well

        try:
            read_bytes = self.words.read(*divmod(at, self.num_experts), words, arrived)
            return self.codec.encode(exact, base, slot, part_to(WHOLE.end)), read_bytes
        except NoRoom:
            if self._fits_all:  # the files have changed since
                raise
            return 0, read_bytes
        finally:
            wait([encoding for _, encoding in ahead if not encoding.cancel()])
            self._scratch.put(words)

    def _set_wide(self, layer: int, expert: int) -> None:
        if not any(self._wide):  # the first of perhaps many
            logger.warning(
                "expert %d in MoE layer %d is larger than the slots, which were made for the "
                "largest of some others: it is read from disk whenever it is computed; codec raw "
                "has slots for all, and so have runs of a whole packed copy and of `speq pack`",
                *(expert, layer),
            )
        self._wide[layer].add(expert)

    def experts(self, slots: Tensor, base: Int4Arena | None, recorder: Recorder) -> SlotExperts:
        """Wrap the experts in slots [S, slot_bytes] uint8, with those that fit none.

        recorder  told of reads of these, for which the computation waits
        """
        held = self.codec.experts(slots, base)

        def read_plain(layer: int, expert: int) -> PlainExpert:
            return self._plain(layer, expert, recorder)

        def plain(layer: int) -> PlainWords:
            read, wide = held.plain(layer), self._wide[layer]
            return lambda expert, slot: (
                read_plain(layer, expert) if expert in wide else read(expert, slot)
            )

        return WideBesideSlots(held.op, held.held, plain, self._wide.__getitem__, read_plain)

    def _plain(self, layer: int, expert: int, recorder: Recorder) -> PlainExpert:
        """Read an expert's weights, valid until the next call. The computing thread alone calls."""
        if self._wide_words is None:
            self._wide_words = expert_slot(self.words)
        start_s = recorder.clock()
        read_bytes = self.words.read(layer, expert, self._wide_words)
        span = start_s, recorder.clock(), layer, expert
        moved_bytes = self.words.moved_bytes(layer, expert)
        recorder.add(TimeSpan("transfer", *span, moved_bytes, read_bytes))
        recorder.add(TimeSpan("stall", *span))
        return PlainExpert(*self.words.codec.decode(self._wide_words))

    def close(self) -> None:
        self._encoders.shutdown()
        self.words.close()
