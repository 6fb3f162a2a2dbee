"""How fast a few published experts are read and encoded, where no profile says it."""

import time
from dataclasses import dataclass

from speq.experts.codec import ExpertCodec
from speq.experts.expert_store import ExpertStore, expert_slot
from speq.files.alignment import aligned_bytes
from speq.units import Clock

# Experts that are timed; the first one wakes files and threads, and does not count.
TIMED_EXPERTS = 4


@dataclass(frozen=True, slots=True)
class Trial:
    """Speeds of some experts of a checkpoint, in bytes of their words a second, by one thread."""

    read_bytes_per_s: float
    encode_bytes_per_s: float

    @classmethod
    def of(
        cls, store: ExpertStore, codec: ExpertCodec, clock: Clock = time.perf_counter
    ) -> "Trial":
        """Read and encode a few published experts. The codec needs no draft."""
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
        nbytes = TIMED_EXPERTS * store.codec.shape.nbytes
        return cls(nbytes / max(read_s, 1e-9), nbytes / max(encode_s, 1e-9))
