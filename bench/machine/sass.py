"""The machine code of CUDA kernels: what their inner loops make a multiprocessor issue.

Read from a compiled library by NVIDIA's disassembler, of the packages `nvidia-cuda-cuobjdump` and
`nvidia-cuda-nvdisasm`; no GPU is needed, and nothing here is a time.

A loop is counted whole: every instruction that an iteration may pass, both sides of a branch
included, without those of loops within it. Loops within are for what is rare, an escape's patch for
one, and have counts of their own. Left out are copies of warp operations for warps whose lanes
have parted (`BRA.DIV`): whole warps come to these loops. A loop's products are its multiply-adds,
four for each IDP.4A where it has any; at T rows of inputs, weights are products / T.
"""

import re
import subprocess
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shutil import which

from speq.errors import DependencyError

# Where the packages put their programs, below the folder that Python packages lie in.
PROGRAMS = "nvidia/cu13/bin"
INSTRUCTION = re.compile(
    r"/\*(?P<at>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P\d)\s+)?(?P<text>[^;]+);"
)
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
# What ends a block without going on behind it, when it has no guard.
ENDS = ("EXIT", "RET", "BRX", "JMX", "KILL")
FOUR_PRODUCTS = "IDP.4A"


@dataclass(frozen=True, slots=True)
class Instruction:
    at: int
    opcode: str
    guarded: bool
    target: int | None  # of a branch

    @property
    def ends(self) -> bool:
        """Whether nothing goes on behind it."""
        branches = self.opcode == "BRA" or self.opcode.startswith("BRA.U")
        return not self.guarded and (branches or self.opcode.split(".")[0] in ENDS)


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop without those within it. products: multiply-adds of a lane in one iteration."""

    first: int
    instructions: tuple[Instruction, ...]
    nested: tuple["Loop", ...]

    def count(self, *opcodes: str) -> int:
        """Instructions with an opcode that begins so."""
        return sum(each.opcode.startswith(opcodes) for each in self.instructions)

    @property
    def products(self) -> int:
        return 4 * self.count(FOUR_PRODUCTS) or self.count("FFMA")

    @property
    def wide_loads(self) -> int:
        """Loads of sixteen bytes from global memory."""
        loads = (each.opcode.split(".") for each in self.instructions)
        return sum(parts[0] == "LDG" and "128" in parts for parts in loads)


@dataclass(frozen=True)
class Kernel:
    """A function of one architecture. registers: of a thread; stack_bytes: with local memory."""

    arch: str
    name: str
    registers: int
    stack_bytes: int
    instructions: tuple[Instruction, ...]

    def count(self, *opcodes: str) -> int:
        return sum(each.opcode.startswith(opcodes) for each in self.instructions)

    @property
    def spills(self) -> int:
        """Instructions that read or write local memory."""
        return self.count("LDL", "STL")

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """In the order of their first instructions."""
        bodies = _natural_loops(self.instructions)
        made: dict[int, Loop] = {}
        for first, body in sorted(bodies.items(), key=lambda item: len(item[1])):
            inner = [loop for at, loop in made.items() if at != first and bodies[at] <= body]
            within = frozenset().union(*(bodies[loop.first] for loop in inner))
            own = tuple(each for each in self.instructions if each.at in body - within)
            nested = tuple(loop for loop in inner if loop.first in within)
            made[first] = Loop(first, own, nested)
        return tuple(made[first] for first in sorted(made))

    def loop(self, products: int) -> Loop:
        """The loop with so many products and the most wide loads; of several, the shortest. Loops
        for layouts without vectors have fewer. Raises SpeqError where there is none."""
        found = [loop for loop in self.loops if loop.products == products]
        if not found:
            counts = sorted({loop.products for loop in self.loops} - {0})
            raise DependencyError(
                f"{self.name} on {self.arch} has no loop of {products} products, but of {counts}; "
                "its code is not what speq.bench.machine.issue describes"
            )
        return min(found, key=lambda loop: (-loop.wide_loads, len(loop.instructions)))


def kernels(library: Path, arch: str | None = None) -> Iterator[Kernel]:
    """The kernels of a library, one architecture after the other or of `arch` (sm_90) alone.

    Raises SpeqError where the disassembler or the library's machine code is missing.
    """
    where = [] if arch is None else ["-arch", arch]
    resources = _resources(_output(library, [*where, "--dump-resource-usage"]))
    of_arch, name, found = "", "", defaultdict(list)
    for line in _output(library, [*where, "--dump-sass"]).splitlines():
        text = line.strip()
        if text.startswith("arch = "):
            of_arch = text.removeprefix("arch = ")
        elif text.startswith("Function : "):
            name = text.removeprefix("Function : ")
        elif match := INSTRUCTION.match(text):
            found[of_arch, name].append(_instruction(match))
    if not found:
        raise DependencyError(
            f"{library} has no machine code of {arch or 'any GPU'}; build it with nvcc"
        )
    for (of_arch, name), instructions in found.items():
        yield Kernel(of_arch, name, *resources[of_arch, name], tuple(instructions))


def missing() -> str | None:
    """Why there is no disassembler here; None where there is."""
    absent = [name for name in ("cuobjdump", "nvdisasm") if _program(name) is None]
    packages = " ".join(f"nvidia-cuda-{name}" for name in absent)
    return (
        f"there is no {' or '.join(absent)} here; run `pip install {packages}`" if absent else None
    )


def _program(name: str) -> str | None:
    """The package's, or one of a CUDA toolkit."""
    folder = Path(sysconfig.get_path("platlib")) / PROGRAMS
    return which(name, path=str(folder)) or which(name)


