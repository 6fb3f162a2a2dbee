"""The public kernels: checks, dispatch, and the references themselves against numpy.

Native kernels against the references are in test_kernels.py.
"""

import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from speq.experts.int4 import Int4Arena, Int4Layout, group_size_of
from speq.kernels import compact_ops, dense_ops, library, ops, reference
from speq.kernels.checks import EXACT_DTYPES, FLOAT_DTYPES
from speq.kernels.library import Backend
from speq.kernels.ops import Int4Slots
from speq.kernels.scaled_layout import Fp8Layout, Int4GroupsLayout, Mxfp4Layout, Nvfp4Layout
from tests.helpers.backends import ISAS, need_backend
from tests.helpers.expert_problems import SILU
from tests.reference import int4
from tests.reference.int4 import rounded

POISON = 12345.0


def codes_and_scales(rows: int, columns: int, group: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    qweight = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randn(rows, columns // group, generator=generator) * 0.1
    return qweight, scales.half()


def unpacked(qweight: Tensor, scales: Tensor) -> np.ndarray:
    return int4.unpacked(qweight.numpy(), scales.numpy())


def test_native_library_is_in_use() -> None:
    assert library.MISSING["cpu"] is None
    assert library.CPU_LIBRARY.exists()
    for op in library.OPS:
        assert library.backend_of(op, "cpu") == Backend("cpu", library.isa())


def test_missing_library_is_a_reason_and_no_error(tmp_path: Path) -> None:
    absent = tmp_path / "libabsent.so"
    assert library.load(absent) == f"{absent} was not built"
    broken = tmp_path / "libbroken.so"
    broken.write_bytes(b"no library")
    assert str(library.load(broken)).startswith(f"{broken} does not load: ")


def test_op_without_a_native_kernel_is_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.library._scoped_library("speq", "FRAGMENT") as fragment:
        fragment.define("only_tested_out(Tensor x) -> ()")
        fragment.impl("only_tested_out", lambda x: None, "CompositeExplicitAutograd")
        slow = library.backend_of("only_tested", "cpu")
        assert slow == Backend("reference", "there is no native only_tested for cpu")
        monkeypatch.setitem(library.OPS, "only_tested", ("", lambda x: None))
        library.report_backends("cpu")
        assert caplog.messages == [
            "slow reference kernels in use for only_tested (there is no native only_tested for cpu)"
        ]
        fragment.impl("only_tested_out", lambda x: None, "CPU")
        assert library.backend_of("only_tested", "cpu").name == "cpu"
        assert library.backend_of("only_tested", "cuda").name == "reference"


def test_the_best_instruction_set_can_be_limited() -> None:
    best, *lesser = library.supported_isas()
    assert library.isa() == best
    assert library.supported_isas()[-1] == "portable"
    try:
        for name in lesser:
            library.limit_isa(name)
            assert library.isa() == name
    finally:
        library.limit_isa(best)
    with pytest.raises(ValueError, match=r"isa 'sse9' cannot run here; choose from .*portable"):
        library.limit_isa("sse9")


def test_processor_says_the_same() -> None:
    """What the library detects, against what the system lists."""
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        pytest.skip("this system has no /proc/cpuinfo")
    arm = platform.machine() == "aarch64"
    flags = set(told.partition("Features" if arm else "flags")[2].split("\n")[0].split())
    wanted = "neon" if arm else "portable"
    if {"asimddp"} <= flags:
        wanted = "neon_bf16" if {"bf16"} <= flags else "neon_dot"
    if {"avx2", "fma", "f16c"} <= flags:
        wanted = "avx2"
        if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
            wanted = "avx512"
            for name, needed in zip(
                ("avx512_vnni", "avx512_vbmi2", "avx512_bf16", "avx512_amx"),
                (
                    {"avx512_vnni"},
                    {"avx512vbmi", "avx512_vbmi2"},
                    {"avx512_bf16"},
                    {"amx_tile", "amx_bf16"},
                ),
                strict=True,
            ):
                if not needed <= flags:
                    break
                wanted = name
    assert library.supported_isas()[0] == wanted


@pytest.mark.parametrize(("rows", "columns", "group"), [(1, 2, 2), (5, 64, 32), (7, 96, 6)])
def test_unpacked_codes_are_numpys(rows: int, columns: int, group: int) -> None:
    qweight, scales = codes_and_scales(rows, columns, group)
    ours = reference.unpack_int4(qweight, scales)
    assert np.array_equal(ours.double().numpy(), unpacked(qweight, scales))


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100, 256])
def test_inputs_are_rounded_to_the_nearest_of_255_steps(columns: int) -> None:
    inputs = torch.randn(4, columns, generator=torch.Generator().manual_seed(11))
    inputs[1] *= 1e4
    inputs[2] = 0
    ours = reference.round_to_int8(inputs).double().numpy()
    for row, values in zip(ours, inputs.double().numpy(), strict=True):
        np.testing.assert_allclose(row, rounded(values), rtol=1e-6, atol=0)
    blocks = np.abs(inputs.numpy())
    assert (np.abs(ours - inputs.numpy()) <= 1.0001 * blocks.max(1, keepdims=True) / 254).all()


def test_ties_are_rounded_to_even() -> None:
    ours = reference.round_to_int8(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]))
    assert ours.tolist() == [[127.0, 0.0, 2.0, 2.0, 0.0, -2.0]]


def test_blocks_with_what_is_no_number_are_none() -> None:
    inputs = torch.ones(2, 70)
    inputs[0, 3], inputs[1, 69] = torch.inf, torch.nan
    ours = reference.round_to_int8(inputs).isnan()
    assert ours[0].tolist() == [True] * 32 + [False] * 38
    assert ours[1].tolist() == [False] * 64 + [True] * 6


@pytest.mark.parametrize("permuted", [False, True])
def test_linear_int4_matches_numpy(permuted: bool) -> None:
    """More rows than are dequantised at a time."""
    qweight, scales = codes_and_scales(1100, 100, 20)
    inputs = torch.randn(3, 100, generator=torch.Generator().manual_seed(12))
    perm = torch.randperm(100, generator=torch.Generator().manual_seed(13)).int()
    ours = ops.linear_int4(inputs, qweight, scales, perm if permuted else None)
    rows = inputs.double().numpy()
    rows = rows[:, perm.numpy()] if permuted else rows
    wanted = np.stack([unpacked(qweight, scales) @ rounded(row) for row in rows])
    np.testing.assert_allclose(ours.numpy(), wanted, rtol=1e-4, atol=1e-4)
    plain = torch.empty(3, 1100)
    reference.linear_int4_out(inputs, qweight, scales, perm if permuted else None, plain)
    np.testing.assert_allclose(plain.numpy(), wanted, rtol=1e-4, atol=1e-4)


