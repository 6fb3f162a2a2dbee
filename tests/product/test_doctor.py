"""`speq doctor`: what it says of the machine, with native kernels and without."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from speq.bench.shapes import known_models
from speq.bench.shapes.published import SHAPES
from speq.devices.device import Processor
from speq.kernels import library, reference
from speq.measure.settings import PlanSettings
from speq.options.declared import build
from tests.helpers.command import Command

# As an attribute of `speq.cli`, the name is the command's.
doctor = importlib.import_module("speq.cli.doctor")
READ_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "READ_BYTES", READ_BYTES)


def table_of(out: str) -> dict[str, tuple[str, str]]:
    """(runs on, why) by op, as printed."""
    lines = [line.strip("│").split("│") for line in out.splitlines() if line.startswith("│")]
    rows = [line for line in lines if len(line) == 3]  # those of models have five
    return {op.strip(): (runs_on.strip(), why.strip()) for op, runs_on, why in rows}


def line_of(out: str, title: str) -> str:
    (line,) = (line for line in out.splitlines() if line.startswith(f"{title}:"))
    return line.partition(":")[2].strip()


def take_away_native(monkeypatch: pytest.MonkeyPatch, device: str, reason: str) -> None:
    """As on a machine where the library of `device` is not there."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    monkeypatch.setitem(library.MISSING, device, reason)
    monkeypatch.setattr(
        torch._C,
        "_dispatch_has_kernel_for_dispatch_key",
        lambda op, key: key != device.upper() and has_kernel(op, key),
    )

    def call(op: str, *arguments: torch.Tensor) -> None:
        assert op == "read_sum"
        reference.read_sum_out(*arguments)

    monkeypatch.setattr(library, "call", call)


