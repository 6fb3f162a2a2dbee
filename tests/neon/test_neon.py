"""The kernels for aarch64, compiled here and run by QEMU: of each instruction set. Products in the
one order have the bits of those of this processor.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.needed import absent
from tests.helpers.paths import ROOT

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
TARGET = (
    *("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DSPEQ_CUDA=OFF"),
    *(f"-DCMAKE_CXX_COMPILER={COMPILER}", "-DSPEQ_WERROR=ON", "-DCMAKE_BUILD_TYPE=Release"),
)
# cmake and ninja come with the environment that runs the tests: Debian's may be too old.
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
PROCESSORS = {
    "max": ["portable", "neon", "neon_dot", "neon_bf16"],
    "neoverse-n1": ["portable", "neon", "neon_dot"],
    "cortex-a53": ["portable", "neon"],
}
# Of the program for this processor: the plain kernels alone.
PLAIN = (
    "tests/neon/kernels.cpp",
    *(f"csrc/cpu/{name}.cpp" for name in ("encode", "isa", "portable")),
)


@pytest.mark.wide
def test_kernels_compute_what_the_plain_ones_do(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    tools = (COMPILER, EMULATOR, "cmake", "ninja")
    missing = [name for name in tools if not shutil.which(name, path=PATH)]
    if missing:
        absent(request.config, "aarch64", f"not installed: {', '.join(missing)}")
    prefix = f"-DTORCH_PREFIX={Path(torch.__file__).parent}"
    for command in (
        ["cmake", "-GNinja", f"-S{ROOT}", f"-B{tmp_path}", prefix, *TARGET],
        ["cmake", "--build", tmp_path, "--target", "speq_neon"],
    ):
        command[0] = shutil.which("cmake", path=PATH)
        built = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PATH": PATH}
        )
        assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    here = tmp_path / "plain"
    options = ("-std=c++20", "-O3", "-ffp-contract=off", f"-I{ROOT / 'csrc'}", "-o", here)
    subprocess.run(["c++", *options, *(ROOT / path for path in PLAIN)], check=True)
    done = subprocess.run([here, "200"], capture_output=True, text=True, check=True)
    ((name, plain),) = told_of(done.stdout).items()
    assert name == "portable"
    for processor, names in PROCESSORS.items():
        command = [EMULATOR, "-cpu", processor, tmp_path / "speq_neon", "200"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        told = told_of(done.stdout)
        assert list(told) == names
        assert all(int(each.split()[0]) > 1_000_000 for each in told.values())
        # The digest of all products in the order of sums.
        assert {each.partition(", ")[2] for each in told.values()} == {plain.partition(", ")[2]}


def told_of(output: str) -> dict[str, str]:
    """What the program says of each set of kernels."""
    return dict(line.split(": ") for line in output.splitlines())