BANK = {
    "gate_up_qweight": torch.zeros(5, 16, 32, dtype=torch.uint8),
    "gate_up_scales": torch.zeros(5, 16, 2, dtype=torch.float16),
    "down_qweight": torch.zeros(5, 64, 4, dtype=torch.uint8),
    "down_scales": torch.zeros(5, 64, 1, dtype=torch.float16),
    "input_perm": torch.arange(64, dtype=torch.int32).repeat(5, 1),
}


def bank_of(parts: dict[str, Tensor]) -> Int4Slots:
    return Int4Slots(
        (parts["gate_up_qweight"], parts["gate_up_scales"]),
        (parts["down_qweight"], parts["down_scales"]),
        parts["input_perm"],
    )


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("gate_up_qweight", torch.zeros(5, 16, 32), "float32; it must be torch.uint8"),
        ("gate_up_qweight", torch.zeros(5, 16, 31, dtype=torch.uint8), r"of a matrix \[16, 64\]"),
        ("gate_up_qweight", torch.zeros(16, 32, dtype=torch.uint8), "must be .16, any, any"),
        ("gate_up_scales", torch.zeros(5, 16, 2), "float32; it must be torch.float16"),
        ("gate_up_scales", torch.zeros(5, 16, 3).half(), "an even group_size"),
        ("gate_up_scales", torch.zeros(5, 16, 64).half(), "an even group_size"),
        ("gate_up_scales", torch.zeros(5, 2, 16).half().mT, "it must be contiguous"),
        ("gate_up_scales", torch.zeros(4, 16, 2).half(), r"must be \[5, any, any\]"),
        ("down_qweight", torch.zeros(5, 64, 3, dtype=torch.uint8), r"of a matrix \[64, 8\]"),
        ("down_qweight", torch.zeros(4, 64, 4, dtype=torch.uint8), r"must be \[5, any, any\]"),
        ("down_scales", torch.zeros(5, 60, 1).half(), r"of a matrix \[64, 8\]"),
        ("down_scales", torch.zeros(5, 64, 0).half(), "an even group_size"),
        ("down_scales", torch.zeros(5, 64, 1, device="meta").half(), "on meta; it must be on cpu"),
        ("input_perm", torch.zeros(5, 64), "float32; it must be torch.int32"),
        ("input_perm", torch.zeros(64, dtype=torch.int32), r"must be \[5, 64\]"),
        ("input_perm", torch.full((5, 64), 64).int(), "outside the 64"),
        ("input_perm", torch.full((5, 64), -1).int(), "outside the 64"),
    ],
)
def test_bank_errors_name_the_part(name: str, tensor: Tensor, message: str) -> None:
    bank_of(BANK)
    with pytest.raises(ValueError, match=f"^{name} .*{message}"):
        bank_of(BANK | {name: tensor})


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "linear": (
        ops.linear,
        {
            "inputs": torch.zeros(3, 64),
            "weight": torch.zeros(4, 64),
            "bias": torch.zeros(4),
        },
    ),
    "linear_int4": (
        ops.linear_int4,
        {
            "inputs": torch.zeros(3, 64),
            "qweight": torch.zeros(4, 32, dtype=torch.uint8),
            "scales": torch.zeros(4, 2, dtype=torch.float16),
            "input_perm": torch.arange(64, dtype=torch.int32),
        },
    ),
    "moe_int4": (
        ops.moe_int4,
        {
            "hidden_states": torch.zeros(3, 64),
            "topk_ids": torch.zeros(3, 2, dtype=torch.int64),
            "topk_weights": torch.zeros(3, 2),
            "base_slots": torch.arange(5),
            "experts": bank_of(BANK),
            "activation": SILU,
        },
    ),
    "moe_grouped": (
        ops.moe_grouped,
        {
            "hidden_states": torch.zeros(3, 64),
            "topk_ids": torch.zeros(3, 2, dtype=torch.int64),
            "slot_table": torch.arange(5),
            "gate_up_proj": torch.zeros(6, 16, 64),
            "down_proj": torch.zeros(6, 64, 8),
            "activation": SILU,
            "out": torch.zeros(3, 2, 64),
        },
    ),
    "read_sum": (ops.read_sum, {"words": torch.zeros(8, dtype=torch.int64)}),
}


WORDS = [torch.ones(16, 64).bfloat16(), torch.ones(64, 8).bfloat16()]
CODES = [part[0] for name, part in BANK.items() if part is not None and name != "input_perm"]
RECORDS = {
    "lossless": compact_ops.encode(WORDS[0], WORDS[1]),
    "residual": compact_ops.encode(*WORDS, (CODES[0], CODES[1]), (CODES[2], CODES[3])),
}
ROUTED = [torch.zeros(3, 64), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(5).long()]
NBYTES = torch.zeros(1, dtype=torch.int64)
OF_SILU = 0, math.inf
# What the ops over compact experts take, in order.
COMPACT_ARGUMENTS: dict[str, list[Any]] = {
    "encode_lossless": [*WORDS, RECORDS["lossless"], NBYTES],
    "decode_lossless": [RECORDS["lossless"], *WORDS],
    "moe_grouped_lossless": [
        *ROUTED,
        RECORDS["lossless"].unsqueeze(0),
        8,
        *OF_SILU,
        torch.zeros(3, 2, 64),
    ],
    "encode_residual": [*WORDS, *CODES, RECORDS["residual"], NBYTES],
    "decode_residual": [RECORDS["residual"], *CODES, *WORDS],
    "moe_grouped_residual": [
        *ROUTED,
        RECORDS["residual"].unsqueeze(0),
        torch.arange(5),
        *BANK.values(),
        *OF_SILU,
        torch.zeros(3, 2, 64),
    ],
}
OF_MXFP4 = [torch.ones(64, 64).bfloat16(), torch.ones(64, 32).bfloat16()]
SCALED = {
    "fp8": torch.zeros(Fp8Layout(64, 8).nbytes, dtype=torch.uint8),
    "mxfp4": torch.zeros(Mxfp4Layout(64, 32).nbytes, dtype=torch.uint8),
    "int4": torch.zeros(Int4GroupsLayout(64, 32, 32).nbytes, dtype=torch.uint8),
    "nvfp4": torch.zeros(Nvfp4Layout(64, 32).nbytes, dtype=torch.uint8),
}
# The same of those over codes with scales.
SCALED_ARGUMENTS: dict[str, list[Any]] = {
    "decode_fp8": [SCALED["fp8"], 128, 128, *WORDS],
    "moe_grouped_fp8": [
        *(*ROUTED, SCALED["fp8"].unsqueeze(0), 8, 128, 128, *OF_SILU),
        torch.zeros(3, 2, 64),
    ],
    "decode_mxfp4": [SCALED["mxfp4"], *OF_MXFP4],
    "moe_grouped_mxfp4": [
        *ROUTED,
        SCALED["mxfp4"].unsqueeze(0),
        32,
        *OF_SILU,
        torch.zeros(3, 2, 64),
    ],
    "decode_int4": [SCALED["int4"], 32, False, False, *OF_MXFP4],
    "decode_nvfp4": [SCALED["nvfp4"], False, *OF_MXFP4],
    "moe_grouped_nvfp4": [
        *(*ROUTED, SCALED["nvfp4"].unsqueeze(0), 32, False, *OF_SILU),
        torch.zeros(3, 2, 64),
    ],
    "moe_grouped_int4": [
        *(*ROUTED, SCALED["int4"].unsqueeze(0), 32, 32, False, False, *OF_SILU),
        torch.zeros(3, 2, 64),
    ],
}
WEIGHT, PAIR = WORDS[0], (CODES[0], CODES[1])
DENSE = {
    "lossless": dense_ops.encode_dense(WEIGHT),
    "residual": dense_ops.encode_dense(WEIGHT, PAIR),
}
PRODUCT = [torch.zeros(16), torch.zeros(3, 16)]
CHOSEN = [torch.tensor([3, 15, 3]), torch.zeros(3, 64).bfloat16()]
# The same of those over compact dense matrices.
DENSE_ARGUMENTS: dict[str, list[Any]] = {
    "encode_dense_lossless": [WEIGHT, DENSE["lossless"], NBYTES],
    "decode_dense_lossless": [DENSE["lossless"], 16, 0, WEIGHT],
    "linear_lossless": [torch.zeros(3, 64), DENSE["lossless"], *PRODUCT],
    "rows_lossless": [DENSE["lossless"], 16, *CHOSEN],
    "encode_dense_residual": [WEIGHT, *PAIR, DENSE["residual"], NBYTES],
    "decode_dense_residual": [DENSE["residual"], *PAIR, 0, WEIGHT],
    "linear_residual": [torch.zeros(3, 64), DENSE["residual"], *PAIR, *PRODUCT],
    "rows_residual": [DENSE["residual"], *PAIR, *CHOSEN],
}


