"""Kernels as torch ops: schemas, and the choice between native code and reference.

Each op is declared once, here. The reference is its default implementation on every device; a
native library registers faster ones for its device.
"""

import ctypes
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speq.kernels import (
    reference,
    reference_compact,
    reference_decoder,
    reference_dense,
    reference_recurrent,
    reference_scaled,
)
from speq.kernels.architectures import Architectures
from speq.kernels.reference import ACTIVATIONS, Activation

logger = logging.getLogger("speq")

# The package, which libraries are built into.
FOLDER = Path(__file__).parent.parent
CPU_LIBRARY = FOLDER / "libspeq_cpu.so"
CUDA_LIBRARY = FOLDER / "libspeq_cuda.so"
# Number of each activation, as ops take it; csrc/activation.h has the same order.
ACTIVATION_CODES = {name: code for code, name in enumerate(ACTIVATIONS)}


def _with_activation_number(
    kernel: Callable[..., None], at: int | None = None
) -> Callable[..., None]:
    """Wrap a reference to take its activation, the argument `at`, as numbers: its code and its
    limit.
    """
    names = tuple(ACTIVATIONS)
    if at is None:
        at = [*inspect.signature(kernel).parameters].index("activation")

    def run(*arguments: Any) -> None:
        code, limit, *others = arguments[at:]
        kernel(*arguments[:at], Activation(names[code], limit), *others)

    return run


# See `Activation`.
_ACTIVATION = "int activation, float limit"
# Biases of experts, if any: [E, 2F], gate before up, and [E, H].
_BIASES = "Tensor? gate_up_bias=None, Tensor? down_bias=None"
# Matrices of an expert that are encoded: of gate, up and down.
_MATRICES = "int first=0, int end=3"


