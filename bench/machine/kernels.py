"""Expert kernels on layers of real shapes, as time and as a share of what memory can do.

Run in rounds: in each, every kernel in turn makes some calls right behind a plain read of memory,
about as many as read as much, and their share is of that read. A machine that slows down meanwhile
slows both, and the read leaves no experts in the caches. A round's time is the mean of its calls;
shares and times are medians over the rounds.

The bytes of a call are the weights of its distinct experts (INT4: codes and scales), each once.
Experts rotate: calls of one row walk through all experts in turn; each call of more rows draws
top_k distinct experts for every row, uniformly and with a fixed seed. Real routes share more.

    moe_int4          the draft's experts in one call
    moe_int4_unfused  the baseline: a call for each expert and projection
    moe_grouped       the exact experts, without the weighted sum (`ops.combine`). A GPU runs many
                      rows in blocks here; a run has its long prompts multiplied by torch there
    moe_grouped_lossless, moe_grouped_residual
                      the same out of compact records; a residual's bytes include its codes
    moe_grouped_fp8, moe_grouped_mxfp4, moe_grouped_int4, moe_grouped_nvfp4
                      the same out of codes with scales, of experts that were published so
    torch             the exact experts as transformers' eager loop runs them, in bfloat16

Shapes such as 5632x2048 are of dense matrices: see `speq.bench.machine.dense_kernels`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from speq.bench.machine import dense_kernels, issue
from speq.bench.machine.backends import backends_of, limited_isa
from speq.bench.machine.expert_layer import (
    ACTIVATION,
    INT4_GROUPS,
    SEED,
    SHAPES,
    Layer,
    LayerShape,
    torch_experts,
)
from speq.bench.neighbours import beside_neighbours
from speq.bench.rotation import rotate
from speq.bench.settings import KernelSettings as Settings
from speq.devices.named import find_device
from speq.errors import NoRoom, OptionError, checked_choice
from speq.files.fp8_settings import SQUARES
from speq.kernels import compact_ops, ops, scaled_ops
from speq.measure.memory_read import READ_BYTES, Clock, MemoryRead, step_times
from speq.measure.picture import Axis, Picture, percent
from speq.measure.report import Column, Report
from speq.units import Progress, format_bytes, parse_bytes, track

# Those over records published as codes with scales: the form of a layer that each reads.
SCALED = {
    "moe_grouped_fp8": "fp8",
    "moe_grouped_mxfp4": "mxfp4",
    "moe_grouped_int4": "published int4",
    "moe_grouped_nvfp4": "nvfp4",
}
# The op that each kernel runs on; torch's own has none of ours.
KERNELS: dict[str, str | None] = {
    "moe_int4": "moe_int4",
    "moe_int4_unfused": "linear_int4",
    "moe_grouped": "moe_grouped",
    "moe_grouped_lossless": "moe_grouped_lossless",
    "moe_grouped_residual": "moe_grouped_residual",
    **{op: op for op in SCALED},
    "torch": None,
}
# What each reads of a layer.
FORMS: dict[str, frozenset[str]] = {
    "moe_int4": frozenset({"int4"}),
    "moe_int4_unfused": frozenset({"int4"}),
    "moe_grouped": frozenset({"exact"}),
    "moe_grouped_lossless": frozenset({"lossless"}),
    "moe_grouped_residual": frozenset({"residual", "int4"}),
    **{op: frozenset({form}) for op, form in SCALED.items()},
    "torch": frozenset({"exact"}),
}
# Those whose calls a CUDA graph can hold.
CAPTURED = frozenset(
    {"moe_int4", "moe_grouped", "moe_grouped_lossless", "moe_grouped_residual", *SCALED}
)
# Arguments of their own; of NVFP4: matrices' scales do not divide.
OWN: dict[str, tuple[Any, ...]] = {
    "fp8": SQUARES,
    "published int4": INT4_GROUPS,
    "nvfp4": (False,),
}
# Calls of a kernel in one round.
MIN_CALLS, MAX_CALLS = 2, 32

COLUMNS: dict[str, Column] = {
    "shape": ("shape", "{}"),
    "kernel": ("kernel", "{}"),
    "T": ("T", "{}"),
    "experts": ("distinct_experts", "{:.1f}"),
    "time ms": ("time_s", lambda time_s: f"{time_s * 1e3:.4g}"),
    "GB/s": ("gb_per_s", "{:.1f}"),
    "share": ("bandwidth_share", "{:.0%}"),
}
PICTURES = (
    Picture(
        *("share", "Speed of kernels", (Axis("T", "rows of a call"),)),
        (percent("bandwidth_share", "of a plain read's speed"),),
        (Axis("kernel", "kernel"),),
        each="shape",
        aid="At 100% a kernel reads its weights as fast as a plain read of memory beside it.",
    ),
)


@dataclass(frozen=True, slots=True)
class Round:
    """A kernel's calls of one round: means of a call, and the read right before them."""

    time_s: float
    expert_bytes: float
    distinct_experts: float
    read_bytes_per_s: float

    @property
    def share(self) -> float:
        return self.expert_bytes / self.time_s / self.read_bytes_per_s