@pytest.mark.parametrize(
    ("call", "name", "value", "message"),
    [
        ("linear_int4", "inputs", torch.zeros(3, 64, dtype=torch.int32), "int32; it must be"),
        ("linear_int4", "inputs", torch.zeros(64, 3).T, "strides .* must be contiguous"),
        ("linear_int4", "qweight", torch.zeros(4, 32), "float32; it must be torch.uint8"),
        ("linear_int4", "qweight", torch.zeros(4, 31, dtype=torch.uint8), r"matrix \[4, 64\]"),
        ("linear_int4", "scales", torch.zeros(4, 2), "float32; it must be torch.float16"),
        ("linear_int4", "scales", torch.zeros(5, 2).half(), r"matrix \[4, 64\]"),
        ("linear_int4", "input_perm", torch.arange(64), "int64; it must be torch.int32"),
        ("linear_int4", "input_perm", torch.zeros(6, dtype=torch.int32), r"must be \[64\]"),
        ("linear_int4", "input_perm", torch.full((64,), 64).int(), "outside the 64"),
        ("moe_int4", "hidden_states", torch.zeros(3, 60), r"must be \[any, 64\]"),
        ("moe_int4", "hidden_states", torch.zeros(3, 64).long(), "int64; it must be"),
        ("moe_int4", "topk_ids", torch.zeros(3, 2).int(), "int32; it must be torch.int64"),
        ("moe_int4", "topk_ids", torch.zeros(2, 2).long(), r"must be \[3, any\]"),
        ("moe_int4", "topk_weights", torch.zeros(3, 1), r"must be \[3, 2\]"),
        ("moe_int4", "topk_weights", torch.zeros(3, 2).long(), "int64; it must be"),
        ("moe_int4", "base_slots", torch.arange(5).int(), "int32; it must be torch.int64"),
        ("moe_int4", "base_slots", torch.arange(5, device="meta"), "on meta; it must be on cpu"),
        ("moe_int4", "activation", ops.Activation("tanh"), "'tanh' must be one of silu,"),
        ("moe_int4", "activation", ops.Activation("silu", 0.0), "limit 0.0; it must be above 0"),
        ("moe_grouped", "hidden_states", torch.zeros(64, 3).T, "must be contiguous"),
        ("moe_grouped", "topk_ids", torch.zeros(3, 2), "float32; it must be torch.int64"),
        ("moe_grouped", "slot_table", torch.arange(5).half(), "float16; it must be torch.int64"),
        ("moe_grouped", "gate_up_proj", torch.zeros(6, 16, 60), r"must be \[any, any, 64\]"),
        ("moe_grouped", "gate_up_proj", torch.zeros(6, 16, 64).double(), "float64; it must be"),
        ("moe_grouped", "gate_up_proj", torch.zeros(6, 64, 16).mT, "must be contiguous"),
        ("moe_grouped", "down_proj", torch.zeros(6, 64, 8).half(), "float16; it must be"),
        ("moe_grouped", "down_proj", torch.zeros(6, 64, 9), r"must be \[6, 64, 8\]"),
        ("moe_grouped", "down_proj", torch.zeros(5, 64, 8), r"must be \[6, 64, 8\]"),
        ("moe_grouped", "out", torch.zeros(3, 2, 64).half(), "float16; it must be torch.float32"),
        ("moe_grouped", "out", torch.zeros(3, 3, 64), r"must be \[3, 2, 64\]"),
        ("moe_grouped", "activation", ops.Activation("tanh"), "'tanh' must be one of silu,"),
        ("read_sum", "words", torch.zeros(8), "float32; it must be torch.int64"),
        ("read_sum", "words", torch.zeros(8, 1).long(), r"must be \[any\]"),
    ],
)
def test_errors_name_the_argument(call: str, name: str, value: Any, message: str) -> None:
    function, arguments = CALLS[call]
    function(**arguments)
    with pytest.raises(ValueError, match=f"^{name} .*{message}"):
        function(**(arguments | {name: value}))


