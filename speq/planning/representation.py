"""Which codec exact experts lie in slots by, where no profile lets the planner decide it."""

import logging
import time
from dataclasses import dataclass

from speq.errors import SpeqError
from speq.experts.codec import ExpertCodec, LosslessCodec, ResidualCodec, codec_of, codecs_for
from speq.experts.encoding_store import EncodingStore
from speq.experts.expert_store import ExpertStore, SafetensorsExpertStore, expert_slot
from speq.experts.packed_store import PackedExpertStore
from speq.files.alignment import aligned, aligned_bytes
from speq.kernels import library
from speq.planning.memory import Representation
from speq.units import Clock

logger = logging.getLogger("speq")

# Bits a weight that records usually take, where a budget's slots are told for codecs that a model
# was not encoded by. `speq pack models/tiny-moe` prints 11.31 and, over rounded codes, 8.63; over
# codes moved by GPTQ residuals take up to 9.
USUAL_BITS = {LosslessCodec.name: 11.4, ResidualCodec.name: 8.9}
# Experts that are timed; the first one wakes files and threads, and does not count.
TIMED_EXPERTS = 4


@dataclass(frozen=True, slots=True)
class Trial:
    """Speeds of some experts of a checkpoint, in bytes of their words a second, by one thread."""

    read_bytes_per_s: float
    encode_bytes_per_s: float

    @classmethod
    def of(
        cls, store: SafetensorsExpertStore, codec: ExpertCodec, clock: Clock = time.perf_counter
    ) -> "Trial":
        """Read and encode a few experts. The codec needs no draft."""
        count = store.num_layers * store.num_experts
        slot = expert_slot(store)
        room = aligned_bytes(1, codec.slot_bytes)[0]
        read_s = encode_s = 0.0
        for turn in range(1 + TIMED_EXPERTS):
            at = count * turn // (1 + TIMED_EXPERTS)
            if turn == 1:
                read_s = encode_s = 0.0
            start_s = clock()
            store.read(*divmod(at, store.num_experts), slot)
            read_at_s = clock()
            codec.encode(store.codec.decode(slot), None, room)
            read_s += read_at_s - start_s
            encode_s += clock() - read_at_s
        nbytes = TIMED_EXPERTS * store.codec.record_bytes
        return cls(nbytes / max(read_s, 1e-9), nbytes / max(encode_s, 1e-9))


def agree(store: ExpertStore, wanted: str) -> None:
    """Raise SpeqError where a packed model is wanted in another codec than it is packed with."""
    given = store.codec.name
    if isinstance(store, PackedExpertStore) and wanted not in ("auto", given):
        raise SpeqError(
            f"codec {wanted} was asked for and the model is packed with codec {given}; leave it to "
            f"be auto, or pack the published model with --codec {wanted}"
        )


def automatic(store: SafetensorsExpertStore, all_fit: bool, readers: int, device: str) -> str:
    """The codec for a published checkpoint whose words leave so many experts outside the slots.

    raw where all fit so, where words are not bfloat16 or where only the slow reference could run
    records; else lossless where `readers` threads encode faster than one reads, and else raw.
    """
    if all_fit or LosslessCodec.name not in codecs_for(store.codec.shape.dtype):
        return "raw"
    backend = library.backend_of("moe_grouped_lossless", device)
    if backend.name == "reference":
        logger.info("codec raw: lossless has no fast kernel here (%s)", backend.reason)
        return "raw"
    trial = Trial.of(store, codec_of("lossless", store.codec.shape))
    encoded = readers * trial.encode_bytes_per_s
    worth = encoded > trial.read_bytes_per_s
    logger.info(
        "codec %s: %d threads encode %.2f GB/s and one reads %.2f GB/s%s",
        "lossless" if worth else "raw",
        readers,
        encoded / 1e9,
        trial.read_bytes_per_s / 1e9,
        "; `speq pack --codec lossless` would encode once and read less" if worth else "",
    )
    return "lossless" if worth else "raw"


def usual_bytes(codec: ExpertCodec) -> int:
    """Of a record, before any is known."""
    return int(USUAL_BITS[codec.name] * codec.shape.weights / 8)


def encoding(store: SafetensorsExpertStore, codec: str) -> EncodingStore:
    """A published checkpoint whose experts are encoded as they are read."""
    return EncodingStore(store, codec_of(codec, store.codec.shape))


def side_by_side(codec: ExpertCodec, draft_bytes: int) -> list[Representation]:
    """All ways to keep experts of a shape beside a draft, or without one (draft_bytes 0).

    codec  the one in use, whose slots are known to hold these experts
    """
    rows = []
    for name in codecs_for(codec.shape.dtype):
        other = codec if name == codec.name else codec_of(name, codec.shape)
        estimated = other is not codec and name in USUAL_BITS
        slot_bytes = aligned(usual_bytes(other)) if estimated else other.slot_bytes
        if draft_bytes or not other.needs_draft:
            rows.append(Representation(name, draft_bytes, slot_bytes, estimated))
    return rows
