"""What a layer's experts take to issue on named cards, beside what their bytes take: computed.

Nothing here is measured, and no GPU is needed. Instructions a weight are counted in the machine
code of `libspeq_cuda.so` (see `speq.bench.machine.sass`), in the loop over weights that one row of
inputs passes in bfloat16; what is outside that loop, and loops within it for what is rare, are left
out. Cards are those of `speq.planning.cost.presets`, at their boost clocks.

Issue time takes every multiprocessor to issue four instructions a clock. Integers go through half
the lanes on the cards before Blackwell's, so that where they are more than half of the loop, twice
their number counts. Bytes time is that of a layer's experts at the share of the memory's bandwidth
that presets go by. A call takes the longer of both at the least.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from speq.bench.machine.expert_layer import SHAPES, Layer, LayerShape
from speq.bench.machine.sass import Kernel, Loop, kernels
from speq.bench.settings import KernelSettings as Settings
from speq.errors import DependencyError, OptionError, checked_choice
from speq.kernels import library
from speq.measure.picture import Axis, Picture
from speq.measure.report import Column, Report
from speq.planning.cost.presets import MULTIPROCESSORS, PRESETS, Multiprocessors
from speq.units import Progress, track

LANES = 32
ISSUED_PER_CLOCK = 4  # by a multiprocessor, of warps
# What goes through the integer lanes, and where these are half as many as the others: the table of
# throughput in the CUDA C++ Programming Guide. IMAD goes through those of FFMA.
INTEGER = (
    *("IADD", "ISETP", "LOP3", "SHF", "PRMT", "LEA", "SEL", "IMNMX", "VIADD", "VIMNMX", "IABS"),
    *("IDP", "BMSK", "MOV"),
)
HALF_RATE = frozenset({"sm_80", "sm_86", "sm_89", "sm_90"})
# Rows of gate and up that are encoded to know how long records are.
SAMPLE_WIDTH = 256
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Counted:
    """A kernel whose inner loop is counted.

    function  what its name in the machine code has
    weights   of a lane in one iteration, for one row of inputs
    form      of the experts it reads, besides codes
    """

    function: str
    weights: int
    forms: tuple[str, ...]

    def kernel(self, of_arch: list[Kernel]) -> Kernel:
        """The kernel's code. Raises SpeqError where there is none or more than one."""
        found = [each for each in of_arch if self.function in each.name]
        if len(found) != 1:
            raise OptionError(f"there are {len(found)} functions like {self.function}, not one")
        return found[0]


COUNTED = {
    "moe_int4": Counted("moe_int4_gate_up", 128, ("int4",)),
    "moe_grouped": Counted("moe_grouped_projectionINS_8BFloat16E", 32, ("exact",)),
    "moe_grouped_lossless": Counted(
        "moe_compact_projectionINS0_13LosslessSlotsELb0E", 32, ("lossless",)
    ),
    "moe_grouped_residual": Counted(
        "moe_compact_projectionINS0_13ResidualSlotsELb0E", 32, ("residual", "int4")
    ),
}

COLUMNS: dict[str, Column] = {
    "shape": ("shape", "{}"),
    "kernel": ("kernel", "{}"),
    "card": ("card", "{}"),
    "issued a weight": ("instructions_per_weight", "{:.2f}"),
    "issue us": ("issue_s", lambda time_s: f"{time_s * 1e6:.1f}"),
    "bytes us": ("bytes_s", lambda time_s: f"{time_s * 1e6:.1f}"),
    "bound by": ("bound_by", "{}"),
}
TIMES = (
    Axis("issue_s", "issuing instructions, us", 1e6),
    Axis("bytes_s", "reading bytes, us", 1e6),
)
PICTURES = (
    Picture(
        *("issue", "What kernels take on cards", (Axis("kernel", "kernel"), Axis("card", "card"))),
        TIMES,
        each="shape",
        aid="A call takes the longer of both times at the least; they are computed.",
    ),
)
NOTES = (
    "Computed, not measured: instructions are counted in machine code, cards are data sheets.",
    "A layer's top_k experts, one row; a call takes the longer of both times at the least.",
)