DECODER_ARGUMENTS: dict[str, list[Any]] = {
    "rms_norm": [
        *(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), 1e-6),
        *(torch.zeros(2, 8), torch.zeros(2, 8)),
    ],
    "attention": [
        *(torch.ones(2, 4 * 8), torch.ones(2, 2 * 8), torch.ones(2, 2 * 8)),
        *(torch.ones(8), torch.ones(8), 1e-6, torch.ones(2, 8), torch.zeros(2, 8)),
        *(torch.zeros(2, 9, 8), torch.zeros(2, 9, 8), 3, 9, 0.5),
        *(torch.tensor([-1, 0, 0]), torch.zeros(2, 4 * 8)),
    ],
    "latent_attention": [
        *(torch.ones(2, 3 * 6), torch.ones(2, 7), torch.ones(5), 1e-6, torch.ones(3 * 7, 5)),
        *(torch.ones(2, 2), torch.zeros(2, 2), True),
        *(torch.zeros(1, 9, 5), torch.zeros(1, 9, 2), 3, 9, 0.5),
        *(torch.tensor([-1, 0, 0]), torch.zeros(2, 3 * 3), torch.ones(2, 5).bool()),
    ],
    "masked_attention": [
        *(torch.ones(4, 3, 6), torch.ones(2, 9, 6), torch.ones(2, 9, 5)),
        *(torch.ones(3, 9).bool(), 0.5, torch.ones(4), torch.zeros(3, 4, 5)),
    ],
    "route": [
        *(torch.ones(2, 8), torch.zeros(8), torch.ones(8), True, False, True),
        *(4, 2, 2, 1e-6, 2.5, torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)),
    ],
    "rotate": [torch.ones(2, 16), 8, torch.ones(2, 6), torch.zeros(2, 6), False],
    "combine": [torch.ones(2, 3, 8), torch.ones(2, 3), torch.zeros(2, 8)],
    "mix_streams": [torch.ones(2, 24), torch.ones(2, 24), torch.zeros(2, 8)],
    "add_streams": [torch.ones(2, 24), torch.ones(2, 8), torch.ones(2, 3), torch.zeros(2, 24)],
    "delta_rule": [
        *(torch.ones(3, 2 * 2 * 6 + 4 * 5), -torch.ones(3, 4), torch.ones(3, 4), 1e-6),
        *(torch.zeros(4, 6, 5), torch.zeros(3, 4, 5)),
    ],
    "selective_scan": [
        *(torch.ones(3, 2 * 2 * 6 + 4 * 5), -torch.ones(3, 4), torch.ones(3, 4)),
        *(torch.zeros(4, 6, 5), torch.zeros(3, 4, 5)),
    ],
}


def raw_arguments(op: str) -> list[Any]:
    """What the op itself takes, in order."""
    of_records = COMPACT_ARGUMENTS | DENSE_ARGUMENTS | SCALED_ARGUMENTS
    if op in of_records:
        return list(of_records[op])
    if op == "quantize_int4":
        return [torch.zeros(4, 64), 32, torch.zeros(4, 32).byte(), torch.zeros(4, 2).half()]
    if op in DECODER_ARGUMENTS:
        return list(DECODER_ARGUMENTS[op])
    values = list(CALLS[op][1].values())
    return {
        "linear": [*values, torch.zeros(3, 4)],
        "linear_int4": [*values, torch.zeros(3, 4)],
        "moe_int4": [*values[:4], *BANK.values(), *OF_SILU, torch.zeros(3, 64)],
        "moe_grouped": [*values[:5], *OF_SILU, torch.zeros(3, 2, 64)],
        "read_sum": [*values, torch.zeros(1, dtype=torch.int64)],
    }[op]


