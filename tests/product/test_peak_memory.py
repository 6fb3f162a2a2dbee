"""The budget is kept: the peak of a whole run, loading included, measured from outside."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from speq.host_memory import PROCESS_BYTES
from speq.units import parse_bytes
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import write_model


@dataclass(frozen=True, slots=True)
class Peak:
    resident_bytes: int
    slots_bytes: int
    draft_bytes: int


def peak_of(
    model: Path, budget: str, draft_length: int, dtype: str = "auto", prompts: str = "300"
) -> Peak:
    options = [str(model), budget, str(draft_length), dtype, prompts]
    command = [sys.executable, "-m", "tests.helpers.peak_run", *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return Peak(*map(int, run.stdout.split()))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1.2 GB of experts in bfloat16, 9 MB of everything else."""
    return write_model(
        tmp_path_factory.mktemp("large") / "model",
        "qwen3_moe",
        dtype=torch.bfloat16,
        hidden_size=512,
        num_experts=96,
        moe_intermediate_size=1024,
        num_hidden_layers=4,
        num_experts_per_tok=4,
        max_shard_size="400MB",
    )


@pytest.mark.wide
@pytest.mark.parametrize(("budget", "draft_length"), [("256MiB", 0), ("512MiB", 3)])
def test_peak_stays_within_budget(large: Path, budget: str, draft_length: int) -> None:
    peak = peak_of(large, budget, draft_length)
    assert (peak.draft_bytes > 0) == (draft_length > 0)
    experts = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    allowed = parse_bytes(budget) + PROCESS_BYTES
    # Had the experts been loaded, or quietly mapped, the bound would be broken.
    assert experts > 3 * peak.slots_bytes
    assert experts > allowed
    assert peak.resident_bytes <= allowed


@pytest.mark.wide
def test_peak_of_loading_in_another_dtype(tmp_path: Path) -> None:
    """Both copies of the weights outside the experts count while they exist."""
    model = write_model(
        tmp_path / "model",
        "qwen3_moe",
        dtype=torch.bfloat16,
        hidden_size=512,
        vocab_size=100_000,
    )
    with pytest.raises(AssertionError, match="and loading weights that are converted or encoded"):
        peak_of(model, "500MiB", 0, "float32")
    peak = peak_of(model, "620MiB", 0, "float32")
    assert peak.resident_bytes <= (620 << 20) + PROCESS_BYTES


@pytest.mark.wide
def test_peak_of_a_context_that_grows(large: Path) -> None:
    """Slots and KV cache are given back before they are laid out anew, draft or not."""
    peak = peak_of(large, "512MiB", 3, "auto", "40,200,420")
    assert peak.slots_bytes > PROCESS_BYTES / 4
    assert peak.resident_bytes <= (512 << 20) + PROCESS_BYTES


@pytest.mark.wide
def test_what_a_process_takes_without_a_model(tmp_path: Path) -> None:
    """The constant beside the budget is what Python and torch take, not slack for a model."""
    model = write_model(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16)
    peak = peak_of(model, "16MiB", 0)
    assert 0.6 * PROCESS_BYTES < peak.resident_bytes <= PROCESS_BYTES + 16 * 2**20
