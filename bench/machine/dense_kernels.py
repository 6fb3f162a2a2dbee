"""Products of a dense matrix by few rows: what attention, MLPs and the head do at every token.

    linear           plain words
    linear_lossless  out of a lossless record
    linear_residual  out of a residual record; its bytes include its codes
    linear_int4      the draft's codes alone

Rounds, the read beside them and the share of it are as `speq.bench.machine.kernels` has them. Calls
of a round walk through copies of the matrix. Time to raw is that of `linear` in the same round.
"""

import re
import time
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from speq.bench.machine.backends import backends_of, limited_isa
from speq.bench.machine.expert_layer import BLOCK_WEIGHTS, SEED, copies, repeat_layer
from speq.bench.rotation import rotate
from speq.bench.settings import KernelSettings as Settings
from speq.devices.named import find_device
from speq.errors import NoRoom, OptionError, checked_choice
from speq.files.alignment import align
from speq.kernels import dense_ops
from speq.kernels.ops import Int4Weight, quantize_int4
from speq.layers.dense_matrix import DenseMatrix, RawMatrix
from speq.layers.int4_matrix import Int4Matrix
from speq.measure.memory_read import READ_BYTES, Clock, MemoryRead, step_times
from speq.measure.report import Column, Report
from speq.units import Progress, format_bytes, track

BENCH = "dense kernels"
# Projections of models whose hidden states are of 2,048, and their head.
SHAPES = ("2048x2048", "5632x2048", "2048x5632", "32000x2048")
ALL_SHAPES = "dense"
KERNELS = ("linear", "linear_lossless", "linear_residual", "linear_int4")
# Calls of a kernel in one round, each of a copy of its own.
MIN_CALLS, MAX_CALLS = 2, 32

COLUMNS: dict[str, Column] = {
    "shape": ("shape", "{}"),
    "kernel": ("kernel", "{}"),
    "T": ("T", "{}"),
    "bits a weight": ("bits_per_weight", "{:.2f}"),
    "time us": ("time_s", lambda time_s: f"{time_s * 1e6:.4g}"),
    "time to raw": ("time_to_raw", "{:.2f}"),
    "GB/s": ("gb_per_s", "{:.1f}"),
    "share": ("bandwidth_share", "{:.0%}"),
}


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """Rows and columns of a matrix, as in 5632x2048."""

    outputs: int
    columns: int

    @classmethod
    def parse(cls, text: str) -> "MatrixShape | None":
        parts = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})", text)
        return None if parts is None else cls(int(parts[1]), int(parts[2]))

    def __str__(self) -> str:
        return f"{self.outputs}x{self.columns}"

    @property
    def weights(self) -> int:
        return self.outputs * self.columns