@pytest.mark.parametrize(
    ("op", "at", "value"),
    [
        ("linear", 0, torch.zeros(3, 62)),
        ("linear", 0, torch.zeros(3, 64).half()),
        ("linear", 1, torch.zeros(5, 64)),
        ("linear", 1, torch.zeros(64, 4).T),
        ("linear", 2, torch.zeros(3)),
        ("linear", 2, torch.zeros(4).half()),
        ("linear", 3, torch.zeros(4, 4)),
        ("encode_lossless", 0, torch.zeros(16, 63).bfloat16()),
        ("encode_lossless", 1, torch.zeros(64, 8)),
        ("encode_lossless", 3, torch.zeros(2).long()),
        ("decode_lossless", 0, torch.zeros(64).byte()),
        ("decode_lossless", 1, torch.zeros(12, 64).bfloat16()),
        ("moe_grouped_lossless", 3, torch.zeros(1, 64).byte()),
        ("moe_grouped_lossless", 3, RECORDS["lossless"]),
        ("moe_grouped_lossless", 4, 800),
        ("encode_residual", 2, torch.zeros(16, 31).byte()),
        ("decode_residual", 0, torch.zeros(64).byte()),
        ("moe_grouped_residual", 3, torch.zeros(1, 64).byte()),
        ("moe_grouped_residual", 4, torch.zeros(4).long()),
        ("moe_grouped_residual", 5, torch.zeros(5, 16, 31).byte()),
        ("decode_fp8", 0, torch.zeros(64).byte()),
        ("decode_fp8", 0, torch.zeros(4000)),
        ("decode_fp8", 1, 2),
        ("decode_fp8", 2, 32),
        ("decode_fp8", 3, torch.zeros(12, 64).bfloat16()),
        ("moe_grouped_fp8", 3, torch.zeros(1, 64).byte()),
        ("moe_grouped_fp8", 3, SCALED["fp8"]),
        ("moe_grouped_fp8", 4, 800),
        ("moe_grouped_fp8", 4, 0),
        ("moe_grouped_fp8", 5, -1),
        ("moe_grouped_fp8", 6, 100),
        ("decode_mxfp4", 0, torch.zeros(64).byte()),
        ("decode_mxfp4", 2, torch.zeros(64, 24).bfloat16()),
        ("moe_grouped_mxfp4", 3, torch.zeros(1, 64).byte()),
        ("moe_grouped_mxfp4", 4, 24),
        ("moe_grouped_mxfp4", 4, 3200),
        ("decode_int4", 0, torch.zeros(64).byte()),
        ("decode_int4", 1, 48),
        ("moe_grouped_int4", 3, torch.zeros(1, 64).byte()),
        ("moe_grouped_int4", 4, 24),
        ("moe_grouped_int4", 5, 0),
        ("decode_nvfp4", 0, torch.zeros(64).byte()),
        ("decode_nvfp4", 3, torch.zeros(64, 24).bfloat16()),
        ("moe_grouped_nvfp4", 3, torch.zeros(1, 64).byte()),
        ("moe_grouped_nvfp4", 4, 24),
        ("encode_dense_lossless", 0, torch.zeros(16, 64)),
        ("encode_dense_lossless", 0, torch.zeros(64).bfloat16()),
        ("encode_dense_lossless", 0, torch.zeros(0, 64).bfloat16()),
        ("encode_dense_residual", 1, torch.zeros(16, 31).byte()),
        ("decode_dense_lossless", 0, torch.zeros(64).byte()),
        ("decode_dense_lossless", 1, 15),
        ("decode_dense_lossless", 1, 1600),
        ("decode_dense_lossless", 2, 2),
        ("decode_dense_lossless", 2, 4),
        ("decode_dense_lossless", 2, -4),
        ("decode_dense_lossless", 3, torch.zeros(15, 64).bfloat16()),
        ("decode_dense_lossless", 3, torch.zeros(16, 64)),
        ("decode_dense_lossless", 3, torch.zeros(16).bfloat16()),
        ("decode_dense_residual", 3, 4),
        ("decode_dense_residual", 1, torch.zeros(15, 32).byte()),
        ("linear_lossless", 0, torch.zeros(64)),
        ("linear_lossless", 0, torch.zeros(2, 64)),
        ("linear_lossless", 0, torch.zeros(3, 6400)),
        ("linear_lossless", 0, torch.zeros(3, 64).double()),
        ("linear_lossless", 1, torch.zeros(64).byte()),
        ("linear_lossless", 2, torch.zeros(15)),
        ("linear_lossless", 2, torch.zeros(16).half()),
        ("linear_lossless", 3, torch.zeros(3, 1600)),
        ("linear_residual", 0, torch.zeros(3, 62)),
        ("linear_residual", 2, torch.zeros(64).byte()),
        ("linear_residual", 3, torch.zeros(15, 2).half()),
        ("linear_residual", 5, torch.zeros(3, 15)),
        ("rows_lossless", 1, 1600),
        ("rows_lossless", 2, torch.zeros(3).int()),
        ("rows_lossless", 2, torch.zeros(4).long()),
        ("rows_lossless", 3, torch.zeros(3, 6400).bfloat16()),
        ("rows_residual", 3, torch.zeros(2).long()),
        ("rows_residual", 4, torch.zeros(3, 62).bfloat16()),
        ("linear_int4", 0, torch.zeros(3, 62)),
        ("linear_int4", 0, torch.zeros(2, 64)),
        ("linear_int4", 0, torch.zeros(3, 64).long()),
        ("linear_int4", 1, torch.zeros(4, 31).byte()),
        ("linear_int4", 1, torch.zeros(4, 32).char()),
        ("linear_int4", 2, torch.zeros(3, 2).half()),
        ("linear_int4", 2, torch.zeros(4, 0).half()),
        ("linear_int4", 2, torch.zeros(4, 2)),
        ("linear_int4", 3, torch.zeros(63).int()),
        ("linear_int4", 4, torch.zeros(3, 5)),
        ("linear_int4", 4, torch.zeros(4, 3).T),
        ("moe_int4", 0, torch.zeros(3, 62)),
        ("moe_int4", 1, torch.zeros(2, 2).long()),
        ("moe_int4", 1, torch.zeros(3, 2).int()),
        ("moe_int4", 2, torch.zeros(3, 1)),
        ("moe_int4", 2, torch.zeros(3, 2).double()),
        ("moe_int4", 3, torch.zeros(5).int()),
        ("moe_int4", 4, torch.zeros(4, 16, 32).byte()),
        ("moe_int4", 4, torch.zeros(5, 14, 32).byte()),
        ("moe_int4", 5, torch.zeros(4, 16, 2).half()),
        ("moe_int4", 6, torch.zeros(5, 63, 4).byte()),
        ("moe_int4", 7, torch.zeros(5, 64, 2).half()[:, :, ::2]),
        ("moe_int4", 8, torch.zeros(4, 64).int()),
        ("moe_int4", 8, torch.zeros(5, 64).long()),
        ("moe_int4", 9, -1),
        ("moe_int4", 9, len(ops.ACTIVATIONS)),
        ("moe_int4", 9, library.ACTIVATION_CODES["relu2"]),  # of experts without a gate
        ("moe_int4", 11, torch.zeros(2, 64)),
        ("moe_int4", 11, torch.zeros(3, 64).long()),
        ("moe_grouped", 0, torch.zeros(3, 62)),
        ("moe_grouped", 0, torch.zeros(3, 64).half()),
        ("moe_grouped", 1, torch.zeros(3, 3).long()),
        ("moe_grouped", 2, torch.zeros(5).int()),
        ("moe_grouped", 3, torch.zeros(6, 14, 64)),
        ("moe_grouped", 3, torch.zeros(5, 16, 64)),
        ("moe_grouped", 3, torch.zeros(6, 16, 64).double()),
        ("moe_grouped", 3, torch.zeros(6, 64, 16).mT),
        ("moe_grouped", 4, torch.zeros(6, 64, 8).half()),
        ("moe_grouped", 4, torch.zeros(6, 60, 8)),
        ("moe_grouped", 5, len(ops.ACTIVATIONS)),
        ("moe_grouped", 5, library.ACTIVATION_CODES["relu2"]),
        ("moe_grouped", 7, torch.zeros(3, 1, 64)),
        ("moe_grouped", 7, torch.zeros(3, 2, 64).half()),
        ("quantize_int4", 0, torch.zeros(4, 64).long()),
        ("quantize_int4", 0, torch.zeros(64, 4).T),
        ("quantize_int4", 1, 0),
        ("quantize_int4", 1, 24),
        ("quantize_int4", 2, torch.zeros(3, 32).byte()),
        ("quantize_int4", 3, torch.zeros(4, 1).half()),
        ("read_sum", 0, torch.zeros(8)),
        ("read_sum", 1, torch.zeros(2).long()),
        ("attention", 10, 0),  # no room before it for the entries of the tree's other nodes
        ("attention", 10, 8),
        ("attention", 13, torch.tensor([-1])),
        ("attention", 13, torch.tensor([-1, 0, 0]).int()),
        ("attention", 13, torch.tensor([[-1, 0, 0]])),
        ("attention", 13, torch.tensor([0, 0, 0])),
        ("attention", 13, torch.tensor([-1, 0, 2])),
        ("attention", 13, torch.tensor([-1, -1, 0])),
        ("latent_attention", 0, torch.zeros(2, 3 * 6 + 1)),
        ("latent_attention", 0, torch.zeros(3, 3 * 6)),
        ("latent_attention", 0, torch.zeros(2, 3 * 2)),  # no columns but those that are rotated
        ("latent_attention", 1, torch.zeros(2, 8)),
        ("latent_attention", 1, torch.zeros(2, 7).half()),
        ("latent_attention", 2, torch.zeros(6)),
        ("latent_attention", 4, torch.zeros(3 * 7 - 1, 5)),
        ("latent_attention", 4, torch.zeros(3 * 7, 6)),
        ("latent_attention", 5, torch.zeros(2, 3)),
        ("latent_attention", 5, torch.zeros(2, 1)),  # beside sin of whole columns
        ("latent_attention", 6, torch.zeros(1, 2)),
        ("latent_attention", 8, torch.zeros(2, 9, 5)),
        ("latent_attention", 9, torch.zeros(1, 8, 2)),
        ("latent_attention", 9, torch.zeros(1, 9, 3)),
        ("latent_attention", 10, 0),
        ("latent_attention", 10, 8),
        ("latent_attention", 11, 0),
        ("latent_attention", 13, torch.tensor([-1, 0, 2])),
        ("latent_attention", 14, torch.zeros(2, 3 * 3 + 1)),
        ("latent_attention", 14, torch.zeros(3, 3 * 3)),
        ("latent_attention", 15, torch.ones(2, 4).bool()),
        ("latent_attention", 15, torch.ones(2, 5)),
        ("masked_attention", 0, torch.ones(4, 3, 7)),
        ("masked_attention", 0, torch.ones(3, 3, 6)),
        ("masked_attention", 0, torch.ones(4, 6, 3).mT),
        ("masked_attention", 0, torch.ones(4, 2, 6)),
        ("masked_attention", 0, torch.ones(4, 3, 6).double()),
        ("masked_attention", 1, torch.ones(2, 9, 6).half()),
        ("masked_attention", 1, torch.ones(0, 9, 6)),
        ("masked_attention", 1, torch.ones(2, 8, 6)),
        ("masked_attention", 2, torch.ones(1, 9, 5)),
        ("masked_attention", 2, torch.ones(2, 8, 5)),
        ("masked_attention", 2, torch.ones(2, 9, 0)),
        ("masked_attention", 3, torch.ones(3, 8).bool()),
        ("masked_attention", 3, torch.ones(3, 9).byte()),
        ("masked_attention", 3, torch.ones(9, 3).bool().T),
        ("masked_attention", 5, torch.ones(2)),
        ("masked_attention", 6, torch.zeros(3, 2, 5)),
        ("masked_attention", 6, torch.zeros(3, 4, 6)),
        ("delta_rule", 0, torch.zeros(3, 43)),
        ("delta_rule", 0, torch.zeros(3, 20)),
        ("delta_rule", 0, torch.zeros(3, 56)),  # three heads of keys for four
        ("delta_rule", 0, torch.zeros(4, 44)),
        ("delta_rule", 0, torch.zeros(44, 3).T),
        ("delta_rule", 0, torch.zeros(3, 44).double()),
        ("delta_rule", 1, torch.zeros(2, 4)),
        ("delta_rule", 1, torch.zeros(3, 4).half()),
        ("delta_rule", 1, torch.zeros(3, 4, 7)),  # decays of more rows than states have
        ("delta_rule", 2, torch.zeros(3, 5)),
        ("delta_rule", 2, torch.zeros(12)),
        ("delta_rule", 4, torch.zeros(4, 5, 6).mT),
        ("delta_rule", 4, torch.zeros(4, 0, 5)),
        ("delta_rule", 4, torch.zeros(4, 6, 5).bfloat16()),
        ("delta_rule", 5, torch.zeros(3, 4, 6)),
        ("delta_rule", 5, torch.zeros(3, 4, 5).double()),
        ("selective_scan", 0, torch.zeros(3, 43)),
        ("selective_scan", 0, torch.zeros(4, 44)),
        ("selective_scan", 1, torch.zeros(3, 4).half()),
        ("selective_scan", 2, torch.zeros(3, 5)),
        ("selective_scan", 3, torch.zeros(4, 5, 6).mT),
        ("selective_scan", 4, torch.zeros(3, 4, 6)),
    ],
)
def test_native_kernels_guard_their_memory(op: str, at: int, value: Any) -> None:
    """Called around the checks of the wrappers."""
    arguments = raw_arguments(op)
    library.call(op, *arguments)
    arguments[at] = value
    with pytest.raises(RuntimeError):
        library.call(op, *arguments)