@pytest.mark.skipif(library.MISSING["cpu"] is not None, reason="no native CPU kernels")
def test_native_kernels(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(library.MISSING, "cuda", "this torch is built without CUDA")
    ended = command("doctor", "--device", "cpu")
    assert ended.code == 0, ended.err
    assert table_of(ended.out) == {}
    assert ended.out.splitlines()[-1].startswith("Everything is in place. ")
    assert line_of(ended.out, "disk speed").startswith("5.6 GB/s, of reads past the page cache")
    assert line_of(ended.out, "kernels") == (
        f"native for {len(library.OPS)} of {len(library.OPS)} ops; "
        f"{library.isa()} in use; this processor and build run "
        f"{', '.join(library.supported_isas())}"
    )
    assert line_of(ended.out, "CPU library") == "built, and loads"
    assert line_of(ended.out, "CUDA library") == "not in use: this torch is built without CUDA"
    speed = line_of(ended.out, "memory speed")
    assert speed.endswith(" GB/s: a plain read of 1 MiB on cpu, median of 5")
    assert float(speed.split()[0]) > 0
    assert f"{torch.get_num_threads()} threads" in line_of(ended.out, "torch")
    assert "reference" not in ended.out


def test_the_reference(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a library it says so, why, and what to do; and that is no failure."""
    reason = "/there/libspeq_cpu.so was not built"
    take_away_native(monkeypatch, "cpu", reason)
    ended = command("doctor", "--device", "cpu")
    assert ended.code == 0, ended.err
    assert table_of(ended.out) == {op: ("slower reference", reason) for op in library.OPS}
    assert line_of(ended.out, "CPU library") == f"not in use: {reason}"
    assert line_of(ended.out, "kernels") == (
        f"native for 0 of {len(library.OPS)} ops; torch's own, without our CPU library"
    )
    assert line_of(ended.out, "memory speed").endswith("median of 5, by the slower reference")
    last = ended.out.splitlines()[-1]
    assert last.startswith(f"{', '.join(library.OPS)} on cpu: the slower reference")
    assert last.endswith("install a C++ compiler and run `make setup`, which builds them.")


def test_an_op_that_a_library_lacks(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is to be built then."""
    backend_of = library.backend_of
    lacking = library.Backend("reference", "there is no native moe_int4 for cpu")
    monkeypatch.setitem(library.MISSING, "cpu", None)
    monkeypatch.setattr(library, "isa", lambda: "portable")
    monkeypatch.setattr(library, "supported_isas", lambda: ("portable",))
    monkeypatch.setattr(
        library,
        "backend_of",
        lambda op, device: lacking if op == "moe_int4" else backend_of(op, device),
    )
    ended = command("doctor", "--device", "cpu")
    assert ended.code == 0, ended.err
    assert table_of(ended.out) == {"moe_int4": ("slower reference", lacking.reason)}
    assert ended.out.splitlines()[-1] == (
        "moe_int4 on cpu: the slower reference, exact but no measure of speed."
    )


def test_the_cuda_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(library.MISSING, "cuda", None)
    monkeypatch.setattr(doctor, "READ_BYTES", READ_BYTES)
    report = doctor.examine(Processor(), clock=iter(range(100)).__next__)
    assert "CUDA library:  built, and loads" in doctor.findings(report)


def test_memory_speed_is_the_median_of_five(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of reads that take 4, 1, 8, 2 and 16 s."""
    marks = iter([0, 4, 10, 11, 20, 28, 30, 32, 40, 56])
    monkeypatch.setattr(doctor, "READ_BYTES", READ_BYTES)
    report = doctor.examine(Processor(), clock=marks.__next__)
    assert report.settings["read_gb_per_s"] == pytest.approx(READ_BYTES / 4 / 1e9)
    assert list(marks) == []


def test_free_memory_and_a_gpus_share_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("speq.machine", "speq.host_memory"):
        monkeypatch.setattr(f"{module}.available_bytes", lambda: 10 << 30)
    report = doctor.examine(Processor(), clock=iter(range(100)).__next__)
    assert report.settings["available_bytes"] == 10 << 30
    assert report.settings["default_host_bytes"] == 8 << 30
    assert (
        "free memory:   10 GiB; on a GPU experts take 8 GiB of it (80%), or what --host-budget says"
    ) in doctor.findings(report)


def test_little_memory_is_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speq.devices.device.available_bytes", lambda: 400_004)
    report = doctor.examine(Processor(), clock=iter(range(100)).__next__)
    assert report.settings["read_bytes"] == 100_000


def test_findings_are_written(command: Command, tmp_path: Path) -> None:
    target = tmp_path / "doctor.json"
    assert command("doctor", "--device", "cpu", "--json", target).code == 0
    report = json.loads(target.read_text())
    assert report["bench"] == "doctor"
    assert [row["op"] for row in report["rows"]] == list(library.OPS)
    assert set(report["rows"][0]) == {"op", "runs_on", "why"}
    assert report["settings"]["read_bytes"] == READ_BYTES
    assert report["settings"]["missing"] == library.MISSING
    assert report["machine"]["torch"] == torch.__version__
    again = command("doctor", "--device", "cpu", "--json", target)
    assert (again.code, again.out) == (1, "")
    assert again.err == f"error: {target} exists already; choose another name or add --force\n"
    assert command("doctor", "--device", "cpu", "--json", target, "--force").code == 0


def test_a_wrong_device(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = command("doctor", "--device", "tpu")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == "error: device is 'tpu'; it must be one of auto, cpu, cuda\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ended = command("doctor", "--device", "cuda")
    assert (ended.code, ended.out) == (1, "")
    assert "torch sees no CUDA device" in ended.err


def test_published_models_are_planned(command: Command, tmp_path: Path) -> None:
    target = tmp_path / "doctor.json"
    ended = command("doctor", "--device", "cpu", "--json", target)
    assert ended.code == 0, ended.err
    rows = json.loads(target.read_text())["settings"]["models"]
    found = {(row["model"], row["weights"]): row for row in rows}
    assert {name for name, _ in found} == set(SHAPES)
    words, codes = (found["Qwen3-30B-A3B", weights] for weights in ("bf16", "int4"))
    assert 3 < words["files_bytes"] / codes["files_bytes"] < 4
    assert 56 << 30 < words["files_bytes"] < 58 << 30
    line = next(
        each for each in ended.out.splitlines() if "│ gpt-oss-20b" in each.replace("  ", "")
    )
    assert "mxfp4" in line and "GiB" in line


def test_published_models_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(settings: type[PlanSettings], given: dict[str, object]) -> PlanSettings:
        return build(settings, given | {"memory_budget": "1GiB"})

    monkeypatch.setattr(known_models, "build", small)
    rows = known_models.known_models("cpu")
    assert {row["tokens_per_s"] for row in rows} == {None}
    assert {row["model"] for row in rows} == set(SHAPES)
