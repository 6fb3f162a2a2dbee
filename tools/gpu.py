"""Loads or builds our libraries, tests and measures on a machine with a GPU, without network.

    python -m tools.gpu --out FOLDER [--steps NAME,...] [--build] [--commit ID]

It rewrites one JSON after each step, so that an interrupted run leaves its results. It uses the
interpreter's torch and transformers. Libraries that were built before (speq/lib*.so) are used if
they load; otherwise they are built for this card. `--steps` chooses steps by the beginning of their
names.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.paths import FOLDERS, ROOT
from tools.gpu_steps import SANITIZER, SANITIZER_S, SHARES, GpuStep, steps

BUILD_S = 300
TAIL = 6000
# Installed from build/wheels/*.whl where they cannot be imported.
WHEELS = ROOT / "build" / "wheels"
NEEDED = ("pytest", "typer", "rich", "jinja2")
LIBRARIES = """
import json
from speq.kernels import library
print(json.dumps({device: library.MISSING[device] for device in ("cpu", "cuda")}))
"""
MACHINE = """
import json, torch, transformers
major, minor = torch.cuda.get_device_capability()
print(json.dumps({
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "transformers": transformers.__version__,
    "gpu": torch.cuda.get_device_name(),
    "capability": f"{major}.{minor}",
    "torch_folder": torch.__path__[0],
}))
"""


@dataclass(slots=True)
class Run:
    """A run of all steps.

    work        folder of the package, the tests and the files that steps write for each other
    deadline    by the monotonic clock
    reserved_s  time that other steps leave to the sanitizer's, which are last
    rehearse    True if the GPU is a pretence, so that steps end at their first call of it
    """

    work: Path
    out: Path
    deadline: float
    rehearse: bool
    reserved_s: float = 0.0
    machine: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def package(self) -> Path:
        return self.work / "package"

    def lay_out(self) -> None:
        """The package as it would be installed, and the tests; away from the sources, which would
        be imported first."""
        shutil.rmtree(self.work if self.rehearse else self.package, ignore_errors=True)
        leave_out = shutil.ignore_patterns("__pycache__")
        for name, folder in FOLDERS.items():
            shutil.copytree(folder, self.package / name.replace(".", "/"), ignore=leave_out)
        shutil.copytree(ROOT / "tests", self.package / "tests", ignore=leave_out)
        shutil.copy(ROOT / "pyproject.toml", self.package)
        (self.package / "models").symlink_to(ROOT / "models")
        lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if lacking:
            pip = ["-m", "pip", "install", "-q", "--no-index", "--find-links", str(WHEELS)]
            self.python([*pip, "--target", str(self.package), *lacking], 60)

    def python(self, arguments: list[str], limit_s: float, **more: Any) -> "Ended":
        return run_command([sys.executable, *arguments], limit_s, self.package, **more)

    def ask(self, program: str) -> dict[str, Any]:
        """Run a program and parse the JSON that it prints. Exits if there is none."""
        asked = self.python(["-c", program], 120)
        if asked.code != 0:
            sys.exit(f"tools/gpu.sh: {asked.output[-TAIL:]}")
        answer: dict[str, Any] = json.loads(asked.output.splitlines()[-1])
        return answer

    def load(self, build: bool) -> None:
        """Load both libraries, built anew if need be. Exits where a step would be timed on the
        reference."""
        self.machine |= self.ask(MACHINE)
        torch_folder = self.machine.pop("torch_folder")
        missing = {} if build else self.ask(LIBRARIES)
        if build or (any(missing.values()) and not self.rehearse):
            self.build(torch_folder)
            missing = self.ask(LIBRARIES)
        self.machine["missing"] = missing
        self.write()
        if any(missing.values()) and not self.rehearse:
            sys.exit(f"tools/gpu.sh: nothing is timed on reference kernels: {missing}")

    def build(self, torch_folder: str) -> None:
        """Compile for this card alone; cmake may lie next to the interpreter."""
        architecture = self.machine["capability"].replace(".", "") + "-real"
        target = self.work / "build"
        configure = [
            *("cmake", f"-S{ROOT}", f"-B{target}", "-DCMAKE_BUILD_TYPE=Release"),
            f"-DTORCH_PREFIX={torch_folder}",
            f"-DSPEQ_CUDA_ARCHITECTURES={architecture}",
        ]
        compiled = ["cmake", "--build", str(target), f"-j{os.cpu_count()}"]
        path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        start = time.monotonic()
        for command in (configure, compiled):
            made = run_command(command, BUILD_S, ROOT, path)
            if made.code != 0:
                self.note("build", "failed", time.monotonic() - start, made.output)
                sys.exit(f"tools/gpu.sh: the libraries cannot be built: {made.output[-TAIL:]}")
        for library in target.glob("libspeq_*.so"):
            shutil.copy(library, self.package / "speq")
        self.note("build", "passed", time.monotonic() - start, f"for {architecture}")

    def step(self, step: GpuStep) -> None:
        """Run a step and keep what came of it, whatever that is."""
        missing = None if not step.under or shutil.which(step.under[0]) else step.under[0]
        left_s = self.deadline - time.monotonic()
        if not step.under:
            left_s -= self.reserved_s
        reason = step.skipped
        if missing and not self.rehearse:
            reason = f"{missing} is not on the PATH"
        if left_s < 5:
            reason = "no time was left; ask for it with --steps"
        if reason is not None:
            self.note(step.name, "skipped", 0.0, reason)
            return
        result = self.work / "result.json"
        result.unlink(missing_ok=True)
        arguments = [*step.command, *(["--json", str(result)] if step.reports else [])]
        under = [] if self.rehearse else list(step.under)
        if self.rehearse:
            arguments += step.rehearsed_by
        start = time.monotonic()
        came = run_command(
            [*under, sys.executable, *arguments],
            min(step.limit_s, left_s),
            self.package,
            dict(step.environment),
        )
        self.note(
            step.name,
            "out of time" if came.code is None else "failed" if came.code else "passed",
            time.monotonic() - start,
            came.output,
            json.loads(result.read_text()) if result.exists() else None,
        )

    def note(self, name: str, state: str, seconds: float, output: str, result: Any = None) -> None:
        print(f"{state:12} {seconds:6.1f} s  {name}", flush=True)
        record = {"step": name, "state": state, "seconds": round(seconds, 2)}
        tail = output if self.rehearse else output[-TAIL:]
        self.records.append(record | {"output": tail, "result": result})
        self.write()

    def write(self) -> None:
        """Write the results so far, whole or not at all."""
        partial = self.out / "gpu.json.partial"
        made = {"machine": self.machine, "steps": self.records}
        partial.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        partial.rename(self.out / "gpu.json")


@dataclass(frozen=True, slots=True)
class Ended:
    """Output and exit status of a process; None if it ran past its limit."""

    code: int | None
    output: str


def run_command(
    command: list[str], limit_s: float, where: Path, environment: dict[str, str] | None = None
) -> Ended:
    """Run a command; end it and its children if it runs past its limit."""
    process = subprocess.Popen(
        command,
        cwd=where,
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        return Ended(process.returncode, output)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return Ended(None, process.communicate()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description="Test and measure on a GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu.json")
    parser.add_argument("--steps", default="", help="only those, by how their names begin")
    parser.add_argument("--total-s", type=int, default=460, help="for all steps")
    parser.add_argument("--commit", help="for gpu.json, where no .git came along")
    parser.add_argument("--build", action="store_true", help="build, whatever is there")
    parser.add_argument("--rehearse", action="store_true", help="the GPU is a pretence")
    given = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        sys.exit(f"tools/gpu.sh: {sys.executable} has no torch; set PYTHON to one that has")
    import torch

    if not torch.cuda.is_available():
        sys.exit("tools/gpu.sh: torch sees no CUDA device; run it on a machine with a GPU")
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + given.total_s
    work = ROOT / "build" / ("rehearsed-run" if given.rehearse else "gpu-run")
    reserved_s = 2 * SANITIZER_S if shutil.which(SANITIZER) and not given.steps else 0
    run = Run(work, out, deadline, given.rehearse, reserved_s)
    run.machine["commit"] = given.commit
    run.lay_out()
    run.load(given.build)
    names = tuple(given.steps.split(","))
    for step in steps(run.work, SHARES[:1] if given.rehearse else SHARES):
        if step.name.startswith(names):
            run.step(step)
    sys.exit(any(record["state"] in ("failed", "out of time") for record in run.records))


if __name__ == "__main__":
    main()