# Schema and reference of every op, by name.
OPS: dict[str, tuple[str, Callable[..., None]]] = {
    "linear": (
        "(Tensor inputs, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()",
        reference.linear_out,
    ),
    "linear_int4": (
        "(Tensor inputs, Tensor qweight, Tensor scales, Tensor? input_perm, Tensor(a!) out) -> ()",
        reference.linear_int4_out,
    ),
    "moe_int4": (
        "(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor base_slots, "
        "Tensor gate_up_qweight, Tensor gate_up_scales, Tensor down_qweight, Tensor down_scales, "
        f"Tensor? input_perm, {_ACTIVATION}, Tensor(a!) out, {_BIASES}) -> ()",
        _with_activation_number(reference.moe_int4_out),
    ),
    "moe_grouped": (
        "(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor gate_up_proj, "
        f"Tensor down_proj, {_ACTIVATION}, Tensor(a!) out, {_BIASES}) -> ()",
        _with_activation_number(reference.moe_grouped_out),
    ),
    "encode_lossless": (
        "(Tensor gate_up_proj, Tensor down_proj, Tensor(a!) record, Tensor(b!) nbytes, "
        f"{_MATRICES}) -> ()",
        reference_compact.encode_lossless_out,
    ),
    "decode_lossless": (
        "(Tensor record, Tensor(a!) gate_up_proj, Tensor(b!) down_proj) -> ()",
        reference_compact.decode_lossless_out,
    ),
    "moe_grouped_lossless": (
        "(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots, "
        f"int expert_width, {_ACTIVATION}, Tensor(a!) out, {_BIASES}) -> ()",
        _with_activation_number(reference_compact.moe_grouped_lossless_out, 5),
    ),
    "encode_residual": (
        "(Tensor gate_up_proj, Tensor down_proj, Tensor gate_up_qweight, Tensor gate_up_scales, "
        "Tensor down_qweight, Tensor down_scales, Tensor(a!) record, Tensor(b!) nbytes, "
        f"{_MATRICES}) -> ()",
        reference_compact.encode_residual_out,
    ),
    "decode_residual": (
        "(Tensor record, Tensor gate_up_qweight, Tensor gate_up_scales, Tensor down_qweight, "
        "Tensor down_scales, Tensor(a!) gate_up_proj, Tensor(b!) down_proj) -> ()",
        reference_compact.decode_residual_out,
    ),
    "moe_grouped_residual": (
        "(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots, "
        "Tensor base_slots, Tensor gate_up_qweight, Tensor gate_up_scales, Tensor down_qweight, "
        f"Tensor down_scales, Tensor? input_perm, {_ACTIVATION}, Tensor(a!) out, {_BIASES}) -> ()",
        _with_activation_number(reference_compact.moe_grouped_residual_out),
    ),
    "decode_fp8": (
        "(Tensor record, int block_rows, int block_columns, Tensor(a!) gate_up_proj, "
        "Tensor(b!) down_proj) -> ()",
        reference_scaled.decode_fp8_out,
    ),
    "moe_grouped_fp8": (
        "(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots, "
        f"int expert_width, int block_rows, int block_columns, {_ACTIVATION}, Tensor(a!) out, "
        f"{_BIASES}) -> ()",
        _with_activation_number(reference_scaled.moe_grouped_fp8_out, 7),
    ),
    "decode_mxfp4": (
        "(Tensor record, Tensor(a!) gate_up_proj, Tensor(b!) down_proj) -> ()",
        reference_scaled.decode_mxfp4_out,
    ),
    "moe_grouped_mxfp4": (
        "(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots, "
        f"int expert_width, {_ACTIVATION}, Tensor(a!) out, {_BIASES}) -> ()",
        _with_activation_number(reference_scaled.moe_grouped_mxfp4_out, 5),
    ),
    "decode_int4": (
        "(Tensor record, int group_size, bool has_zeros, bool has_halves, "
        "Tensor(a!) gate_up_proj, Tensor(b!) down_proj) -> ()",
        reference_scaled.decode_int4_out,
    ),
    "moe_grouped_int4": (
        "(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots, "
        f"int expert_width, int group_size, bool has_zeros, bool has_halves, {_ACTIVATION}, "
        f"Tensor(a!) out, {_BIASES}) -> ()",
        _with_activation_number(reference_scaled.moe_grouped_int4_out, 8),
    ),
    "decode_nvfp4": (
        "(Tensor record, bool divides, Tensor(a!) gate_up_proj, Tensor(b!) down_proj) -> ()",
        reference_scaled.decode_nvfp4_out,
    ),
    "moe_grouped_nvfp4": (
        "(Tensor hidden_states, Tensor topk_ids, Tensor slot_table, Tensor slots, "
        f"int expert_width, bool divides, {_ACTIVATION}, Tensor(a!) out, {_BIASES}) -> ()",
        _with_activation_number(reference_scaled.moe_grouped_nvfp4_out, 6),
    ),
    "rms_norm": (
        "(Tensor inputs, Tensor? added, Tensor weight, float eps, Tensor(a!)? sums, "
        "Tensor(b!) out) -> ()",
        reference_decoder.rms_norm_out,
    ),
    "attention": (
        "(Tensor queries, Tensor keys, Tensor values, Tensor? query_norm, Tensor? key_norm, "
        "float eps, Tensor cos, Tensor sin, Tensor(a!) cached_keys, Tensor(b!) cached_values, "
        "int start, int window, float scale, Tensor? parents, Tensor(c!) out, Tensor? sinks=None, "
        "Tensor? chosen=None) -> ()",
        reference_decoder.attention_out,
    ),
    "latent_attention": (
        "(Tensor queries, Tensor latents, Tensor norm, float eps, Tensor expansion, Tensor cos, "
        "Tensor sin, bool interleaved, Tensor(a!) cached_latents, Tensor(b!) cached_rotary, "
        "int start, int window, float scale, Tensor? parents, Tensor(c!) out, "
        "Tensor? chosen=None) -> ()",
        reference_decoder.latent_attention_out,
    ),
    "masked_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor mask, float scale, Tensor? sinks, "
        "Tensor(a!) out) -> ()",
        reference_decoder.masked_attention_out,
    ),
    "rotate": (
        "(Tensor(a!) rows, int width, Tensor cos, Tensor sin, bool interleaved) -> ()",
        reference_decoder.rotate_out,
    ),
    "route": (
        "(Tensor logits, Tensor? bias, Tensor? factors, bool sigmoid, bool rounded, bool divided, "
        "int groups, int kept_groups, int group_best, float added, float scale, "
        "Tensor(a!) topk_weights, Tensor(b!) topk_ids) -> ()",
        reference_decoder.route_out,
    ),
    "combine": (
        "(Tensor outputs, Tensor topk_weights, Tensor(a!) out) -> ()",
        reference_decoder.combine_out,
    ),
    "mix_streams": (
        "(Tensor normed, Tensor gates, Tensor(a!) out) -> ()",
        reference_decoder.mix_streams_out,
    ),
    "add_streams": (
        "(Tensor hidden, Tensor update, Tensor gates, Tensor(a!) out) -> ()",
        reference_decoder.add_streams_out,
    ),
    "delta_rule": (
        "(Tensor mixed, Tensor decays, Tensor betas, float eps, Tensor(a!) state, Tensor(b!) out) "
        "-> ()",
        reference_recurrent.delta_rule_out,
    ),
    "selective_scan": (
        "(Tensor mixed, Tensor decays, Tensor steps, Tensor(a!) state, Tensor(b!) out) -> ()",
        reference_recurrent.selective_scan_out,
    ),
    "quantize_int4": (
        "(Tensor weight, int group_size, Tensor(a!) qweight, Tensor(b!) scales) -> ()",
        reference.quantize_int4_out,
    ),
    "encode_dense_lossless": (
        "(Tensor weight, Tensor(a!) record, Tensor(b!) nbytes) -> ()",
        reference_dense.encode_dense_lossless_out,
    ),
    "decode_dense_lossless": (
        "(Tensor record, int rows, int first, Tensor(a!) weight) -> ()",
        reference_dense.decode_dense_lossless_out,
    ),
    "linear_lossless": (
        "(Tensor inputs, Tensor record, Tensor? bias, Tensor(a!) out) -> ()",
        reference_dense.linear_lossless_out,
    ),
    "rows_lossless": (
        "(Tensor record, int rows, Tensor ids, Tensor(a!) out) -> ()",
        reference_dense.rows_lossless_out,
    ),
    "encode_dense_residual": (
        "(Tensor weight, Tensor qweight, Tensor scales, Tensor(a!) record, Tensor(b!) nbytes) "
        "-> ()",
        reference_dense.encode_dense_residual_out,
    ),
    "decode_dense_residual": (
        "(Tensor record, Tensor qweight, Tensor scales, int first, Tensor(a!) weight) -> ()",
        reference_dense.decode_dense_residual_out,
    ),
    "linear_residual": (
        "(Tensor inputs, Tensor record, Tensor qweight, Tensor scales, Tensor? bias, "
        "Tensor(a!) out) -> ()",
        reference_dense.linear_residual_out,
    ),
    "rows_residual": (
        "(Tensor record, Tensor qweight, Tensor scales, Tensor ids, Tensor(a!) out) -> ()",
        reference_dense.rows_residual_out,
    ),
    "read_sum": ("(Tensor words, Tensor(a!) out) -> ()", reference.read_sum_out),
}

