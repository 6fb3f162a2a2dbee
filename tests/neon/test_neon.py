"""The kernels for aarch64, compiled here and run by QEMU: of each instruction set."""

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
    "max": ["neon", "neon_dot", "neon_bf16"],
    "neoverse-n1": ["neon", "neon_dot"],
    "cortex-a53": ["neon"],
}


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
    for processor, names in PROCESSORS.items():
        command = [EMULATOR, "-cpu", processor, tmp_path / "speq_neon", "200"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        counts = dict(line.split(": ") for line in done.stdout.splitlines())
        assert list(counts) == names
        assert all(int(told.split()[0]) > 1_000_000 for told in counts.values())