@pytest.mark.parametrize("op", sorted(library.OPS))
def test_ops_are_registered_as_torch_wants(op: str) -> None:
    torch.library.opcheck(getattr(torch.ops.speq, f"{op}_out").default, tuple(raw_arguments(op)))


def test_no_rows_are_no_error() -> None:
    _, arguments = CALLS["moe_int4"]
    empty = {
        "hidden_states": torch.zeros(0, 64),
        "topk_ids": torch.zeros(0, 2, dtype=torch.int64),
        "topk_weights": torch.zeros(0, 2),
    }
    assert ops.moe_int4(**(arguments | empty)).shape == (0, 64)
    del empty["topk_weights"]
    _, arguments = CALLS["moe_grouped"]
    ops.moe_grouped(**(arguments | empty | {"out": torch.zeros(0, 2, 64)}))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 96), (1, 5, 96), (2, 4, 96), (1, 40, 96), (96,), (0, 96)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear_is_torchs(dtype: torch.dtype, shape: tuple[int, ...], biased: bool) -> None:
    """Few rows and many, of all shapes: whole numbers, on which there is nothing to round."""
    generator = torch.Generator().manual_seed(16)
    layer = torch.nn.Linear(96, 40, bias=biased, dtype=dtype)
    with torch.no_grad():
        for weights in layer.parameters():
            weights.copy_(torch.randint(-2, 3, weights.shape, generator=generator))
    inputs = torch.randint(-1, 2, shape, generator=generator).to(dtype)
    with torch.no_grad():
        ours, wanted = ops.linear(inputs, layer.weight, layer.bias), layer(inputs)
    assert ours.shape == wanted.shape
    assert torch.equal(ours, wanted)


def test_sum_of_words() -> None:
    words = torch.tensor([1, 5, 2**62, 2**62])
    assert ops.read_sum(words) == 2**63 + 6 - 2**64