def _output(library: Path, options: list[str]) -> str:
    program, other = _program("cuobjdump"), _program("nvdisasm")
    reason = missing()
    if reason is not None or program is None or other is None:
        raise DependencyError(f"machine code of {library.name} is wanted, but {reason}")
    # cuobjdump runs nvdisasm from the path.
    ended = subprocess.run(
        [program, *options, str(library)],
        capture_output=True,
        text=True,
        env={"PATH": str(Path(other).parent)},
    )
    if ended.returncode != 0:
        raise DependencyError(f"cuobjdump cannot read {library}: {ended.stderr.strip()}")
    return ended.stdout


def _resources(listing: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Registers, and bytes of stack and local memory, by architecture and function."""
    arch, name, found = "", "", {}
    for line in listing.splitlines():
        text = line.strip()
        if text.startswith("arch = "):
            arch = text.removeprefix("arch = ")
        elif text.startswith("Function "):
            name = text.removeprefix("Function ").removesuffix(":")
        elif match := RESOURCES.match(text):
            registers, stack, local = map(int, match.groups())
            found[arch, name] = registers, stack + local
    return found


def _instruction(match: re.Match[str]) -> Instruction:
    opcode, _, operands = match["text"].strip().partition(" ")
    # Newer code names a condition among the operands of a branch.
    conditional = bool(re.match(r"!?U?P\d", operands))
    target = re.search(r"0x([0-9a-f]+)$", operands.strip()) if opcode.startswith("BRA") else None
    return Instruction(
        int(match["at"], 16),
        opcode,
        match["guard"] is not None or (opcode.startswith("BRA") and conditional),
        int(target[1], 16) if target and not opcode.startswith("BRA.DIV") else None,
    )


def _natural_loops(instructions: tuple[Instruction, ...]) -> dict[int, frozenset[int]]:
    """Addresses of the instructions of each loop, by that of its first."""
    before: dict[int, list[int]] = defaultdict(list)
    backward = []
    for each, following in zip(instructions, (*instructions[1:], None), strict=True):
        if not each.ends and following is not None:
            before[following.at].append(each.at)
        if each.target is not None:
            before[each.target].append(each.at)
            if each.target <= each.at:
                backward.append((each.target, each.at))
    loops: dict[int, set[int]] = defaultdict(set)
    reached = _reached(instructions)
    for first, last in backward:
        # Code behind a loop may jump back into its middle; that jump makes no loop.
        if last not in reached:
            continue
        body, left = loops[first] | {first}, [last]
        while left:
            at = left.pop()
            if at not in body:
                body.add(at)
                left += [place for place in before[at] if place in reached]
        if instructions[0].at not in body or first == instructions[0].at:
            loops[first] = body
    return {first: frozenset(body) for first, body in loops.items() if body}


def _reached(instructions: tuple[Instruction, ...]) -> set[int]:
    """Addresses that some path from the first instruction comes to."""
    places = {each.at: number for number, each in enumerate(instructions)}
    seen: set[int] = set()
    left = [0]
    while left:
        number = left.pop()
        if number >= len(instructions) or instructions[number].at in seen:
            continue
        each = instructions[number]
        seen.add(each.at)
        if each.target is not None:
            left.append(places[each.target])
        if not each.ends:
            left.append(number + 1)
    return seen
