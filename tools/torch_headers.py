"""Compiles our bindings against a published torch's headers: `python tools/torch_headers.py 2.11`.

Headers come out of the wheel, a few megabytes of hundreds: a wheel is a zip, whose list of contents
and single members are read by ranges. pip says where the wheel is, by its own configuration.
"""

import argparse
import io
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
CACHE = ROOT / "build" / "torch-headers"
# The stable ABI, and all that it includes.
WANTED = (
    *("torch/include/torch/csrc/stable/", "torch/include/torch/csrc/inductor/aoti_torch/"),
    "torch/include/torch/headeronly/",
)
BINDINGS = (
    *("csrc/cpu/bindings.cpp", "csrc/cpu/compact_bindings.cpp", "csrc/cpu/scaled_bindings.cpp"),
    *("csrc/cpu/attention_bindings.cpp", "csrc/cpu/decoder_bindings.cpp"),
    *("csrc/cpu/delta_bindings.cpp", "csrc/cpu/dense_bindings.cpp"),
    *("csrc/cuda/bindings.cpp", "csrc/cuda/compact_bindings.cpp", "csrc/cuda/dense_bindings.cpp"),
    "csrc/cuda/scaled_bindings.cpp",
)
# One range, since the members that are wanted are adjacent.
READ_BYTES = 1 << 20
TIMEOUT_S = 30


class Unreachable(Exception):
    """The package index cannot be asked, or has no such torch. In one sentence."""


class RemoteFile(io.RawIOBase):
    """A file behind a URL, read by ranges."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            self._size = int(answer.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        headers = {"Range": f"bytes={self._at}-{end - 1}"}
        request = urllib.request.Request(self._url, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            if answer.status != 206:  # the whole wheel follows
                raise Unreachable("the package index does not serve parts of files")
            data = answer.read()
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def oldest_torch() -> str:
    """The version of torch that pyproject.toml asks for at least."""
    found = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def wheel_url(version: str) -> str:
    """Return the URL that pip would load torch from. Raises Unreachable."""
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--report", "-", "--quiet"]
    limits = ["--retries", "1", "--timeout", str(TIMEOUT_S), "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "install", *options, *limits, f"torch=={version}"]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        raise Unreachable(f"pip finds no torch {version}: {done.stderr.strip().splitlines()[-1]}")
    (found,) = json.loads(done.stdout)["install"]
    return str(found["download_info"]["url"])


def fetch(version: str, cache: Path = CACHE) -> Path:
    """The folder of a torch's headers, fetched once. Raises Unreachable."""
    target = cache / version
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as partial:
        whole = Path(partial) / version
        try:
            remote = io.BufferedReader(RemoteFile(wheel_url(version)), READ_BYTES)
            with zipfile.ZipFile(remote) as wheel:
                members = [each for each in wheel.infolist() if each.filename.startswith(WANTED)]
                for member in sorted(members, key=lambda each: each.header_offset):
                    wheel.extract(member, whole)
        except (OSError, zipfile.BadZipFile) as error:
            raise Unreachable(f"headers of torch {version} cannot be fetched: {error}") from error
        if not target.exists():  # other tests may fetch it at the same time
            whole.rename(target)
    return target


def compile_errors(source: Path, headers: Path) -> str:
    """Compile a source file with the flags of CMakeLists.txt; return the compiler's errors."""
    cmake = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    target = re.search(r"TORCH_TARGET_VERSION=\w+", cmake)
    assert target is not None
    command = [
        *("g++", "-fsyntax-only", "-std=c++20", "-fvisibility=hidden"),
        *("-Wall", "-Wextra", "-Werror"),
        *(f"-D{target[0]}", f"-I{ROOT / 'csrc'}", "-isystem", str(headers / "torch" / "include")),
        *(["-DUSE_CUDA"] if source.parent.name == "cuda" else []),
    ]
    return subprocess.run([*command, str(source)], capture_output=True, text=True).stderr


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile bindings against a torch's headers.")
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="of torch, such as 2.10")
    failed = False
    for version in parser.parse_args().versions:
        for name in BINDINGS:
            errors = compile_errors(ROOT / name, fetch(version))
            print(f"torch {version}, {name}:", errors or "compiles")
            failed |= bool(errors)
    sys.exit(failed)


if __name__ == "__main__":
    main()
