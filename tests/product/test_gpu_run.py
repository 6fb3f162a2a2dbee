"""`make gpu` without a GPU: its steps parse, none runs for ever, and what they found is kept."""

import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.command import parse
from tests.helpers.lab import lab_commands
from tests.helpers.paths import ROOT
from tools import gpu, rehearse
from tools.gpu import Run, run_command
from tools.gpu_steps import GPU_TESTS, SHARES, GpuStep, steps

# As decorator or in a list of them, as the backends that a fixture goes through, or that fixture.
MARKED = re.compile(
    r"^(@|    |pytestmark = )pytest\.mark\.gpu|CUDA_BACKENDS[,)\]]|\bdevice: torch\.device,",
    re.MULTILINE,
)
HELLO = GpuStep("hello", ("-c", "print('hello')"), 60)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path / "work", tmp_path, time.monotonic() + 100, rehearse=False)
    made.package.mkdir(parents=True)
    return made


def kept(run: Run) -> list[dict[str, object]]:
    made = json.loads((run.out / "gpu.json").read_text())
    return [{name: step[name] for name in ("step", "state", "output")} for step in made["steps"]]


def test_no_test_of_a_gpu_is_left_out() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("tests/*/test_*.py")
        if MARKED.search(path.read_text(encoding="utf-8"))
    }
    assert marked == set(GPU_TESTS)


def test_commands_parse(tmp_path: Path) -> None:
    ours = [step for step in steps(tmp_path) if step.command[:2] == ("-m", "speq")]
    assert len(ours) >= 5 + 4 * len(SHARES)
    for step in ours:
        parse((*step.command[2:], *step.rehearsed_by))
    lab = [step for step in steps(tmp_path) if step.command[1].startswith("bench.lab.")]
    assert len(lab) == 3
    for step in lab:
        name = step.command[1].removeprefix("bench.lab.")
        lab_commands()[name].make_context(name, [*step.command[2:]])


def test_budgets_are_shares_of_the_model_made(tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "model.safetensors").write_bytes(bytes(1000))
    budgets = [
        step.command[step.command.index("--budgets") + 1]
        for step in steps(tmp_path)
        if "--budgets" in step.command
    ]
    assert list(dict.fromkeys(budgets)) == ["500", "350", "750", "1000"]


def test_names_are_unique(tmp_path: Path) -> None:
    names = [step.name for step in steps(tmp_path)]
    assert len(names) == len(set(names))


def test_a_step_past_its_limit_is_ended_with_its_children(tmp_path: Path) -> None:
    """The child holds the pipe that output comes through."""
    for_ever = "import signal; signal.pause()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {for_ever!r}])"
    assert run_command([sys.executable, "-c", code], 0.5, tmp_path).code is None


def test_a_failure_is_kept_and_the_next_step_runs(run: Run) -> None:
    run.step(GpuStep("broken", ("-c", "raise SystemExit('it broke')"), 60))
    assert kept(run) == [{"step": "broken", "state": "failed", "output": "it broke\n"}]
    run.step(HELLO)
    assert kept(run)[1] == {"step": "hello", "state": "passed", "output": "hello\n"}


def test_what_a_step_reports_is_kept(run: Run) -> None:
    write = "import sys; open(sys.argv[2], 'w').write('{\"rows\": [1]}')"
    run.step(GpuStep("report", ("-c", write), 60, reports=True))
    run.step(HELLO)
    assert [record["result"] for record in run.records] == [{"rows": [1]}, None]


def test_a_step_that_cannot_run_says_why(run: Run) -> None:
    run.step(GpuStep("later", (), 0, skipped="nobody wrote it yet"))
    run.step(GpuStep("checked", ("-c", ""), 60, under=("no-such-program", "--it")))
    run.reserved_s = 97
    run.step(HELLO)
    assert [(step["state"], step["output"]) for step in kept(run)] == [
        ("skipped", "nobody wrote it yet"),
        ("skipped", "no-such-program is not on the PATH"),
        ("skipped", "no time was left; ask for it with --steps"),
    ]


def test_nothing_is_timed_on_the_reference(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not built, and cannot be: the run ends, and says so in its JSON too."""
    lost = {"cpu": None, "cuda": "lost"}
    answers = iter([{"torch_folder": "here"}, lost, lost])
    monkeypatch.setattr(Run, "ask", lambda self, program: next(answers))
    built: list[str] = []
    monkeypatch.setattr(Run, "build", lambda self, torch_folder: built.append(torch_folder))
    with pytest.raises(SystemExit, match=r"nothing is timed on reference kernels: .*lost"):
        run.load(build=False)
    assert built == ["here"]
    made = json.loads((run.out / "gpu.json").read_text())
    assert made["machine"]["missing"] == lost


@pytest.mark.parametrize("code", [1, None])
def test_a_build_that_fails_or_does_not_end_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    monkeypatch.setattr(gpu, "run_command", lambda *given: gpu.Ended(code, "no nvcc"))
    run.machine["capability"] = "9.0"
    with pytest.raises(SystemExit, match="cannot be built: no nvcc"):
        run.build("here")
    assert kept(run) == [{"step": "build", "state": "failed", "output": "no nvcc"}]


def test_libraries_that_load_are_not_built(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"torch_folder": "here"}, {"cpu": None, "cuda": None}])
    monkeypatch.setattr(Run, "ask", lambda self, program: next(answers))
    monkeypatch.setattr(Run, "build", None)
    run.load(build=False)
    assert run.machine == {"missing": {"cpu": None, "cuda": None}}


def record(state: str, output: str) -> dict[str, str]:
    return {"step": "x", "state": state, "output": output}


@pytest.mark.parametrize(
    ("step", "came", "said"),
    [
        (HELLO, record("failed", "Torch not compiled with CUDA enabled"), "came to the device"),
        (HELLO, record("failed", "Found no NVIDIA driver on your system"), "came to the device"),
        (GpuStep("l", (), 0, skipped="not yet"), record("skipped", "not yet"), "skipped: not yet"),
        (HELLO, record("skipped", "no time was left, no NVIDIA driver"), None),
        (HELLO, record("failed", "ERROR collecting; no NVIDIA driver"), None),
        (HELLO, record("passed", "1 passed"), None),
        (HELLO, record("out of time", "no NVIDIA driver"), None),
        (HELLO, record("failed", "ModuleNotFoundError: scipy; no NVIDIA driver"), None),
        (HELLO, record("failed", "No such option: --budget"), None),
        (GpuStep("w", (), 1, host_only=True), record("passed", ""), "passed"),
        (GpuStep("w", (), 1, host_only=True), record("failed", "no NVIDIA driver"), None),
    ],
)
def test_a_rehearsal_sees_what_would_fail_on_a_gpu(
    step: GpuStep, came: dict[str, str], said: str | None
) -> None:
    if said is None:
        with pytest.raises(SystemExit, match="did not come to the device"):
            rehearse.verdict(step, came)
    else:
        assert rehearse.verdict(step, came).startswith(said)


def test_symbols_are_those_of_torch() -> None:
    library = ROOT / "speq" / "libspeq_cpu.so"
    if not library.exists():
        pytest.skip("the CPU library was not built")
    names = rehearse.named_symbols(library)
    assert "torch_parallel_for" in names
    assert all(name.startswith(("aoti_", "torch_")) for name in names)
