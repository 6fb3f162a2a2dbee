"""Rehearses `make gpu` without a GPU: every step up to its first call of the device.

    python -m tools.rehearse                                       with the installed torch
    python -m tools.rehearse --torch 2.11.0 --transformers 5.17.0  with others, gigabytes of them

It uses a fresh environment without scipy and network, in which torch pretends to see a GPU. It
checks that our built libraries find every symbol of torch that they name, that torch with CUDA
loads them, that tests are collected, and that every command gets as far as the device.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.gpu_steps import GpuStep, steps

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "rehearsal"
WITH_TORCH = ("jinja2", "typer", "rich", "pytest>=8", "cmake>=3.26", "ninja")
# What torch says at the first call of a device that is not there.
AT_THE_DEVICE = re.compile(
    "not compiled with CUDA|built without CUDA|no NVIDIA driver|without CUDA support|"
    "requires a CUDA|Cannot find any torch accelerator|CUDA driver|No CUDA GPUs|CUDA error"
)
# What is wrong whatever the device.
WRONG = re.compile(
    r"ImportError|ModuleNotFoundError|No such option|unrecognized arguments|Usage:|no tests ran|"
    r"not found: |ERROR collecting"
)
SYMBOLS = """
import ctypes, json, sys, torch
from pathlib import Path
paths = (Path(torch.__path__[0]) / "lib" / f"libtorch_{device}.so" for device in ("cpu", "cuda"))
torches = [ctypes.CDLL(str(path)) for path in paths if path.exists()]
lacking = [name for name in sys.argv[1:] if not any(hasattr(each, name) for each in torches)]
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "lacking": lacking}))
"""


def make_environment(python: Path, torch: str | None, transformers: str | None) -> None:
    """A fresh environment, whose interpreter is `python`."""
    folder = python.parent.parent
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=torch is not None, symlinks=True)
    packages = Path(
        sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    )
    if torch is None:
        import pytest
        import torch as installed

        # Where packages lie, but not what their .pth files add: our own sources.
        places = {str(Path(each.__file__ or "").parent.parent) for each in (installed, pytest)}
        (packages / "installed.pth").write_text("\n".join(sorted(places)) + "\n")
    else:
        wanted = [f"torch=={torch}", f"transformers=={transformers}", *WITH_TORCH]
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *wanted], check=True)
    shutil.copy(ROOT / "tools" / "pretence.py", packages / "sitecustomize.py")


def named_symbols(library: Path) -> list[str]:
    """The functions of torch's stable ABI that a library wants from elsewhere."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
    )
    names = (line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines())
    return sorted(name for name in names if re.match("aoti_|torch_", name))


def check_symbols(python: Path) -> Iterable[str]:
    """A line for each of our libraries. Exits where a symbol is not there."""
    for device in ("cpu", "cuda"):
        library = ROOT / "speq" / f"libspeq_{device}.so"
        if not library.exists():
            sys.exit(f"rehearsal: {library} was not built; run `make setup` where there is nvcc")
        names = named_symbols(library)
        done = subprocess.run(
            [str(python), "-c", SYMBOLS, *names], capture_output=True, text=True, check=True
        )
        found = json.loads(done.stdout)
        lacking = [name for name in found["lacking"] if found["cuda"] or "cuda" not in name]
        if lacking or not names:
            sys.exit(f"rehearsal: {library.name} names what torch has not: {lacking}")
        without = len(found["lacking"])
        less = f", but for {without} of CUDA, which this build of torch lacks" if without else ""
        yield f"{library.name}: torch {found['torch']} has all {len(names)} symbols{less}"


def verdict(step: GpuStep, record: dict[str, Any]) -> str:
    """What a step came to. Exits where it ended before the device, or not at all."""
    output = record["output"]
    if record["state"] == "skipped" and output == step.skipped:
        return f"skipped: {output}"
    if step.host_only and record["state"] == "passed":
        return "passed"
    reached = AT_THE_DEVICE.findall(output)  # tracebacks print others of torch's lines first
    wrong = WRONG.search(output)
    ended = record["state"] in ("passed", "failed")
    if step.host_only or not ended or not reached or wrong:
        sys.exit(f"rehearsal: step {step.name!r} did not come to the device:\n{output[-4000:]}")
    return f"came to the device: {reached[-1]}"


def rehearse(python: Path, *arguments: str) -> dict[str, Any]:
    """The JSON of a run of tools/gpu.sh."""
    out = FOLDER / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = [str(ROOT / "tools" / "gpu.sh"), "--rehearse", "--total-s", "1500", *arguments]
    environment = os.environ | {"PYTHON": str(python), "OUT": str(out)}
    done = subprocess.run(command, env=environment, stdout=sys.stderr)
    if not (out / "gpu.json").exists():
        sys.exit(f"rehearsal: tools/gpu.sh ended with {done.returncode} and left nothing")
    made: dict[str, Any] = json.loads((out / "gpu.json").read_text(encoding="utf-8"))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Rehearse a run on a GPU without one.")
    parser.add_argument("--torch", help="version, such as 2.11.0; default: as installed")
    parser.add_argument("--transformers", help="version, with --torch")
    parser.add_argument("--again", action="store_true", help="in the last one's environment")
    parser.add_argument("--log", type=Path, default=FOLDER / "rehearsal.txt")
    given = parser.parse_args()
    if (given.torch is None) != (given.transformers is None):
        parser.error("give both --torch and --transformers, or neither")
    python = FOLDER / "venv" / "bin" / "python"
    if not given.again:
        make_environment(python, given.torch, given.transformers)
    lines = list(check_symbols(python))
    made = rehearse(python)
    machine = made["machine"]
    lines.insert(0, f"torch {machine['torch']}, transformers {machine['transformers']}")
    loaded = machine["missing"]
    if loaded["cpu"] or (machine["cuda"] and loaded["cuda"]):
        sys.exit(f"rehearsal: our libraries do not load: {loaded}")
    lines += [f"libspeq_{name}.so: {reason or 'loads'}" for name, reason in loaded.items()]
    by_name = {step.name: step for step in steps(ROOT / "build" / "rehearsed-run")}
    for record in made["steps"]:
        lines.append(f"{record['step']}: {verdict(by_name[record['step']], record)}")
    if given.torch is not None:
        built = rehearse(python, "--build", "--steps", "none")
        if any(built["machine"].get("missing", {"": "not built"}).values()):
            sys.exit(f"rehearsal: what was built here does not load: {built}")
        lines.append(f"build: {built['steps'][0]['output']}, and what was built loads")
    given.log.parent.mkdir(parents=True, exist_ok=True)
    given.log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