# On a GPU torch's own ops are fast, and encoding is done on the host.
CPU_ONLY = frozenset(
    {
        *("linear", "quantize_int4", "encode_lossless", "encode_residual"),
        *("encode_dense_lossless", "encode_dense_residual"),
        *("rms_norm", "rotate", "attention", "latent_attention", "masked_attention"),
        *("route", "combine", "delta_rule", "selective_scan", "mix_streams", "add_streams"),
    }
)

_library = torch.library.Library("speq", "DEF")
for _name, (_schema, _reference) in OPS.items():
    _library.define(f"{_name}_out{_schema}")
    _library.impl(f"{_name}_out", _reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"speq::{_name}_out", lambda *_: None, lib=_library)


# Looked up once: a lookup costs as much as a small kernel.
_OVERLOADS = {name: getattr(torch.ops.speq, f"{name}_out").default for name in OPS}


@dataclass(frozen=True, slots=True)
class Kernels:
    """The ops for tensors of one kind of device, and the limits of a call.

    overloads      overload of each op, by name
    max_rows       rows of a call
    max_positions  places of all routes of a call, which are rows times top_k
    max_record_bytes, max_record_columns  largest compact record of a dense matrix
    """

    overloads: Mapping[str, Callable[..., None]]
    max_rows: int = sys.maxsize
    max_positions: int = sys.maxsize
    max_record_bytes: int = sys.maxsize
    max_record_columns: int = sys.maxsize

    def takes_record(self, nbytes: int, columns: int) -> bool:
        """True if a dense matrix may be held as a record of `nbytes` bytes."""
        return nbytes <= self.max_record_bytes and columns <= self.max_record_columns

    def call_rows(self, top_k: int) -> int:
        """Most rows of a call whose routes have top_k places each; 0 if one row is too much."""
        return min(self.max_rows, self.max_positions // max(top_k, 1))


# Kernels by device type. All rows of a call stay in a GPU's registers while weights stream by;
# csrc/cuda/launchers.h and dense_bindings.cpp have the same limits.
KERNELS = {
    "cpu": Kernels(_OVERLOADS),
    "cuda": Kernels(
        _OVERLOADS,
        max_rows=16,
        max_positions=256,
        max_record_bytes=(1 << 31) - 2,
        max_record_columns=(1 << 16) - 1,
    ),
}


def kernels_for(tensor: Tensor) -> Kernels:
    """Find the kernels for the device of a tensor."""
    if tensor.is_cuda:
        MISSING["cuda"]  # which loads them
        return KERNELS["cuda"]
    return KERNELS["cpu"]


def load(path: Path) -> str | None:
    """Load compiled kernels. Return the reason if they cannot be loaded."""
    if not path.exists():
        return f"{path} was not built"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path} does not load: {error}"
    return None


