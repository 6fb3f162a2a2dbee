"""What each codec makes of a model's own experts: bits a weight, and how fast.

Every expert is encoded, decoded and compared, word for word. Speeds are of the BF16 words of an
expert, medians over all of them; a copy is that of the same words from memory to memory.

Rows of "dense" codecs are of the matrices outside the experts, of bfloat16, each in a record of its
own: bits and speeds of all their weights together. Their residuals are over codes that are rounded,
GROUP_SIZE weights to a scale where that divides the columns, and one scale to a row elsewhere.

Of a model that was published as codes with scales there is one row, of these: nothing is encoded,
and nothing else codes them.

entropy_bits is what a weight cannot take less than, were its neighbours no help: for words on their
own, of the word; over a draft's codes, of where in the code's window the word lies. Of all experts
together, by the counts of their words.
"""

import time
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench.lab.command import main
from bench.lab.scaled_codes import MeasuredCodes
from speq.config import Draft
from speq.drafts.draft_source import open_draft
from speq.errors import OptionError, SpeqError
from speq.experts.codec import ExpertCodec, Matrices, codec_of, codecs_for
from speq.experts.expert_store import ExpertStore, expert_slot, read_matrices
from speq.experts.int4 import Int4Expert
from speq.experts.scaled_codecs import ScaledCodec
from speq.files.alignment import allocate_aligned
from speq.kernels import dense_ops, windows
from speq.kernels.ops import Int4Pair, quantize_int4
from speq.measure.picture import Axis, Picture
from speq.measure.report import Column, Report
from speq.models.opened import Opened, open_model
from speq.options.declared import Options
from speq.units import Clock, Progress, track


@dataclass(frozen=True, slots=True)
class CodecSettings(Options):
    draft: Draft = "auto"


GROUP_SIZE = 128

COLUMNS: dict[str, Column] = {
    "codec": ("codec", "{}"),
    "bits a weight": ("bits_per_weight", "{:.2f}"),
    "of a slot": ("slot_bits_per_weight", "{:.2f}"),
    "entropy": ("entropy_bits", "{:.2f}"),
    "encode GB/s": ("encode_gb_per_s", "{:.2f}"),
    "decode GB/s": ("decode_gb_per_s", "{:.2f}"),
    "copy GB/s": ("copy_gb_per_s", "{:.2f}"),
}
CODEC = (Axis("codec", "codec"),)
BITS = (
    Axis("bits_per_weight", "as records, bits a weight"),
    Axis("slot_bits_per_weight", "of a slot, bits a weight"),
    Axis("entropy_bits", "entropy, bits a weight"),
)
SPEEDS = (
    Axis("encode_gb_per_s", "encoding, GB/s"),
    Axis("decode_gb_per_s", "decoding, GB/s"),
    Axis("copy_gb_per_s", "copying, GB/s"),
)
PICTURES = (
    Picture("bits", "Bits that a weight takes", CODEC, BITS, aid="Lower is smaller."),
    Picture("speeds", "How fast codecs are", CODEC, SPEEDS, mark="points"),
)


def run(
    model: str,
    settings: CodecSettings,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
) -> Report:
    """Encode every expert of an unpacked model with every codec that takes its words.

    Raises SpeqError where the model is packed, or what was decoded is not what was encoded.
    """
    with closing(open_model(model)) as opened:
        store, shape = opened.store, opened.store.codec.shape
        if isinstance(store.codec, ScaledCodec):
            rows = [measure_codes(store, store.codec, clock, progress).row()]
            return report_of(rows, model, settings, store)
        if store.codec.name != "raw":
            raise OptionError(
                f"model {model!r} is packed with codec {store.codec.name}; give one of plain words"
            )
        measured = [MeasuredRecords(codec_of(name, shape)) for name in codecs_for(shape)]
        count, slot = store.num_layers * store.num_experts, expert_slot(store)
        with closing(
            open_draft(settings.draft, opened.checkpoint, store, opened.shape.experts)
        ) as source:
            for at in range(count):
                exact = read_matrices(store, *divmod(at, store.num_experts), slot)
                base = source.expert(at)
                for each in measured:
                    each.take(exact, base, clock)
                if progress is not None:
                    progress("encoding experts", at + 1, count)
        dense = measure_dense(opened, clock, progress)
    rows = [each.row() for each in measured] + [each.row() for each in dense if each.weights]
    return report_of(rows, model, settings, store)


def report_of(
    rows: list[dict[str, Any]],
    model: str,
    settings: CodecSettings,
    store: ExpertStore,
) -> Report:
    """The report of these rows, written where it is asked for."""
    count = store.num_layers * store.num_experts
    given = settings.as_json() | {"experts": count, "threads": torch.get_num_threads()}
    return Report("codec", model, given, rows)


def measure_codes(
    store: ExpertStore, codec: ScaledCodec, clock: Clock, progress: Progress | None
) -> MeasuredCodes:
    """All experts of a store of codes with scales, which nothing encodes."""
    measured, count = MeasuredCodes(store, codec), store.num_layers * store.num_experts
    for at in range(count):
        measured.take(*divmod(at, store.num_experts), clock)
        if progress is not None:
            progress("reading experts", at + 1, count)
    return measured