@beside_neighbours
def run(
    settings: Settings, progress: Progress | None = None, clock: Clock = time.perf_counter
) -> Report:
    """Measure every shape, rows and kernel, or compute it from machine code. Raises SpeqError."""
    if settings.sass:
        return issue.run(settings, progress)
    if dense_kernels.asks_for_matrices(settings):
        return dense_kernels.run(settings, progress, clock)
    settings = spelt_out(settings)
    held = check(settings)
    device = find_device(settings.device).torch
    backends = backends_of({kernel: KERNELS[kernel] for kernel in settings.kernels}, settings)
    check_memory(settings, held, device)
    with limited_isa(settings.isa, device) as isa:
        read = MemoryRead(READ_BYTES[device.type], device)
        read()
        rows = []
        names = list(dict.fromkeys(settings.shapes))
        for name in track("measuring layers", names, len(names), progress):
            rows += measure_shape(SHAPES[name], held[name], settings, backends, read, clock)
    found = {
        "device": device.type,
        "isa": isa,
        "threads": torch.get_num_threads(),
        "read_bytes": read.nbytes,
    }
    return Report("kernels", "synthetic layers", settings.as_json() | found, rows)


def show(report: Report) -> None:
    """The table, of whichever of the benches it is."""
    if report.bench == dense_kernels.BENCH:
        report.print(dense_kernels.COLUMNS)
    else:
        report.print(issue.COLUMNS if report.settings["sass"] else COLUMNS)


def notes(report: Report) -> list[str]:
    """What readers need to know besides."""
    if report.bench == dense_kernels.BENCH:
        return dense_kernels.notes(report)
    if report.settings["sass"]:
        return [*issue.NOTES]
    rates = [row["gb_per_s"] / row["bandwidth_share"] for row in report.rows]
    backends = dict.fromkeys(f"{row['kernel']}: {row['backend']}" for row in report.rows)
    isa, threads = report.settings["isa"], report.settings["threads"]
    sentences = [
        f"share: of a plain read of {format_bytes(report.settings['read_bytes'])}, which ran at "
        f"{median(rates):.1f} GB/s beside them.",
        f"{threads} threads{f', {isa}' if isa else ''}; " + ", ".join(backends),
    ]
    held = {row["shape"]: (row["experts_held"], row["E"]) for row in report.rows}
    return sentences + [
        f"{name}: {count} of {experts} experts held, all that --memory "
        f"{report.settings['memory']} has room for; routes name only those."
        for name, (count, experts) in held.items()
        if count < experts
    ]


def spelt_out(settings: Settings) -> Settings:
    """With names in place of "all"."""
    shapes = tuple(SHAPES) if settings.shapes == ("all",) else settings.shapes
    kernels = tuple(KERNELS) if settings.kernels == ("all",) else settings.kernels
    return replace(settings, shapes=shapes, kernels=kernels)


def check(settings: Settings) -> dict[str, int]:
    """Experts held of each shape. Raises SpeqError for settings that name nothing to measure."""
    for name in settings.shapes:
        checked_choice("shapes", name, tuple(SHAPES))
    for name in settings.kernels:
        checked_choice("kernels", name, tuple(KERNELS))
    size, memory_bytes = settings.group_size, parse_bytes(settings.memory)
    held = {}
    for name in settings.shapes:
        shape = SHAPES[name]
        shape.check_group_size(size)
        held[name] = experts_held(shape, memory_bytes, size)
    return held


