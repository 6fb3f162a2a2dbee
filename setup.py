"""Build the native library with CMake and install the top-level folders as parts of `speq`.

`scheduler/`, `governor/` and `bench/` live at the top of the repository and are installed as
`speq.scheduler`, `speq.governor` and `speq.bench`; nobody imports the bare names. `bench/lab` is
not installed, and keeps its own. CMAKE_ARGS holds more arguments of CMake, such as
-DSPEQ_CUDA_ARCHITECTURES=90-real.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
OUTSIDE = ("scheduler", "governor", "bench")
WITHIN = tuple(f"{name}.*" for name in OUTSIDE)


class CMakeLibrary(Extension):
    """A shared library without a Python module in it: torch loads it, so no Python ABI is named."""

    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[])


class CMakeBuild(build_ext):
    def get_ext_filename(self, ext_name: str) -> str:
        *package, library = ext_name.split(".")
        return str(Path(*package) / f"lib{library}.so")

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        # Only where there is an nvcc, hence no extension that setuptools knows of.
        cuda = Path(self.build_lib) / "speq" / "libspeq_cuda.so"
        if cuda.exists():
            shutil.copy(cuda, ROOT / "speq")

    def build_extension(self, ext: Extension) -> None:
        import torch.utils

        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        # Tools that pip installed lie beside the interpreter, which need not be on the PATH.
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        cmake, ninja = shutil.which("cmake", path=path), shutil.which("ninja", path=path)
        if cmake is None or ninja is None:
            raise SystemExit("cmake and ninja are needed to build; pip install cmake ninja")
        compiler = os.environ.get("CXX", "c++")
        if shutil.which(compiler) is None:
            raise SystemExit(
                f"a C++ compiler is needed to build, and there is no {compiler}; on Debian: "
                "apt install g++; or set CXX to one"
            )
        configure = [
            cmake,
            "-GNinja",
            f"-S{ROOT.resolve()}",
            f"-B{build}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DTORCH_PREFIX={Path(torch.__file__).parent}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target.parent}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        for command in (configure, [cmake, "--build", str(build)]):
            if subprocess.run(command).returncode:
                raise SystemExit(
                    f"the kernels were not built; {shlex.join(command)} says why above"
                )


class StableWheel(bdist_wheel):
    """A wheel for every Python: the libraries bind to torch alone, and the rest is source."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def version() -> str:
    return (ROOT / "speq" / "VERSION").read_text().strip()


setup(
    version=version(),
    packages=[
        *find_packages(include=["speq", "speq.*"]),
        *(
            f"speq.{name}"
            for name in find_packages(include=[*OUTSIDE, *WITHIN], exclude=["bench.lab"])
        ),
        "speq.measure.prompts",
        "speq.bench.prompts",
    ],
    package_dir={f"speq.{name}": name for name in OUTSIDE},
    package_data={
        "speq": ["VERSION", "py.typed"],
        "speq.measure.prompts": ["*"],
        "speq.bench.prompts": ["*"],
        "speq.dashboard": ["assets/*"],
    },
    ext_modules=[CMakeLibrary("speq.speq_cpu")],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": StableWheel},
)
