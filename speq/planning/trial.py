"""How fast a few published experts are read and encoded, or moved and run, where no profile says
it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from speq.devices.device import Accelerator
from speq.experts.codec import ExpertCodec
from speq.experts.expert_store import ExpertStore, expert_slot
from speq.files.alignment import aligned_bytes
from speq.kernels.grouping import Grouping
from speq.models.shape import ModelShape
from speq.units import Clock

# Experts that are timed; the first one wakes files and threads, and does not count.
TIMED_EXPERTS = 4
# Words of experts that a device runs to be timed, of several passes: more than its caches hold.
RUN_BYTES = 192 << 20
TIMED_PASSES = 16


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


@dataclass(frozen=True, slots=True)
class Use:
    """What an expert of a codec takes of a device with memory of its own, in seconds.

    copy_s  to bring its record there out of locked memory of the host
    run_s   to run it for a token, its record decoded on the way
    """

    copy_s: float
    run_s: float

    def expected_s(self, held: float) -> float:
        """Of each time that a token asks for one: run_s + (1 - held) * copy_s.

        Kernels decode a record whenever they run it, and only what lies in no slot is moved.

        held  share of all experts that lie in slots; experts are thought to be asked for alike
        """
        return self.run_s + (1 - held) * self.copy_s

    @classmethod
    def of(
        cls,
        store: ExpertStore,
        device: Accelerator,
        model: ModelShape,
        dtype: torch.dtype,
        limit_bytes: int,
        codec: ExpertCodec,
    ) -> "Use":
        """Move and run a few published experts as records of a codec, which needs no draft.

        dtype        computed in
        limit_bytes  taken of the device meanwhile, at most but for one token's experts
        """
        room = min(limit_bytes, RUN_BYTES) // codec.shape.nbytes
        count = min(max(room, model.top_k), model.experts.num_experts)
        records = some_records(store, codec, count)
        codec = codec.holding(max(map(len, records)))
        slots = aligned_bytes(count, codec.slot_bytes, device.torch)
        copy_s = copied_s(device, slots, records)
        run_s = passes_s(device, codec, slots, model, dtype) / (TIMED_PASSES * model.top_k)
        del slots
        device.release_cached()
        return cls(copy_s, run_s)


def some_records(store: ExpertStore, codec: ExpertCodec, count: int) -> list[Tensor]:
    """So many experts of a store of words, spread over all, as records of a codec: [n] uint8."""
    total = store.num_layers * store.num_experts
    words, room = expert_slot(store), aligned_bytes(1, codec.slot_bytes)[0]
    found = []
    for turn in range(count):
        store.read(*divmod(total * turn // count, store.num_experts), words)
        nbytes = codec.encode(store.codec.decode(words), None, room)
        found.append(room[:nbytes].clone())
    return found


def copied_s(device: Accelerator, slots: Tensor, records: list[Tensor]) -> float:
    """Bring each record into its slot. The mean time of one, the first one apart."""
    stream = device.stream()
    spent_s = []
    for slot, record in zip(slots, records, strict=True):
        staged = device.staging(len(record), torch.uint8)
        staged.copy_(record)
        start = stream.record()
        stream.copy(slot[: len(record)], staged)
        end = stream.record()
        end.wait()
        spent_s.append(device.elapsed_s(start, end))
    timed_s = spent_s[1:] or spent_s
    return sum(timed_s) / len(timed_s)


@torch.inference_mode()
def passes_s(
    device: Accelerator, codec: ExpertCodec, slots: Tensor, model: ModelShape, dtype: torch.dtype
) -> float:
    """Run a token's experts so many times, others at each, one pass behind the other."""
    count = len(slots)
    experts = codec.experts(slots, None)
    table = torch.arange(count, device=device.torch)
    in_slot = {expert: expert for expert in range(count)}
    hidden_states = torch.ones(1, model.hidden_size, dtype=dtype, device=device.torch)
    out = hidden_states.new_empty(1, model.top_k, model.hidden_size)
    chosen = torch.arange(TIMED_PASSES * model.top_k).remainder(count)
    groupings = [
        Grouping.of(topk_ids.to(device.torch), topk_ids)
        for topk_ids in chosen.view(TIMED_PASSES, 1, model.top_k)
    ]

    def run(grouping: Grouping) -> None:
        experts.run(0, hidden_states, grouping, in_slot, table, model.activation, out)

    run(groupings[0])  # kernels are loaded at their first call
    start = device.compute.record()
    for grouping in groupings:
        run(grouping)
    end = device.compute.record()
    end.wait()
    return device.elapsed_s(start, end)


@dataclass(frozen=True, slots=True)
class Trials:
    """What is tried of published experts by a codec, where that is asked for.

    encoding  on the CPU, where each miss is read and encoded
    use       on a device with memory of its own, where records come out of the host's; None on the
              CPU
    """

    encoding: Callable[[ExpertCodec], Trial]
    use: Callable[[ExpertCodec], Use] | None = None