def experts_held(shape: LayerShape, memory_bytes: int, group_size: int) -> int:
    """Experts that memory has room for, exact and INT4 together, whatever kernels are asked for:
    figures of different runs are of the same layers."""
    one = shape.exact_bytes + shape.int4_bytes(group_size)
    # With fewer than two routes' worth, calls of one row would find their experts in the caches.
    wanted = min(2 * shape.top_k, shape.num_experts)
    held = min(memory_bytes // one, shape.num_experts)
    if held < wanted:
        raise OptionError(
            f"memory is {format_bytes(memory_bytes)}, which holds {held} experts of {shape.name}; "
            f"at least {wanted} are needed: give {format_bytes(wanted * one)} or more"
        )
    return held


def check_memory(settings: Settings, held: dict[str, int], device: torch.device) -> None:
    """Raise SpeqError where a layer does not fit beside the buffer that is read."""
    free = find_device(device.type).free_bytes()
    needed_forms = forms(settings.kernels)
    for name, count in held.items():
        shape = SHAPES[name]
        one = sum(shape.most_bytes(form, settings.group_size) for form in needed_forms)
        needed = count * one + READ_BYTES[device.type]
        if needed > free:
            raise NoRoom(
                f"{name} needs {format_bytes(needed)} and {format_bytes(free)} of memory are left; "
                f"give less --memory than {settings.memory}, or other shapes"
            )


def forms(kernels: Sequence[str]) -> frozenset[str]:
    """The forms of experts that kernels need."""
    return frozenset().union(*(FORMS[kernel] for kernel in kernels))


def calls_of(kernel: str, layer: Layer, rows: int, group_size: int, read_bytes: int) -> int:
    """Calls that read about `read_bytes` of experts: short ones say little about either."""
    experts = min(rows * layer.shape.top_k, len(layer.places))
    one = experts * expert_bytes(kernel, layer, group_size)
    return min(max(read_bytes // one, MIN_CALLS), MAX_CALLS)


def draw_routes(calls: int, rows: int, top_k: int, held: int) -> Tensor:
    """Experts [calls, rows, top_k] of `held`: see the top of this file."""
    if rows == 1:
        return torch.arange(calls * top_k).remainder(held).view(calls, 1, top_k)
    generator = torch.Generator().manual_seed(SEED)
    return torch.rand(calls, rows, held, generator=generator).argsort(dim=2)[..., :top_k]


class Calls:
    """Calls of one kernel, each with a route of its own.

    routes    [calls, T, K] on the device; written to between runs
    captured  whether they run as one CUDA graph
    """

    def __init__(
        self, kernel: str, layer: Layer, routes: Tensor, dtype: torch.dtype, captured: bool
    ) -> None:
        device = layer.places.device
        _, rows, top_k = routes.shape
        self._kernel, self._layer = kernel, layer
        generator = torch.Generator().manual_seed(SEED)
        hidden_states = torch.randn(rows, layer.shape.hidden_size, generator=generator)
        self._hidden_states = hidden_states.to(device, dtype)
        self._topk_weights = torch.full((rows, top_k), 1 / top_k, device=device)
        self.routes = routes.to(device, copy=True)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.run()  # what is made once is made before anything is timed
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.run()
            self._graph = graph
            self.run()

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        for topk_ids in self.routes:
            call(self._kernel, self._layer, self._hidden_states, topk_ids, self._topk_weights)


def call(
    kernel: str, layer: Layer, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
) -> Tensor:
    """One call, through the wrapper that the engine calls."""
    if kernel == "torch":
        return torch_experts(hidden_states, topk_ids, topk_weights, *layer.exact)
    rows = hidden_states, topk_ids, layer.places
    out = hidden_states.new_empty(*topk_ids.shape, hidden_states.shape[1])
    if kernel == "moe_grouped":
        ops.moe_grouped(*rows, *layer.exact, ACTIVATION, out)
        return out
    if kernel == "moe_grouped_lossless":
        held = layer.slots["lossless"], layer.shape.expert_width
        compact_ops.moe_grouped_lossless(*rows, *held, ACTIVATION, out)
        return out
    if kernel in SCALED:
        form = SCALED[kernel]
        slots, published = layer.slots[form], kernel.removeprefix("moe_grouped_")
        given = slots, layer.shape.expert_width, OWN.get(form, ())
        scaled_ops.moe_grouped(published, *rows, *given, ACTIVATION, out)
        return out
    if kernel == "moe_grouped_residual":
        places = layer.places
        compact_ops.moe_grouped_residual(
            *rows, layer.slots["residual"], places, layer.backend, ACTIVATION, out
        )
        return out
    run_int4 = {"moe_int4": ops.moe_int4, "moe_int4_unfused": ops.moe_int4_unfused}[kernel]
    return run_int4(hidden_states, topk_ids, topk_weights, layer.places, layer.backend, ACTIVATION)


def measure_shape(
    shape: LayerShape,
    held: int,
    settings: Settings,
    backends: dict[str, str],
    read: MemoryRead,
    clock: Clock,
) -> list[dict[str, Any]]:
    """Rows of the report for one shape; its experts are gone on return."""
    device = find_device(settings.device).torch
    layer = Layer(shape, held, forms(settings.kernels), settings.group_size, device)
    rows = []
    for count in dict.fromkeys(settings.rows):
        rounds = measure(layer, count, settings, backends, read, clock)
        for kernel, samples in rounds.items():
            row = {
                "kernel": kernel,
                "shape": shape.name,
                "T": count,
                "K": shape.top_k,
                "E": shape.num_experts,
                "experts_held": held,
                "dtype": settings.dtype,
                "backend": backends[kernel],
            }
            rows.append(row | summarise(samples))
    return rows


@torch.inference_mode()
def measure(
    layer: Layer,
    rows: int,
    settings: Settings,
    backends: dict[str, str],
    read: MemoryRead,
    clock: Clock,
) -> dict[str, list[Round]]:
    """The rounds of each kernel, kernels in rotation."""
    device, dtype = layer.places.device, getattr(torch, settings.dtype)
    top_k, held, size = layer.shape.top_k, len(layer.places), settings.group_size
    kernels = list(dict.fromkeys(settings.kernels))
    routes, works = {}, {}
    for kernel in kernels:
        calls = calls_of(kernel, layer, rows, size, read.nbytes)
        drawn = draw_routes(settings.rounds * calls, rows, top_k, held)
        routes[kernel] = drawn.unflatten(0, (settings.rounds, calls))
        # The others look at their routes on the host.
        captured = backends[kernel] == "cuda" and kernel in CAPTURED
        works[kernel] = Calls(kernel, layer, routes[kernel][0], dtype, captured)
    found: dict[str, list[Round]] = {kernel: [] for kernel in kernels}
    for turn in range(settings.rounds):
        for kernel in rotate(kernels, turn):
            work, ids = works[kernel], routes[kernel][turn]
            work.routes.copy_(ids)
            read_s, work_s = step_times([read, work.run], device, clock)
            distinct = fmean(len(route.unique()) for route in ids)
            found[kernel].append(
                Round(
                    time_s=work_s / len(ids),
                    expert_bytes=distinct * expert_bytes(kernel, layer, size),
                    distinct_experts=distinct,
                    read_bytes_per_s=read.nbytes / read_s,
                )
            )
    return found


def expert_bytes(kernel: str, layer: Layer, group_size: int) -> int:
    """Bytes of one expert's weights as `kernel` reads them."""
    return sum(layer.expert_bytes(form, group_size) for form in FORMS[kernel])


def summarise(rounds: list[Round]) -> dict[str, float]:
    """Medians over the rounds; GB/s of the mean call at the median time."""
    time_s = median(each.time_s for each in rounds)
    return {
        "distinct_experts": fmean(each.distinct_experts for each in rounds),
        "time_s": time_s,
        "gb_per_s": fmean(each.expert_bytes for each in rounds) / time_s / 1e9,
        "bandwidth_share": median(each.share for each in rounds),
    }