class Matrices:
    """Copies of one matrix with random weights, as each kernel reads it, and what a call does."""

    def __init__(
        self, shape: MatrixShape, kernel: str, settings: Settings, device: torch.device, read: int
    ) -> None:
        generator = torch.Generator().manual_seed(SEED)
        random = torch.randn(BLOCK_WEIGHTS, generator=generator).mul_(0.02).bfloat16()
        weight = repeat_layer(random, (shape.outputs, shape.columns), torch.device("cpu"))
        parts: list[Tensor] = []
        self.nbytes = 0
        if kernel in ("linear_residual", "linear_int4"):
            pair = quantize_int4(weight, settings.group_size)
            self.nbytes += sum(part.nbytes for part in pair)
            parts += pair
        if kernel == "linear":
            wide = weight.to(getattr(torch, settings.dtype))
            self.nbytes += wide.nbytes
            parts.insert(0, wide)
        elif kernel == "linear_lossless":
            parts.insert(0, self._recorded(dense_ops.encode_dense(weight)))
        elif kernel == "linear_residual":
            parts.insert(0, self._recorded(dense_ops.encode_dense(weight, (*pair,))))
        self.calls = min(max(read // self.nbytes, MIN_CALLS), MAX_CALLS)
        held = [copies(part, self.calls, device) for part in parts]
        self._copies = [_matrix_of(kernel, shape, each) for each in zip(*held, strict=True)]

    def _recorded(self, record: Tensor) -> Tensor:
        self.nbytes += len(record)
        room = torch.zeros(align(len(record)), dtype=torch.uint8)
        room[: len(record)] = record
        return room

    def run(self, inputs: Tensor) -> None:
        for matrix in self._copies:
            matrix.product(inputs, None)


def _matrix_of(kernel: str, shape: MatrixShape, parts: tuple[Tensor, ...]) -> DenseMatrix:
    """A matrix as the engine holds it, over its parts."""
    if kernel == "linear":
        return RawMatrix(parts[0])
    if kernel in ("linear_lossless", "linear_residual"):
        record, *pair = parts
        codes = (pair[0], pair[1]) if pair else None
        return dense_ops.RecordMatrix(record, shape.outputs, shape.columns, codes)
    return Int4Matrix(Int4Weight(*parts))


def asks_for_matrices(settings: Settings) -> bool:
    """Whether shapes are those of dense matrices. Raises SpeqError where only some are."""
    dense = [name == ALL_SHAPES or MatrixShape.parse(name) is not None for name in settings.shapes]
    if any(dense) and not all(dense):
        raise OptionError(
            f"shapes are {', '.join(settings.shapes)}, of layers of experts and of dense matrices; "
            "measure them one kind at a time"
        )
    return any(dense)


def run(
    settings: Settings, progress: Progress | None = None, clock: Clock = time.perf_counter
) -> Report:
    """Measure every shape, rows and kernel. Raises SpeqError."""
    kernels = KERNELS if settings.kernels == ("all",) else settings.kernels
    for name in kernels:
        checked_choice("kernels", name, KERNELS)
    shapes = shapes_of(settings)
    device = find_device(settings.device).torch
    backends = backends_of({kernel: kernel for kernel in kernels}, settings)
    for shape in shapes:
        check_memory(shape, settings, device)
    rows = []
    with limited_isa(settings.isa, device) as isa:
        read = MemoryRead(READ_BYTES[device.type], device)
        read()
        for shape in track("measuring matrices", shapes, len(shapes), progress):
            matrices = {
                kernel: Matrices(shape, kernel, settings, device, read.nbytes)
                for kernel in dict.fromkeys(kernels)
            }
            for count in dict.fromkeys(settings.rows):
                found = measure(matrices, shape, count, settings, read, clock)
                rows += [
                    {"shape": str(shape), "kernel": kernel, "T": count}
                    | {"dtype": settings.dtype, "backend": backends[kernel]}
                    | {"bits_per_weight": 8 * matrices[kernel].nbytes / shape.weights}
                    | figures
                    for kernel, figures in found.items()
                ]
    threads = torch.get_num_threads()
    given = {"device": device.type, "isa": isa, "threads": threads, "read_bytes": read.nbytes}
    return Report(BENCH, "synthetic matrices", settings.as_json() | given, rows)


def shapes_of(settings: Settings) -> list[MatrixShape]:
    """The shapes that are named. Raises SpeqError where groups do not divide their columns."""
    names = [
        name for each in settings.shapes for name in (SHAPES if each == ALL_SHAPES else (each,))
    ]
    shapes = [shape for name in dict.fromkeys(names) if (shape := MatrixShape.parse(name))]
    for shape in shapes:
        size = settings.group_size
        if size % 2 or shape.columns % size:
            raise OptionError(
                f"group_size is {size}; it must be even and divide the {shape.columns} columns of "
                f"{shape}"
            )
    return shapes


def check_memory(shape: MatrixShape, settings: Settings, device: torch.device) -> None:
    """Raise SpeqError where copies do not fit beside the buffer that is read."""
    read = READ_BYTES[device.type]
    plain = shape.weights * getattr(torch, settings.dtype).itemsize
    # No form takes more than plain words, and each at most what is read, or the fewest copies.
    needed = read + len(KERNELS) * max(read, MIN_CALLS * plain)
    free = find_device(device.type).free_bytes()
    if needed > free:
        raise NoRoom(
            f"{shape} needs {format_bytes(needed)} and {format_bytes(free)} of memory are left; "
            "give smaller shapes"
        )


@torch.inference_mode()
def measure(
    matrices: dict[str, Matrices],
    shape: MatrixShape,
    rows: int,
    settings: Settings,
    read: MemoryRead,
    clock: Clock,
) -> dict[str, dict[str, float | None]]:
    """Medians over the rounds of each kernel, kernels in rotation."""
    device = find_device(settings.device).torch
    generator = torch.Generator().manual_seed(SEED)
    inputs = torch.randn(rows, shape.columns, generator=generator)
    inputs = inputs.to(device, getattr(torch, settings.dtype))
    kernels = list(matrices)
    times: dict[str, list[float]] = {kernel: [] for kernel in kernels}
    shares: dict[str, list[float]] = {kernel: [] for kernel in kernels}
    for kernel in kernels:
        matrices[kernel].run(inputs)  # what is made once is made before anything is timed
    for turn in range(settings.rounds):
        for kernel in rotate(kernels, turn):
            each = matrices[kernel]
            read_s, work_s = step_times([read, partial(each.run, inputs)], device, clock)
            times[kernel].append(work_s / each.calls)
            shares[kernel].append(each.nbytes * each.calls / work_s / (read.nbytes / read_s))
    raw = times.get("linear")
    return {
        kernel: {
            "time_s": median(times[kernel]),
            "time_to_raw": None
            if raw is None
            else median(own / plain for own, plain in zip(times[kernel], raw, strict=True)),
            "gb_per_s": matrices[kernel].nbytes / median(times[kernel]) / 1e9,
            "bandwidth_share": median(shares[kernel]),
        }
        for kernel in kernels
    }


def notes(report: Report) -> list[str]:
    """What readers need to know beside the table."""
    rates = [row["gb_per_s"] / row["bandwidth_share"] for row in report.rows]
    backends = dict.fromkeys(f"{row['kernel']}: {row['backend']}" for row in report.rows)
    isa, threads = report.settings["isa"], report.settings["threads"]
    return [
        f"share: of a plain read of {format_bytes(report.settings['read_bytes'])}, which ran at "
        f"{median(rates):.1f} GB/s beside them.",
        f"{threads} threads{f', {isa}' if isa else ''}; " + ", ".join(backends),
    ]
