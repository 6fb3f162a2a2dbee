"""Surveys a device with memory of its own: how fast some published experts are moved and run."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from speq.devices.device import Accelerator
from speq.experts.codec import ExpertCodec, codec_of
from speq.experts.expert_store import ExpertStore, expert_slot
from speq.files.alignment import allocate_aligned
from speq.kernels.grouping import Grouping
from speq.models.shape import ModelShape
from speq.planning.cost.presets import LAYER_S
from speq.planning.cost.survey import Survey

# Words of experts that a device runs to be timed, of several passes: more than its caches hold.
RUN_BYTES = 192 << 20
TIMED_PASSES = 16
# A layer of a recorded pass: some ten kernels. It is assumed, not measured.
RECORDED_LAYER_S = 60e-6


@dataclass(frozen=True, slots=True)
class ExpertTimes:
    """What an expert of a codec takes of a device with memory of its own, in seconds.

    copy_s  to bring its record there out of locked memory of the host
    run_s   to run it for a token, its record decoded on the way
    record_bytes  of the largest
    """

    copy_s: float
    run_s: float
    record_bytes: int

    @classmethod
    def of(
        cls,
        store: ExpertStore,
        device: Accelerator,
        model: ModelShape,
        dtype: torch.dtype,
        limit_bytes: int,
        codec: ExpertCodec,
    ) -> "ExpertTimes":
        """Move and run a few published experts as records of a codec, which needs no draft.

        dtype        computed in
        limit_bytes  taken of the device meanwhile, at most but for one token's experts
        """
        room = min(limit_bytes, RUN_BYTES) // codec.shape.nbytes
        count = min(max(room, model.top_k), model.experts.num_experts)
        records = some_records(store, codec, count)
        largest = max(map(len, records))
        codec = codec.with_slot_bytes(largest)
        slots = allocate_aligned(count, codec.slot_bytes, device.torch)
        copy_s = copied_s(device, slots, records)
        run_s = passes_s(device, codec, slots, model, dtype) / (TIMED_PASSES * model.top_k)
        del slots
        device.release_cached()
        return cls(copy_s, run_s, largest)


def some_records(store: ExpertStore, codec: ExpertCodec, count: int) -> list[Tensor]:
    """So many published experts, spread over all, as records of a codec: [n] uint8."""
    total = store.num_layers * store.num_experts
    words, room = expert_slot(store), allocate_aligned(1, codec.slot_bytes)[0]
    found = []
    for turn in range(count):
        store.read(*divmod(total * turn // count, store.num_experts), words)
        if codec.name == store.codec.name:
            found.append(words[: codec.record_range[0]].clone())
            continue
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
class DeviceTrial:
    """What is tried, and within which bounds.

    limit_bytes  of the device's memory, at most but for one token's experts
    graphs       whether passes are recorded
    """

    store: ExpertStore
    device: Accelerator
    model: ModelShape
    dtype: torch.dtype
    limit_bytes: int
    graphs: bool

    def survey(self, codecs: Iterable[str]) -> Survey:
        """Try the codecs of those names, none of which needs a draft.

        What a layer takes beside its experts is assumed.
        """
        given = self.store.codec
        uses: dict[str, ExpertTimes] = {}
        for name in codecs:
            codec = given if name == given.name else codec_of(name, given.shape)
            uses[name] = ExpertTimes.of(
                self.store, self.device, self.model, self.dtype, self.limit_bytes, codec
            )
        return Survey(
            "cuda",
            max(use.record_bytes / use.copy_s for use in uses.values()),
            max(use.record_bytes / use.run_s for use in uses.values()),
            pass_s=0.0,
            layer_s=RECORDED_LAYER_S if self.graphs else LAYER_S,
            expert_s={name: use.run_s for name, use in uses.items()},
        )
