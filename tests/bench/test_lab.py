"""The benches of the lab: each has a command line, and runs as far as a small model goes."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bench.lab import gpu_link
from bench.lab.command import app_of
from speq.dashboard.report.report_page import page_of
from tests.helpers.lab import NAMES
from tests.helpers.paths import BUNDLED

ROOMY = ("--memory-budget", "60MiB", "--num-prompts", "1")
SHORT = ("--max-new-tokens", "8")
ONCE = ("--rounds", "1")
# What each takes beside the bundled model to be done soon.
BENCHES: dict[str, tuple[str, ...]] = {
    "ablation": ("--memory-budget", "26MiB", "--num-prompts", "1", *SHORT, *ONCE),
    "batch": (*ROOMY, *SHORT, *ONCE, "--batches", "1", "--draft-lengths", "2"),
    "budget": (*ROOMY, "--experts", "8", "--max-tokens", "24", *SHORT),
    "codec": (),
    "drafters": (
        "--budgets",
        "60MiB",
        "--num-prompts",
        "1",
        *SHORT,
        *ONCE,
        "--drafters",
        "none,int4",
    ),
    "fidelity": (*ROOMY, "--max-tokens", "32"),
    "gpu_link": (),
    "hit_rate": (*ROOMY, *SHORT),
    "split": (),
    "step": (*ROOMY, *SHORT),
}
# Of a machine that tests do not have.
WITHOUT_MODEL = ("gpu_link", "split")


def test_every_bench_of_the_lab_is_named_here() -> None:
    assert sorted(BENCHES) == NAMES


@pytest.mark.parametrize("name", BENCHES)
def test_the_command_line_has_the_settings(name: str) -> None:
    shown = CliRunner().invoke(app_of(name), ["--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert "--json" in shown.stdout and "--picture" in shown.stdout
    for option in BENCHES[name]:
        if option.startswith("--"):
            assert option in shown.stdout


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "codec" else pytest.mark.wide)
        for name in BENCHES
        if name not in WITHOUT_MODEL
    ],
)
def test_rows_and_pictures_of_a_small_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "found.json"
    given = [str(BUNDLED), *BENCHES[name], "--json", str(kept)]
    ended = CliRunner().invoke(app_of(name), given, catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    report = json.loads(kept.read_text())
    assert report["rows"] and report["pictures"]
    drawn = [panel.name for panel in page_of([kept]).panels if not panel.absent]
    assert drawn, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_the_link_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_link.READ_BYTES, "cuda", 1 << 26)
    monkeypatch.setattr(gpu_link, "PIN_BYTES", 1 << 24)
    settings = gpu_link.GpuLinkSettings(sizes=("1MiB", "4MiB"), volume="8MiB", rounds=3)
    rows = gpu_link.run(settings).rows
    assert len(rows) == 10
    assert all(row["time_us"] > 0 for row in rows)