class MeasuredRecords:
    """One codec over a model's experts."""

    def __init__(self, codec: ExpertCodec) -> None:
        self._codec = codec
        self._room = allocate_aligned(1, codec.slot_bytes)[0]
        self._copy = codec.shape.empty()
        self._sizes: list[int] = []
        self._times_s: dict[str, list[float]] = {"encode": [], "decode": [], "copy": []}
        self._entropy = WordCounts()

    def take(self, exact: Matrices, base: Int4Expert, clock: Clock) -> None:
        codec = self._codec
        marks = [clock()]
        self._sizes.append(codec.encode(exact, base, self._room))
        marks.append(clock())
        found = codec.decode(self._room, base)
        marks.append(clock())
        for matrix, copy in zip(exact, self._copy, strict=True):
            copy.copy_(matrix)
        marks.append(clock())
        for name, start_s, end_s in zip(self._times_s, marks, marks[1:], strict=False):
            self._times_s[name].append(end_s - start_s)
        ordered = base.in_order(*exact) if codec.needs_draft else exact
        codes = (base.gate_up, base.down) if codec.needs_draft else (None, None)
        for matrix, back, pair in zip(ordered, found, codes, strict=True):
            if not torch.equal(matrix.view(torch.uint8), back.view(torch.uint8)):
                raise SpeqError(f"codec {codec.name} did not give back the words it was given")
            self._entropy.add(matrix, pair)

    def row(self) -> dict[str, Any]:
        shape = self._codec.shape
        slot_bytes = self._codec.with_slot_bytes(max(self._sizes)).slot_bytes
        return {
            "codec": self._codec.name,
            "bits_per_weight": 8 * sum(self._sizes) / len(self._sizes) / shape.weights,
            "slot_bits_per_weight": 8 * slot_bytes / shape.weights,
            "entropy_bits": self._entropy.bits(),
            **{
                f"{name}_gb_per_s": shape.nbytes / median(times_s) / 1e9
                for name, times_s in self._times_s.items()
            },
        }


class MeasuredDense:
    """One code over a model's dense matrices."""

    def __init__(self, codec: str) -> None:
        self.codec, self.weights = codec, 0
        self._nbytes = 0
        self._times_s = dict.fromkeys(("encode", "decode", "copy"), 0.0)
        self._entropy = WordCounts()

    def take(self, matrix: Tensor, pair: Int4Pair, clock: Clock) -> None:
        """Encode a matrix, over codes or without them. Raises SpeqError where a bit is lost."""
        found, copy = torch.empty_like(matrix), torch.empty_like(matrix)
        marks = [clock()]
        codes = pair if self.codec == "residual" else None
        outputs, columns = matrix.shape
        record = dense_ops.encode_dense(matrix, codes)
        marks.append(clock())
        dense_ops.RecordMatrix(record, outputs, columns, codes).decode(found)
        marks.append(clock())
        copy.copy_(matrix)
        marks.append(clock())
        for name, start_s, end_s in zip(self._times_s, marks, marks[1:], strict=False):
            self._times_s[name] += end_s - start_s
        if not torch.equal(matrix.view(torch.int16), found.view(torch.int16)):
            raise SpeqError(f"dense {self.codec} did not give back the words it was given")
        self.weights += matrix.numel()
        self._nbytes += len(record)
        self._entropy.add(matrix, pair if self.codec == "residual" else None)

    def row(self) -> dict[str, Any]:
        return {
            "codec": f"dense {self.codec}",
            "bits_per_weight": 8 * self._nbytes / self.weights,
            "slot_bits_per_weight": None,
            "entropy_bits": self._entropy.bits(),
            **{
                f"{name}_gb_per_s": 2 * self.weights / time_s / 1e9
                for name, time_s in self._times_s.items()
            },
        }


def measure_dense(
    opened: Opened, clock: Clock, progress: Progress | None
) -> tuple[MeasuredDense, ...]:
    """Both codes over the matrices of a model that are in no expert and have whole codes."""
    names = opened.family.names
    tensors = {
        name: file
        for name, (file, info) in opened.checkpoint.tensors.items()
        if not names.is_expert(name)
        and info.dtype == torch.bfloat16
        and len(info.shape) == 2
        and info.shape[1] % 2 == 0
    }
    measured = MeasuredDense("lossless"), MeasuredDense("residual")
    for name, file in track("encoding dense matrices", tensors.items(), len(tensors), progress):
        matrix = file.tensor(name)
        columns = matrix.shape[1]
        pair = quantize_int4(matrix, columns if columns % GROUP_SIZE else GROUP_SIZE)
        for each in measured:
            each.take(matrix, pair, clock)
    return measured


class WordCounts:
    """How often each word of 16 bits occurs; over codes, each place in a code's window."""

    # By magnitude of the code: words before and behind the start of its window.
    PLACES = 1 << 17

    def __init__(self) -> None:
        self._counts = torch.zeros(9, self.PLACES, dtype=torch.int64)

    def add(self, matrix: Tensor, codes: tuple[Tensor, Tensor] | None) -> None:
        bits = matrix.view(torch.int16).int() & 0xFFFF
        keys = bits
        if codes is not None:
            values, scales = windows.codes_and_scales(*codes)
            starts = windows.window_starts(values, scales)
            # A code of 0 has no sign, and a word of it has: places on both sides of the middle.
            offsets = torch.where(values != 0, bits - starts, bits - (starts & 0x7FFF))
            keys = values.abs() * self.PLACES + offsets + self.PLACES // 2
        self._counts += torch.bincount(keys.flatten(), minlength=9 * self.PLACES).view(9, -1)

    def bits(self) -> float:
        """Entropy of a word, its code known."""
        counts = self._counts.double()
        of_code = counts.sum(1, keepdim=True)
        shares = torch.where(counts > 0, counts / of_code.clamp(min=1), 1.0)
        return float(-(counts * shares.log2()).sum() / counts.sum())


if __name__ == "__main__":
    main("codec")
