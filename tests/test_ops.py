"""Kernels: native against reference, and both against plain numpy and double precision."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from speq import ops, reference
from speq.int4 import Int4Arena, Int4Layout, group_size_of
from speq.ops import FLOAT_DTYPES

SHAPES = [(1, 2), (3, 8), (5, 64), (16, 256), (7, 96), (2, 2048), (300, 512)]
GROUPS = [2, 8, 32, 64, 128]
POISON = 12345.0


def codes_and_scales(rows: int, columns: int, group: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    qweight = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randn(rows, columns // group, generator=generator) * 0.1
    return qweight, scales.half()


def unpacked(qweight: Tensor, scales: Tensor) -> np.ndarray:
    """code * scale in double precision, by numpy."""
    packed = qweight.numpy()
    codes = np.empty((packed.shape[0], 2 * packed.shape[1]))
    codes[:, 0::2] = packed % 16
    codes[:, 1::2] = packed // 16
    group = codes.shape[1] // scales.shape[1]
    return (codes - 8) * np.repeat(scales.double().numpy(), group, axis=1)


def test_native_library_is_in_use() -> None:
    assert ops.NATIVE_MISSING is None
    assert ops.NATIVE_LIBRARY.exists()
    for op in ops.OPS:
        assert ops.backend_of(op, "cpu") == "cpu"


def test_missing_library_is_a_reason_and_no_error(tmp_path: Path) -> None:
    absent = tmp_path / "libabsent.so"
    assert ops.load_native(absent) == f"{absent} was not built"
    broken = tmp_path / "libbroken.so"
    broken.write_bytes(b"no library")
    assert str(ops.load_native(broken)).startswith(f"{broken} does not load: ")


def test_op_without_a_native_kernel_is_the_reference() -> None:
    with torch.library._scoped_library("speq", "FRAGMENT") as library:
        library.define("only_tested(Tensor x) -> ()")
        library.impl("only_tested", lambda x: None, "CompositeExplicitAutograd")
        assert ops.backend_of("only_tested", "cpu") == "reference"
        assert ops.backend_of("only_tested", "cuda") == "reference"
        library.impl("only_tested", lambda x: None, "CPU")
        assert ops.backend_of("only_tested", "cpu") == "cpu"
        assert ops.backend_of("only_tested", "cuda") == "reference"


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("group", GROUPS)
def test_unpack_matches_reference_and_numpy(
    dtype: torch.dtype, rows: int, columns: int, group: int
) -> None:
    if columns % group:
        group = columns
    qweight, scales = codes_and_scales(rows, columns, group)
    native = torch.full((rows, columns), POISON, dtype=dtype)
    plain = torch.full((rows, columns), -POISON, dtype=dtype)
    ops.unpack_int4(qweight, scales, native)
    reference.unpack_int4_out(qweight, scales, plain)
    # The product is exact in double precision and is rounded once.
    wanted = torch.from_numpy(unpacked(qweight, scales)).to(dtype)
    assert torch.equal(native, wanted)
    assert torch.equal(plain, wanted)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_every_scale_times_every_code(dtype: torch.dtype) -> None:
    """All 65,536 float16 scales, subnormals, infinities and NaNs among them, by all 16 codes."""
    scales = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    packed = torch.arange(8, dtype=torch.uint8)
    qweight = (2 * packed + ((2 * packed + 1) << 4)).repeat(2**16, 1)
    out = torch.full((2**16, 16), POISON, dtype=dtype)
    ops.unpack_int4(qweight, scales[:, None].contiguous(), out)
    codes = torch.arange(-8, 8, dtype=torch.float64)
    # torch's own conversions: exact to double, and one rounding to the dtype.
    wanted = (scales.double()[:, None] * codes).to(dtype)
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    nan = wanted.isnan()
    assert torch.equal(out.isnan(), nan)
    assert nan.sum() == 16 * 2 * 1023 + 2  # all NaN scales, and both infinities times code 8
    assert torch.equal(out.view(words)[~nan], wanted.view(words)[~nan])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf, POISON])
def test_outputs_are_overwritten_whole_and_nothing_beside_them(
    dtype: torch.dtype, poison: float
) -> None:
    rows, columns = 37, 1024
    qweight, scales = codes_and_scales(rows, columns, 64)
    arena = torch.full((rows + 2, columns), poison, dtype=dtype)
    ops.unpack_int4(qweight, scales, arena[1:-1])
    wanted = torch.from_numpy(unpacked(qweight, scales)).to(dtype)
    assert torch.equal(arena[1:-1], wanted)
    beside = torch.full((columns,), poison, dtype=dtype)
    for row in (arena[0], arena[-1]):
        assert torch.equal(row.nan_to_num(-1), beside.nan_to_num(-1))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"qweight": torch.zeros(4, 32, dtype=torch.int8)}, r"qweight is torch\.int8; it must"),
        ({"qweight": torch.zeros(4, 30, dtype=torch.uint8)}, r"qweight has shape \[4, 30\]; for"),
        ({"qweight": torch.zeros(3, 32, dtype=torch.uint8)}, r"qweight has shape \[3, 32\]; for"),
        ({"qweight": torch.zeros(128, dtype=torch.uint8)}, r"qweight has shape \[128\] and strid"),
        (
            {"qweight": torch.zeros(32, 4, dtype=torch.uint8).T},
            r"qweight has shape \[4, 32\] and strides \[1, 4\]; it must be a contiguous matrix",
        ),
        ({"scales": torch.zeros(4, 2)}, r"scales is torch\.float32; it must be torch\.float16"),
        ({"scales": torch.zeros(5, 2).half()}, r"scales has shape \[5, 2\]; for out \[4, 64\]"),
        ({"scales": torch.zeros(4, 5).half()}, r"scales has shape \[4, 5\]; for out"),
        ({"scales": torch.zeros(4, 0).half()}, r"scales has shape \[4, 0\]; for out"),
        ({"scales": torch.zeros(4, 64).half()}, r"scales .* with an even group_size"),
        ({"scales": torch.zeros(4, 4).half()[:, ::2]}, r"scales has shape \[4, 2\] and strides"),
        ({"out": torch.zeros(4, 64, dtype=torch.int32)}, r"out is torch\.int32; it must be"),
        ({"out": torch.zeros(2, 4, 32)}, r"out has shape \[2, 4, 32\] and strides"),
        ({"out": torch.zeros(4, 63)}, r"qweight has shape \[4, 32\]; for out \[4, 63\]"),
        ({"out": torch.zeros(64, 4).T}, r"out has shape \[4, 64\] and strides \[1, 4\]"),
        ({"scales": torch.zeros(4, 2, device="meta").half()}, r"scales is on meta and out on cpu"),
    ],
)
def test_errors_name_the_argument(changed: dict[str, Tensor], message: str) -> None:
    arguments: dict[str, Any] = {
        "qweight": torch.zeros(4, 32, dtype=torch.uint8),
        "scales": torch.zeros(4, 2, dtype=torch.float16),
        "out": torch.zeros(4, 64),
    }
    ops.unpack_int4(**arguments)
    with pytest.raises(ValueError, match=message):
        ops.unpack_int4(**(arguments | changed))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qweight", torch.zeros(4, 31, dtype=torch.uint8)),
        ("qweight", torch.zeros(4, 32, dtype=torch.int8)),
        ("scales", torch.zeros(4, 3, dtype=torch.float16)),
        ("scales", torch.zeros(4, 0, dtype=torch.float16)),
        ("scales", torch.zeros(4, 2)),
        ("out", torch.zeros(4, 64, dtype=torch.int64)),
        ("out", torch.zeros(64, 4).T),
        ("out", torch.zeros(5, 64)),
    ],
)
def test_native_kernel_guards_its_memory(name: str, tensor: Tensor) -> None:
    """Called around the checks of the wrapper."""
    arguments: dict[str, Any] = {
        "qweight": torch.zeros(4, 32, dtype=torch.uint8),
        "scales": torch.zeros(4, 2, dtype=torch.float16),
        "out": torch.zeros(4, 64),
    }
    with pytest.raises(RuntimeError, match="unpack_int4: "):
        torch.ops.speq.unpack_int4_out(*(arguments | {name: tensor}).values())


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_op_is_registered_as_torch_wants(dtype: torch.dtype) -> None:
    qweight, scales = codes_and_scales(6, 64, 16)
    out = torch.empty(6, 64, dtype=dtype)
    torch.library.opcheck(torch.ops.speq.unpack_int4_out.default, (qweight, scales, out))


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
    values = torch.full((2, 24), math.nan)
    ops.unpack_int4(qweight, scales, values)
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
    out = torch.full((T, K, H), math.nan)
    ops.moe_grouped(hidden, ids, slot_of, slots_gate_up, slots_down, activation, out)
    wanted = expert_outputs(
        hidden, ids, gate_up.double().numpy(), down.double().numpy(), activation
    )
    np.testing.assert_allclose(out.numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_grouped_experts_leave_absent_ones_alone() -> None:
    hidden, ids, _, gate_up, down = problem()
    whole = torch.empty(T, K, H)
    everywhere = torch.arange(E)
    ops.moe_grouped(hidden, ids, everywhere, gate_up, down, "silu", whole)
    out = torch.full((T, K, H), POISON)
    seen = torch.zeros(T, K, dtype=torch.bool)
    for present in ([1, 4], [0], [2, 3, 5]):
        table = torch.full((E,), -1)
        table[present] = everywhere[present]
        ops.moe_grouped(hidden, ids, table, gate_up, down, "silu", out)
        seen |= torch.isin(ids, torch.tensor(present))
        assert (out[~seen] == POISON).all()
        assert torch.equal(out[seen], whole[seen])
    assert seen.all()


def test_experts_in_double_precision_are_exact_to_it() -> None:
    hidden, ids, _, gate_up, down = (x.double() if x.is_floating_point() else x for x in problem())
    out = torch.empty(T, K, H, dtype=torch.float64)
    ops.moe_grouped(hidden, ids, torch.arange(E), gate_up, down, "silu", out)
    wanted = expert_outputs(hidden, ids, gate_up.numpy(), down.numpy(), "silu")
    np.testing.assert_allclose(out.numpy(), wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("unpack", [ops.unpack_int4, reference.unpack_int4_out])
def test_int4_experts_match_double_precision(activation: str, unpack: Any) -> None:
    hidden, ids, chances, gate_up, down = problem()
    arena = Int4Arena(Int4Layout(H, F), 2, E, torch.device("cpu"))
    for part in arena.parts.values():
        part.view(torch.uint8).fill_(255)
    layer = 1
    for expert in range(E):
        arena.quantize_into(int(arena.base_slots[layer, expert]), gate_up[expert], down[expert])
    slots = arena.base_slots[layer]
    ours = reference.moe_int4(
        hidden, ids, chances, slots, arena.gate_up, arena.down, activation, unpack
    )
    dense = [
        np.stack([unpacked(codes[slot], scales[slot]) for slot in slots.tolist()])
        for codes, scales in (arena.gate_up, arena.down)
    ]
    outputs = expert_outputs(hidden, ids, *dense, activation)
    wanted = (outputs * chances.double().numpy()[..., None]).sum(1)
    np.testing.assert_allclose(ours.numpy(), wanted, rtol=1e-4, atol=1e-5)
    if unpack is ops.unpack_int4:
        public = ops.moe_int4(hidden, ids, chances, slots, arena.gate_up, arena.down, activation)
        assert torch.equal(public, ours)


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
    for matrix, (codes, scales) in ((gate_up, arena.gate_up), (down, arena.down)):
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
            ops.moe_grouped(hidden, ids, table, gate_up, down, "silu", outputs)
        results.append(ops.combine(outputs, chances, torch.float32))
    assert torch.equal(*results)