def _load_cuda() -> str | None:
    """Load the CUDA kernels if the present GPU can run them; once loaded, they would be
    launched.
    """
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not CUDA_LIBRARY.exists():
        return f"{CUDA_LIBRARY} was not built"
    try:
        built_for = Architectures.of_library(CUDA_LIBRARY)
    except ValueError as error:
        return f"{error}; build it again"
    capability = torch.cuda.get_device_capability()
    if not built_for.run_on(capability):
        return (
            f"this card has compute capability {capability[0]}.{capability[1]}, and "
            f"{CUDA_LIBRARY.name} has code for {built_for}"
        )
    return load(CUDA_LIBRARY)


class _Missing(dict[str, str | None]):
    """Reasons why "cpu" or "cuda" has no native kernels; None if it has.

    CUDA kernels are loaded at first use: only a started driver knows what its GPU can run, and runs
    on the CPU need not start it.
    """

    def __missing__(self, device: str) -> str | None:
        if device != "cuda":
            raise KeyError(device)
        self[device] = _load_cuda()
        return self[device]


MISSING = _Missing(cpu=load(CPU_LIBRARY))


def ops_of(device: str) -> list[str]:
    """Ops with a native kernel for a device, if its library is built."""
    return [op for op in OPS if device == "cpu" or op not in CPU_ONLY]


@dataclass(frozen=True, slots=True)
class Backend:
    """Implementation of an op: "cpu" or "cuda" for a native kernel, else "reference"; and the
    reason.
    """

    name: str
    reason: str


def backend_of(op: str, device: str) -> Backend:
    """Find what runs `op` for tensors on "cpu" or "cuda"."""
    missing, key = MISSING[device], {"cpu": "CPU", "cuda": "CUDA"}[device]
    bound = torch._C._dispatch_has_kernel_for_dispatch_key(f"speq::{op}_out", key)
    if missing is not None or not bound:
        return Backend("reference", missing or f"there is no native {op} for {device}")
    if device == "cpu":
        return Backend("cpu", isa())
    return Backend("cuda", f"{CUDA_LIBRARY.name}, for {Architectures.of_library(CUDA_LIBRARY)}")


def report_backends(device: str) -> None:
    """Warn of ops that run on the slow reference, so that its speed is not taken for ours."""
    slow = {op: backend_of(op, device) for op in ops_of(device)}
    slow = {op: backend for op, backend in slow.items() if backend.name == "reference"}
    for reason in dict.fromkeys(backend.reason for backend in slow.values()):
        ops = ", ".join(op for op, backend in slow.items() if backend.reason == reason)
        logger.warning("slow reference kernels in use for %s (%s)", ops, reason)


# Instruction sets that the CPU kernels are compiled for, best first.
ISAS = (
    *("avx512_amx", "avx512_bf16", "avx512_vbmi2", "avx512_vnni", "avx512", "avx2"),
    *("neon_bf16", "neon_dot", "neon", "portable"),
)


def isa() -> str:
    return ISAS[cpu_library().speq_isa()]


def supported_isas() -> tuple[str, ...]:
    """Instruction sets that this processor and this build can run."""
    return tuple(name for at, name in enumerate(ISAS) if cpu_library().speq_has_isa(at))


def limit_isa(name: str) -> None:
    """Make the CPU kernels use no better instructions than `name`, in the whole process.

    For tests and benchmarks. Raises ValueError if the processor lacks them.
    """
    if name not in supported_isas():
        raise ValueError(f"isa {name!r} cannot run here; choose from {', '.join(supported_isas())}")
    cpu_library().speq_limit_isa(ISAS.index(name))


@contextmanager
def ordered_sums() -> Iterator[None]:
    """Inside, this thread's CPU kernels add up exact products in the order that cards do
    (csrc/sum_order.h). Where processors multiply pairs of BF16 that is slower.
    """
    before = cpu_library().speq_order_sums(1)
    try:
        yield
    finally:
        cpu_library().speq_order_sums(before)


def has_cpu_library() -> bool:
    """True if the native CPU kernels were built and run here."""
    return MISSING["cpu"] is None


def cpu_library() -> ctypes.CDLL:
    if MISSING["cpu"] is not None:
        raise RuntimeError(f"there are no native CPU kernels: {MISSING['cpu']}")
    return ctypes.CDLL(str(CPU_LIBRARY))


def call(op: str, tensor: Tensor, *arguments: Tensor | float | None) -> None:
    """Run an op by name, on the device of its first argument."""
    kernels_for(tensor).overloads[op](tensor, *arguments)