def weights(rows: int, columns: int, seed: int = 2) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "group"), [(256, 128), (96, 32), (64, 64), (6, 2)])
def test_quantize_takes_the_nearest_code(dtype: torch.dtype, columns: int, group: int) -> None:
    weight = weights(9, columns).to(dtype)
    qweight, scales = ops.quantize_int4(weight, group)
    assert qweight.shape == (9, columns // 2)
    assert scales.shape == (9, columns // group)
    assert (qweight.dtype, scales.dtype) == (torch.uint8, torch.float16)

    exact = weight.double().numpy()
    largest = np.abs(exact).reshape(9, -1, group).max(2)
    # The largest weight of a group is seven steps, in the nearest float16.
    np.testing.assert_allclose(scales.double().numpy(), largest / 7, rtol=2**-11, atol=2**-25)
    # No other of the sixteen codes comes closer to any weight.
    steps = np.repeat(scales.double().numpy(), group, axis=1)
    candidates = np.arange(-8, 8)[:, None, None] * steps
    best = np.abs(candidates - exact).min(0)
    error = np.abs(unpacked(qweight, scales) - exact)
    np.testing.assert_allclose(error, best, rtol=0, atol=1e-6 * steps.max())
    # Half a step, but for what rounding the scale takes off the largest weights.
    assert (error <= steps / 2 + 7 * steps * 2**-10).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
def test_quantize_is_the_reference(
    isa: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """Of weights of all magnitudes: scales that vanish, are subnormal, or end at the largest."""
    need_backend(request, "cpu", isa)
    generator = torch.Generator().manual_seed(21)
    magnitudes = torch.exp2(torch.randint(-32, 20, (96, 1), generator=generator).float())
    weight = torch.randn(96, 3 * 34, generator=generator) * magnitudes
    weight = weight.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else weight.to(dtype)
    before = library.isa()
    library.limit_isa(isa)
    try:
        for group in (2, 34, 102):
            found, wanted = ops.quantize_int4(weight, group), reference.quantize_int4(weight, group)
            assert all(
                torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)
            )
    finally:
        library.limit_isa(before)


def test_quantize_is_exact_on_its_own_grid() -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(-7, 8, size=(5, 4, 16))
    codes[..., 0] = 7
    steps = np.float16(rng.uniform(0.01, 2, size=(5, 4)))
    grid = torch.from_numpy((codes * steps[..., None].astype(np.float64)).reshape(5, 64))
    qweight, scales = ops.quantize_int4(grid, 16)
    assert torch.equal(scales, torch.from_numpy(steps))
    assert np.array_equal(unpacked(qweight, scales), grid.numpy())


def test_quantize_packs_the_low_nibble_first() -> None:
    weight = torch.tensor([[7.0, -7.0, 0.0, 1.0]])
    qweight, scales = ops.quantize_int4(weight, 4)
    assert scales.tolist() == [[1.0]]
    assert qweight.tolist() == [[15 + 16 * 1, 8 + 16 * 9]]


def test_quantize_zero_and_vanishing_groups() -> None:
    weight = torch.zeros(2, 24)
    weight[0, 8:16] = 1e-9  # a seventh of it is nothing in float16
    weight[0, 16:] = torch.linspace(-1, 1, 8)
    weight[1, :8] = -3.0
    qweight, scales = ops.quantize_int4(weight, 8)
    assert scales[0, :2].tolist() == [0, 0]
    assert (qweight[0, :8] == 0x88).all()  # code 8 stands for zero
    assert (qweight[1, 4:] == 0x88).all()
    values = reference.unpack_int4(qweight, scales)
    assert (values[0, :16] == 0).all()
    assert (values[1, 8:] == 0).all()
    torch.testing.assert_close(values[1, :8], weight[1, :8], rtol=1e-3, atol=0)
    assert (values[0, 16:] - weight[0, 16:]).abs().max() < 0.5 / 7 + 1e-3


def test_quantize_subnormal_scales() -> None:
    weight = torch.linspace(-1, 1, 32)[None] * 7 * 2.0**-23
    qweight, scales = ops.quantize_int4(weight, 32)
    assert scales.tolist() == [[2.0**-23]]
    error = np.abs(unpacked(qweight, scales) - weight.double().numpy())
    assert error.max() <= 2.0**-24


def test_quantize_large_weights_stay_finite() -> None:
    weight = torch.tensor([[1e6, -1e6, 3e5, 0.0]])
    qweight, scales = ops.quantize_int4(weight, 4)
    assert scales.item() == 65504
    assert unpacked(qweight, scales).tolist() == [[7 * 65504, -8 * 65504, 5 * 65504, 0]]


@pytest.mark.parametrize(
    ("columns", "group"), [(2048, 128), (768, 128), (1408, 128), (96, 32), (48, 16), (6, 2)]
)
def test_group_size_divides_every_dimension(columns: int, group: int) -> None:
    assert group_size_of(columns) == group
    with pytest.raises(ValueError, match=f"a dimension of {columns + 1}, an odd number"):
        group_size_of(columns + 1)


ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_pytorch_tanh": lambda x: (
        0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "relu": lambda x: np.maximum(x, 0),
}
T, K, E, H, F = 7, 3, 6, 32, 16


def expert_outputs(
    hidden: Tensor, topk_ids: Tensor, gate_up: np.ndarray, down: np.ndarray, activation: str
) -> np.ndarray:
    """[T, K, H] token by token, expert by expert, in double precision."""
    outputs = np.empty((len(topk_ids), topk_ids.shape[1], hidden.shape[1]))
    for token, experts in enumerate(topk_ids.tolist()):
        x = hidden[token].double().numpy()
        for rank, expert in enumerate(experts):
            gate, up = np.split(gate_up[expert] @ x, 2)
            outputs[token, rank] = down[expert] @ (ACTIVATIONS[activation](gate) * up)
    return outputs


def problem(seed: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden_states, topk_ids, topk_weights, gate_up_proj and down_proj of all E experts."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, H, generator=generator)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    chances = torch.rand(T, K, generator=generator)
    gate_up = torch.randn(E, 2 * F, H, generator=generator) * 0.3
    down = torch.randn(E, H, F, generator=generator) * 0.3
    return hidden, ids, chances, gate_up, down


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("words", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_grouped_experts_match_double_precision(activation: str, words: torch.dtype) -> None:
    """Experts in slots of another order, in the checkpoint's dtype, rows in float32."""
    hidden, ids, _, gate_up, down = problem()
    gate_up, down = gate_up.to(words), down.to(words)
    slot_of = torch.tensor([4, 0, 7, 2, 1, 5])
    slots_gate_up = torch.full((8, 2 * F, H), math.nan, dtype=words)
    slots_down = torch.full((8, H, F), math.nan, dtype=words)
    slots_gate_up[slot_of], slots_down[slot_of] = gate_up, down
    out, act = torch.full((T, K, H), math.nan), ops.Activation(activation)
    ops.moe_grouped(hidden, ids, slot_of, slots_gate_up, slots_down, act, out)
    wanted = expert_outputs(
        hidden, ids, gate_up.double().numpy(), down.double().numpy(), activation
    )
    np.testing.assert_allclose(out.numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_grouped_experts_leave_absent_ones_alone() -> None:
    hidden, ids, _, gate_up, down = problem()
    whole = torch.empty(T, K, H)
    everywhere = torch.arange(E)
    ops.moe_grouped(hidden, ids, everywhere, gate_up, down, SILU, whole)
    out = torch.full((T, K, H), POISON)
    seen = torch.zeros(T, K, dtype=torch.bool)
    for present in ([1, 4], [0], [2, 3, 5]):
        table = torch.full((E,), -1)
        table[present] = everywhere[present]
        ops.moe_grouped(hidden, ids, table, gate_up, down, SILU, out)
        seen |= torch.isin(ids, torch.tensor(present))
        assert (out[~seen] == POISON).all()
        assert torch.equal(out[seen], whole[seen])
    assert seen.all()


def test_experts_in_double_precision_are_exact_to_it() -> None:
    hidden, ids, _, gate_up, down = (x.double() if x.is_floating_point() else x for x in problem())
    out = torch.empty(T, K, H, dtype=torch.float64)
    ops.moe_grouped(hidden, ids, torch.arange(E), gate_up, down, SILU, out)
    wanted = expert_outputs(hidden, ids, gate_up.numpy(), down.numpy(), "silu")
    np.testing.assert_allclose(out.numpy(), wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_int4_experts_match_double_precision(activation: str) -> None:
    """Fused, unfused and reference, against numpy with inputs rounded to INT8.

    A value on the edge between two INT8 codes may go either way: one step of one input.
    """
    hidden, ids, chances, gate_up, down = problem()
    arena = Int4Arena(Int4Layout(H, F), 2, E, torch.device("cpu"))
    for part in arena.parts.values():
        part.view(torch.uint8).fill_(255)
    layer = 1
    for expert in range(E):
        arena.quantize_into(int(arena.base_slots[layer, expert]), gate_up[expert], down[expert])
    slots, backend = arena.base_slots[layer], arena.experts
    dense = [
        np.stack([unpacked(codes[slot], scales[slot]) for slot in slots.tolist()])
        for codes, scales in (backend.gate_up, backend.down)
    ]
    wanted = np.zeros((T, H))
    for token, experts in enumerate(ids.tolist()):
        x = rounded(hidden[token].double().numpy())
        for rank, expert in enumerate(experts):
            gate, up = np.split(dense[0][expert] @ x, 2)
            inner = rounded(ACTIVATIONS[activation](gate) * up)
            wanted[token] += float(chances[token, rank]) * (dense[1][expert] @ inner)
    plain, act = torch.full((T, H), math.nan), ops.Activation(activation)
    reference.moe_int4_out(
        hidden, ids, chances, slots, *backend.gate_up, *backend.down, None, act, plain
    )
    fused = ops.moe_int4(hidden, ids, chances, slots, backend, act)
    unfused = ops.moe_int4_unfused(hidden, ids, chances, slots, backend, act)
    for ours in (plain, fused, unfused):
        error = np.abs(ours.numpy() - wanted).max(1) / wanted.std()
        assert (error < 1e-5).sum() >= T - 2
        assert error.max() < 0.05


def test_rounding_inputs_to_int8_costs_little() -> None:
    """Against the same experts with inputs as they are."""
    hidden, ids, chances, gate_up, down = problem()
    arena = Int4Arena(Int4Layout(H, F), 1, E, torch.device("cpu"))
    for expert in range(E):
        arena.quantize_into(expert, gate_up[expert], down[expert])
    backend = arena.experts
    dense = [
        np.stack([unpacked(codes[slot], scales[slot]) for slot in range(E)])
        for codes, scales in (backend.gate_up, backend.down)
    ]
    outputs = expert_outputs(hidden, ids, *dense, "silu")
    wanted = (outputs * chances.double().numpy()[..., None]).sum(1)
    ours = ops.moe_int4(hidden, ids, chances, arena.base_slots[0], backend, SILU).numpy()
    assert 0 < np.abs(ours - wanted).std() / wanted.std() < 0.02


def test_arena_takes_the_bytes_it_announces() -> None:
    layout = Int4Layout(96, 48)
    arena = Int4Arena(layout, 3, 5, torch.device("cpu"))
    codes = 3 * 96 * 48 // 2
    scales = 2 * (2 * 48 * (96 // 32) + 96 * (48 // 16))
    assert layout.nbytes == codes + scales
    assert arena.nbytes == 15 * layout.nbytes
    assert sorted(arena.base_slots.flatten().tolist()) == list(range(15))


def test_arena_rounds_long_matrices_as_a_whole_would_be() -> None:
    """More rows than are rounded at a time."""
    hidden, width = 8, 600
    gate_up, down = weights(2 * width, hidden), weights(hidden, width, seed=5)
    arena = Int4Arena(Int4Layout(hidden, width), 1, 1, torch.device("cpu"))
    arena.quantize_into(0, gate_up, down)
    for matrix, (codes, scales) in ((gate_up, arena.experts.gate_up), (down, arena.experts.down)):
        wanted_codes, wanted_scales = reference.quantize_int4(
            matrix, matrix.shape[1] // scales.shape[2]
        )
        assert torch.equal(codes[0], wanted_codes)
        assert torch.equal(scales[0], wanted_scales)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_combine_weighs_in_single_precision_at_least(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    outputs = torch.randn(T, K, H, generator=generator).to(dtype)
    chances = torch.rand(T, K, generator=generator).to(dtype)
    ours = ops.combine(outputs, chances, dtype)
    assert ours.dtype == dtype
    wanted = np.einsum("tkh,tk->th", outputs.double().numpy(), chances.double().numpy())
    # One rounding to the dtype, and what single or double precision leaves in the sum.
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    allowed = torch.finfo(dtype).eps / 2 * np.abs(wanted) + 4 * K * wide
    assert (np.abs(ours.double().numpy() - wanted) <= allowed).all()


def test_combine_adds_in_the_order_of_the_routes() -> None:
    """1e8 + 1 - 1e8 is 0 in single precision in this order, and 1 in any other."""
    outputs = torch.tensor([1e8, 1.0, -1e8])[None, :, None].expand(1, 3, 16).contiguous()
    ours = ops.combine(outputs, torch.ones(1, 3), torch.float32)
    assert (ours == 0).all()
    reordered = outputs[:, [0, 2, 1]]
    assert (ops.combine(reordered, torch.ones(1, 3), torch.float32) == 1).all()


@pytest.mark.parametrize("order", [[[3], [0], [1], [2], [4], [5]], [[5], [2, 3], [0, 4, 1]]])
def test_waves_do_not_change_a_bit(order: list[list[int]]) -> None:
    """Which experts came first is not seen in the result."""
    hidden, ids, chances, gate_up, down = problem()
    results = []
    for waves in ([[0, 1, 2, 3, 4, 5]], order):
        outputs = torch.empty(T, K, H)
        for wave in waves:
            table = torch.full((E,), -1)
            table[wave] = torch.tensor(wave)
            ops.moe_grouped(hidden, ids, table, gate_up, down, SILU, outputs)
        results.append(ops.combine(outputs, chances, torch.float32))
    assert torch.equal(*results)
