"""The machine code of the CUDA kernels: what inner loops issue for a weight, held to a budget.

No GPU is needed, but a library that nvcc built and NVIDIA's disassembler.
"""

from pathlib import Path
from typing import Any

import pytest

from speq.bench.machine import issue, sass
from speq.bench.machine import kernels as bench
from speq.bench.machine.expert_layer import LayerShape
from speq.bench.machine.issue import COUNTED, HALF_RATE, issue_slots
from speq.bench.machine.kernels import Settings
from speq.bench.machine.sass import Kernel, kernels
from speq.errors import SpeqError
from speq.kernels import library
from speq.planning.cost.presets import MULTIPROCESSORS, PRESETS, Multiprocessors
from tests.helpers.command import Command
from tests.helpers.needed import absent

LIBRARY = library.FOLDER / "libspeq_cuda.so"
ARCHS = {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"}
# Instructions issued for a weight and one row of inputs, and loads of sixteen bytes in an
# iteration: of words four, of compact records two of bytes, with codes one more; and of inputs four
# in BF16, eight in float32.
BUDGETS = {
    "moe_int4": (1.4, 4),
    "moe_grouped": (5.0, 8),
    "moe_grouped_lossless": (10.0, 10),
    "moe_grouped_residual": (25.0, 11),
}


@pytest.fixture(scope="module")
def code(request: pytest.FixtureRequest) -> dict[str, list[Kernel]]:
    """Kernels by architecture."""
    reason = sass.missing() if LIBRARY.exists() else f"{LIBRARY} is not built"
    if reason is not None:
        absent(request.config, "sass", reason)
    found: dict[str, list[Kernel]] = {}
    for kernel in kernels(LIBRARY):
        found.setdefault(kernel.arch, []).append(kernel)
    return found


@pytest.mark.wide
def test_instructions_of_a_weight(code: dict[str, list[Kernel]]) -> None:
    assert set(code) == ARCHS
    for name, (most, loads) in BUDGETS.items():
        for arch, of_arch in code.items():
            loop = COUNTED[name].kernel(of_arch).loop(COUNTED[name].weights)
            per_weight = len(loop.instructions) / COUNTED[name].weights
            assert 1 < per_weight <= most, f"{name} on {arch}: {per_weight:.2f} a weight"
            assert loop.wide_loads == loads, f"{name} on {arch}"


@pytest.mark.wide
def test_nothing_is_on_a_stack(code: dict[str, list[Kernel]]) -> None:
    for arch, of_arch in code.items():
        assert len(of_arch) >= 13
        for kernel in of_arch:
            assert (kernel.stack_bytes, kernel.spills) == (0, 0), f"{kernel.name} on {arch}"
            assert 0 < kernel.registers <= 128, f"{kernel.name} on {arch}"


# Two loops, one in the other, and code behind that jumps back into the inner one; as the
# disassembler prints it.
LISTING = """
Fatbin elf code:
================
arch = sm_90

    code for sm_90
        Function : outer_and_inner
        /*0000*/                   MOV R1, c[0x0][0x28] ;         /* 0x00000a0000017a02 */
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;      /* 0x000fe2 */
        /*0020*/                   BRA.DIV UR5, 0x00b0 ;          /* 0x000fe2 */
        /*0030*/                   FFMA R0, R4, R5, R0 ;          /* 0x000fe2 */
        /*0040*/                   FFMA R0, R6, R7, R0 ;          /* 0x000fe2 */
        /*0050*/               @P1 BRA 0x00a0 ;                   /* 0x000fe2 */
        /*0060*/                   LOP3.LUT R0, R0, 0x1, RZ, 0xc0, !PT ;  /* 0x000fe2 */
        /*0070*/               @P0 BRA 0x0060 ;                   /* 0x000fe2 */
        /*0080*/              @!P2 BRA 0x0010 ;                   /* 0x000fe2 */
        /*0090*/                   EXIT ;                         /* 0x000fe2 */
        /*00a0*/                   BRA 0x0060 ;                   /* 0x000fe2 */
        /*00b0*/                   STL [R1], R0 ;                 /* 0x000fe2 */
        /*00c0*/                   BRA 0x0030 ;                   /* 0x000fe2 */
"""
RESOURCES = """
arch = sm_90
Resource usage:
 Function outer_and_inner:
  REG:40 STACK:8 SHARED:0 LOCAL:16 CONSTANT[0]:456 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(
        sass,
        "_output",
        lambda _, options: RESOURCES if "--dump-resource-usage" in options else LISTING,
    )
    (kernel,) = kernels(Path("any.so"))
    return kernel


def test_loops_of_a_listing(listed: Kernel) -> None:
    assert (listed.arch, listed.registers, listed.stack_bytes) == ("sm_90", 40, 24)
    assert listed.spills == 1
    outer = listed.loop(2)
    assert [each.at for each in outer.instructions] == [
        *(0x10, 0x20, 0x30, 0x40, 0x50),
        *(0x80, 0xA0),
    ]
    assert outer.wide_loads == 1
    (inner,) = outer.nested
    assert [each.opcode for each in inner.instructions] == ["LOP3.LUT", "BRA"]
    # Half of the inner loop is integers, which take two clocks each where there are half the lanes.
    assert issue_slots(inner, "sm_90") == 2
    assert issue_slots(outer, "sm_90") == 7
    assert "sm_120" not in HALF_RATE


def test_a_loop_that_is_not_there(listed: Kernel) -> None:
    with pytest.raises(SpeqError, match=r"outer_and_inner on sm_90 has no loop of 32 products"):
        listed.loop(32)


# 3 x 64 x 32 weights, two experts a token.
TINY = LayerShape("tiny", hidden_size=64, expert_width=32, top_k=2, num_experts=8)


@pytest.fixture
def tiny_card(monkeypatch: pytest.MonkeyPatch, listed: Kernel, tmp_path: Path) -> None:
    """One shape, one card, and one kernel, which is that of the listing."""
    monkeypatch.setattr(issue, "SHAPES", {"tiny": TINY})
    monkeypatch.setattr(issue, "COUNTED", {"grouped": issue.Counted("outer", 2, ("exact",))})
    monkeypatch.setattr(issue, "MULTIPROCESSORS", {"h200": Multiprocessors("sm_90", 10, 2e9)})
    monkeypatch.setattr(issue, "kernels", lambda path, arch: [listed])
    (tmp_path / "libspeq_cuda.so").touch()
    monkeypatch.setattr(issue.library, "FOLDER", tmp_path)


@pytest.mark.usefixtures("tiny_card")
def test_times_of_a_card(command: Command) -> None:
    report = bench.run(Settings(sass=True, group_size=16))
    (row,) = report.rows
    # Seven instructions to two weights, four a clock on each of ten, for 32 lanes.
    assert row["instructions_per_weight"] == 3.5
    assert row["rare_instructions"] == [2]
    assert row["issue_s"] == pytest.approx(2 * 3 * 64 * 32 * 3.5 / (10 * 4 * 32 * 2e9))
    # In bfloat16 at nine tenths of 4,800 GB/s.
    assert row["bytes_s"] == pytest.approx(2 * 3 * 64 * 32 * 2 / (0.9 * 4.8e12))
    assert row["bound_by"] == "issue"
    ended = command("bench", "kernels", "--sass", "--group-size", 16)
    assert ended.code == 0, ended.err
    assert "Computed, not measured" in ended.out
    for shown in ("h200", "grouped", "3.50"):
        assert shown in ended.out


@pytest.mark.usefixtures("tiny_card")
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"rows": [3]}, "rows is [3], which is for kernels that are timed; --sass computes times"),
        ({"dtype": "float16"}, "dtype is 'float16', which is for kernels that are timed"),
        ({"group_size": 48}, "group_size is 48; it must be even and divide the 64 and 32 columns"),
        ({"kernels": ["torch"]}, "kernels is 'torch'; it must be one of grouped"),
        ({"shapes": ["gpt"]}, "shapes is 'gpt'; it must be one of tiny"),
    ],
)
def test_what_sass_refuses(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpeqError) as refused:
        bench.run(Settings(**{"sass": True, "group_size": 16} | given))
    assert sentence in str(refused.value)


def test_a_library_that_is_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(issue.library, "FOLDER", tmp_path)
    with pytest.raises(SpeqError, match=r"libspeq_cuda.so is what --sass reads, and it is not"):
        bench.run(Settings(sass=True))


def test_cards_are_presets() -> None:
    """A card's float32 rate, two for each of 128 lanes and clock, beside those of data sheets."""
    assert set(MULTIPROCESSORS) < set(PRESETS)
    assert {card.arch for card in MULTIPROCESSORS.values()} <= ARCHS
    teraflops = {"rtx-4090": 82.6, "rtx-3090": 35.6, "rtx-4060-ti": 22.1, "rtx-5090": 104.8}
    teraflops |= {"rtx-5060-ti": 23.7, "rtx-5070": 30.9, "rtx-5070-ti": 43.9, "rtx-5080": 56.3}
    teraflops |= {"rtx-4070": 29.15, "rtx-pro-6000": 125.0, "h200": 66.9, "h100-pcie": 51.2}
    for name, wanted in teraflops.items():
        card = MULTIPROCESSORS[name]
        assert card.count * 128 * 2 * card.clock_hz / 1e12 == pytest.approx(wanted, rel=0.01)


def test_no_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "_program", lambda name: None)
    sentence = (
        "machine code of any.so is wanted, but there is no cuobjdump or nvdisasm here; run "
        "`pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`"
    )
    with pytest.raises(SpeqError) as refused:
        list(kernels(Path("any.so")))
    assert str(refused.value) == sentence