def run(settings: Settings, progress: Progress | None = None) -> Report:
    """Count every kernel and compute its times on every card. Raises SpeqError."""
    check_nothing_is_timed(settings)
    path = library.FOLDER / "libspeq_cuda.so"
    if not path.exists():
        raise DependencyError(f"{path} is what --sass reads, and it is not built; run `make setup`")
    names = SHAPES if settings.shapes == ("all",) else settings.shapes
    wanted = COUNTED if settings.kernels == ("all",) else settings.kernels
    shapes = [SHAPES[checked_choice("shapes", name, tuple(SHAPES))] for name in names]
    for shape in shapes:
        shape.check_group_size(settings.group_size)
    counted = {name: COUNTED[checked_choice("kernels", name, tuple(COUNTED))] for name in wanted}
    archs = list(dict.fromkeys(card.arch for card in MULTIPROCESSORS.values()))
    code = {
        arch: list(kernels(path, arch))
        for arch in track("disassembling", archs, len(archs), progress)
    }
    rows = []
    for shape in shapes:
        sample = replace(shape, expert_width=min(shape.expert_width, SAMPLE_WIDTH))
        layer = Layer(sample, 1, frozenset(forms_of(counted)), settings.group_size, CPU)
        for name, one in counted.items():
            sampled = sum(layer.expert_bytes(form, settings.group_size) for form in one.forms)
            expert_bytes = sampled * shape.weights / sample.weights
            for card, processors in MULTIPROCESSORS.items():
                kernel = one.kernel(code[processors.arch])
                rows.append(row(name, kernel, shape, expert_bytes, card))
    return Report(
        "kernels", "machine code", settings.as_json() | {"computed": True}, rows, pictures=PICTURES
    )


def check_nothing_is_timed(settings: Settings) -> None:
    """Raise SpeqError for settings that say how to time what is computed here."""
    given, defaults = settings.as_json(), Settings().as_json()
    for name in ("rows", "dtype", "device", "rounds", "isa", "memory", "reference"):
        if given[name] != defaults[name]:
            raise OptionError(
                f"{name} is {given[name]!r}, which is for kernels that are timed; --sass computes "
                "times of one row in bfloat16: leave it out"
            )


def forms_of(counted: dict[str, Counted]) -> set[str]:
    return {form for one in counted.values() for form in one.forms}


def row(
    name: str, kernel: Kernel, shape: LayerShape, expert_bytes: float, card: str
) -> dict[str, Any]:
    """A kernel on a card: a row of the report."""
    weights = COUNTED[name].weights
    loop = kernel.loop(weights)
    slots = issue_slots(loop, kernel.arch) / weights
    issue_s = shape.top_k * shape.weights * slots / issued_per_s(MULTIPROCESSORS[card])
    bytes_s = shape.top_k * expert_bytes / PRESETS[card].memory_bytes_per_s
    return {
        "shape": shape.name,
        "kernel": name,
        "card": card,
        "arch": kernel.arch,
        "instructions_per_weight": len(loop.instructions) / weights,
        "integer_per_weight": loop.count(*INTEGER) / weights,
        "rare_instructions": [len(inner.instructions) for inner in loop.nested],
        "wide_loads": loop.wide_loads,
        "registers": kernel.registers,
        "stack_bytes": kernel.stack_bytes,
        "issue_s": issue_s,
        "bytes_s": bytes_s,
        "bound_by": "issue" if issue_s > bytes_s else "bytes",
    }


def issue_slots(loop: Loop, arch: str) -> float:
    """Clocks of a warp's scheduler that an iteration takes at the least."""
    integer = loop.count(*INTEGER)
    return max(len(loop.instructions), 2 * integer if arch in HALF_RATE else integer)


def issued_per_s(card: Multiprocessors) -> float:
    """Instructions of a lane that a card issues in a second."""
    return card.count * ISSUED_PER_CLOCK * LANES * card.clock_hz
