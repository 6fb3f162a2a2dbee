"""What the codes of experts published in fewer bits carry: bits of entropy, and how fast they are
turned into words.
"""

from statistics import median
from typing import Any

import torch
from torch import Tensor

from speq.experts.expert_store import ExpertStore, expert_slot
from speq.experts.scaled_codecs import ScaledCodec
from speq.kernels.scaled_words import part_of
from speq.units import Clock


class MeasuredCodes:
    """The codec of a store of codes with scales, over its experts.

    An entropy is that of a code on its own, by the counts of all experts together, and all that
    scales take: less than a weight can take, were its neighbours no help.
    """

    def __init__(self, store: ExpertStore, codec: ScaledCodec) -> None:
        self._store, self._codec = store, codec
        self._slot = expert_slot(store)
        self._copy = codec.shape.empty()
        self._times_s: dict[str, list[float]] = {"decode": [], "copy": []}
        self._counts = torch.zeros(1 << codec.layout.code_bits, dtype=torch.int64)

    def take(self, layer: int, expert: int, clock: Clock) -> None:
        self._store.read(layer, expert, self._slot)
        marks = [clock()]
        words = self._codec.decode(self._slot)
        marks.append(clock())
        for matrix, copy in zip(words, self._copy, strict=True):
            copy.copy_(matrix)
        marks.append(clock())
        self._times_s["decode"].append(marks[1] - marks[0])
        self._times_s["copy"].append(marks[2] - marks[1])
        for section in self._codec.layout.codes:
            codes = codes_in(part_of(self._slot, section), self._codec.layout.code_bits)
            self._counts += torch.bincount(codes, minlength=len(self._counts))

    def row(self) -> dict[str, Any]:
        codec, weights = self._codec, self._codec.shape.weights
        scale_bits = 8 * sum(section.nbytes for section in codec.layout.scales) / weights
        return {
            "codec": codec.name,
            "bits_per_weight": 8 * codec.record_bytes / weights,
            "slot_bits_per_weight": 8 * codec.slot_bytes / weights,
            "entropy_bits": entropy_of(self._counts) + scale_bits,
            "encode_gb_per_s": None,
            **{
                f"{name}_gb_per_s": codec.shape.nbytes / median(times_s) / 1e9
                for name, times_s in self._times_s.items()
            },
        }


def codes_in(packed: Tensor, code_bits: int) -> Tensor:
    """Codes of 8 or 4 bits, one after another, in no order that matters."""
    return packed if code_bits == 8 else torch.cat([packed & 0xF, packed >> 4])


def entropy_of(counts: Tensor) -> float:
    """Bits of what occurs so often."""
    shares = counts[counts > 0].double() / counts.sum()
    return float(-(shares * shares.log2()).sum())
