"""Builds wheels and the source distribution into `dist`, and tries them without a compiler.

    python -m tools.wheels [--out dist]

The package's wheel holds the CPU library with all its instruction sets, for any Python 3 and any
torch that it supports. It is built from the unpacked source distribution, so that is tried as well.
Where there is Debian's cross compiler, one for aarch64 is built beside it, which nothing here runs.
The model of `speq demo` is a wheel of its own. Both are installed into an environment that shares
torch and transformers with this one, and run with nothing else on the PATH.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tools.releases import ROOT, packages_of

# Torch brings these itself.
TORCHS = ("libtorch_cpu.so", "libtorch.so", "libc10.so")
# The wheel for aarch64, by Debian 12's compiler.
COMPILER, PLATFORM = "aarch64-linux-gnu-g++", "manylinux_2_34_aarch64"
TARGET = (
    "-DSPEQ_CUDA=OFF -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 "
    f"-DCMAKE_CXX_COMPILER={COMPILER}"
)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")


def run(*command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """Return what a command prints. Exits with what it says on stderr if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"wheels: {' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def only(folder: Path, pattern: str) -> Path:
    """Return the one file of a pattern. Exits where there is none, or more."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"wheels: {folder} has {len(found)} files {pattern}; one was wanted")
    return found[0]


def build(out: Path) -> list[Path]:
    """Build both wheels and the source distribution; return the wheels."""
    tools = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    settings = os.environ | tools | {"CMAKE_ARGS": "-DSPEQ_CUDA=OFF"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", out)
        with tarfile.open(only(out, "speq_moe-*.tar.gz")) as archive:
            archive.extractall(folder, filter="data")
        source = only(folder, "speq_moe-*")
        built = (*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder)
        run(*built, source, env=settings)
        repair = (sys.executable, "-m", "auditwheel", "repair", "-w", out)
        excluded = [word for library in TORCHS for word in ("--exclude", library)]
        run(*repair, *excluded, only(folder, "speq_moe-*.whl"), env=settings)
        if shutil.which(COMPILER):
            shutil.rmtree(source / "build", ignore_errors=True)
            (source / "speq" / "libspeq_cpu.so").unlink(missing_ok=True)
            wheel = (sys.executable, "setup.py", "-q", "bdist_wheel", "--plat-name", PLATFORM)
            run(*wheel, "--dist-dir", out, cwd=source, env=settings | {"CMAKE_ARGS": TARGET})
            check_aarch64(only(out, f"speq_moe-*{PLATFORM}.whl"))
        run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", out, ROOT / "models")
        shutil.rmtree(ROOT / "models" / "build", ignore_errors=True)
    return [only(out, "speq_moe-*x86_64.whl"), only(out, "speq_moe_demo-*.whl")]


def check_aarch64(wheel: Path) -> None:
    """Exit where a wheel's library is another processor's, or asks for more than its tag says."""
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(wheel) as archive:
        library = archive.extract("speq/libspeq_cpu.so", name)
        told = run("readelf", "--wide", "-h", "-d", "-V", library)
    asked = {tuple(map(int, found)) for found in re.findall(r"GLIBC_(\d+)\.(\d+)", told)}
    most = tuple(map(int, PLATFORM.split("_")[1:3]))
    if "AArch64" not in told or max(asked) > most or "[libtorch_cpu.so]" not in told:
        sys.exit(f"wheels: {wheel.name} has a library that it cannot hold:\n{told}")


def try_out(wheels: list[Path]) -> None:
    """Install the wheels beside this environment's torch, and run the demonstration.

    Exits where a command fails, a kernel is not native, or the text is not that of the checkout.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "venv"
        venv.create(folder, symlinks=True)
        shared = sysconfig.get_path("purelib")
        line = f"import site; site.addsitedir({shared!r})\n"
        (packages_of(folder) / "shared.pth").write_text(line, encoding="utf-8")
        python = folder / "bin" / "python"
        install = (sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-deps")
        bare = {"PATH": str(folder / "bin"), "HOME": name, "LANG": "C.UTF-8"}
        begun = time.monotonic()
        run(*install, "--disable-pip-version-check", *wheels)
        text = run(folder / "bin" / "speq", "demo", cwd=Path(name), env=bare)
        print(f"wheels: installed, and the demonstration ran, in {time.monotonic() - begun:.0f} s")
        place = "import pathlib, speq; print(pathlib.Path(speq.__file__).parent)"
        if not Path(run(python, "-c", place, cwd=Path(name), env=bare).strip()).is_relative_to(
            folder
        ):
            sys.exit("wheels: what ran was not the installed wheel")
        ops = json.loads(run(folder / "bin" / "speq", "doctor", "--json", "-", env=bare))["rows"]
    slow = [row["op"] for row in ops if row["runs_on"] == "slower reference"]
    if slow:
        sys.exit(f"wheels: without native kernels for {', '.join(slow)}")
    expected = run(Path(sys.executable).parent / "speq", "demo", cwd=ROOT)
    if _text(text) != _text(expected):
        sys.exit(f"wheels: the demonstration wrote\n{text}\nand the checkout\n{expected}")


def _text(printed: str) -> str:
    """Return the text of the demonstration, without what to try next."""
    return printed.partition("\nNext:")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Build wheels, and try them without a compiler.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    out = parser.parse_args().out.absolute()
    for earlier in out.glob("speq_moe*"):
        earlier.unlink()
    wheels = build(out)
    try_out(wheels)
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path}")


if __name__ == "__main__":
    main()
