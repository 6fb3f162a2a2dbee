"""A checkout whose kernels were never compiled: everything runs, slowly, and says so."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.helpers.paths import FOLDERS
from tests.helpers.tiny_models import greedy_tokens, load_plain

PROMPT = "The sea"


@pytest.fixture(scope="module")
def uncompiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the package, without its libraries."""
    root = tmp_path_factory.mktemp("uncompiled")
    leave_out = shutil.ignore_patterns("*.so", "__pycache__")
    for name, folder in FOLDERS.items():
        shutil.copytree(folder, root / name.replace(".", "/"), ignore=leave_out)
    return root


def run(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "speq", *arguments]
    return subprocess.run(command, cwd=where, capture_output=True, text=True, check=True)


@pytest.mark.wide
def test_output_is_exact_and_the_slowness_is_said(
    uncompiled: Path, tiny: Callable[[str], Path]
) -> None:
    model = tiny("qwen2_moe")
    done = run(
        uncompiled,
        *("generate", "--model", str(model), "--prompt", PROMPT, "--memory-budget", "64MiB"),
        *("--draft-length", "3", "--max-new-tokens", "40"),
        *("--dtype", "float32", "--ignore-eos", "--json", "-"),
    )
    result = json.loads(done.stdout)
    prompt = AutoTokenizer.from_pretrained(model)(PROMPT).input_ids
    assert result["token_ids"] == greedy_tokens(load_plain(model), prompt, 40)
    assert result["stats"]["draft_length_mean"] > 1
    assert "slow reference kernels in use for linear, linear_int4, moe_int4" in done.stderr
    assert f"{uncompiled / 'speq' / 'libspeq_cpu.so'} was not built" in done.stderr


@pytest.mark.wide
def test_doctor_says_what_to_do(uncompiled: Path) -> None:
    out = run(uncompiled, "doctor").stdout
    assert out.count("slower reference") >= 5
    assert "run `make setup`, which builds them" in out
