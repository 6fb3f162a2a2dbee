"""Prompts of five kinds: what they are, how they are asked for, and that they are installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from speq.bench.kinds import KINDS, PROMPTS, prompts_by_kind, prompts_of_kind
from speq.errors import SpeqError
from tests.helpers.paths import ROOT


def rows_of(kind: str) -> list[dict[str, str]]:
    lines = (PROMPTS / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_prompts_of_varied_length(kind: str) -> None:
    rows = rows_of(kind)
    assert [row["id"] for row in rows] == [f"{kind}-{at:02d}" for at in range(1, 13)]
    assert {row["kind"] for row in rows} == {kind}
    assert all(set(row) == {"id", "kind", "prompt"} for row in rows)
    words = [len(row["prompt"].split()) for row in rows]
    assert [at for at, count in enumerate(words) if count >= 280] == [6, 11]
    assert all(19 <= count <= 90 or 280 <= count <= 300 for count in words)


def test_no_prompt_is_there_twice() -> None:
    own = [row["prompt"] for kind in KINDS for row in rows_of(kind)]
    mixed = (ROOT / "speq" / "measure" / "prompts" / "mixed.jsonl").read_text().splitlines()
    assert len({*own, *(json.loads(line)["prompt"] for line in mixed)}) == 60 + 24
    assert {path.stem for path in PROMPTS.glob("*.jsonl")} == set(KINDS)


def test_kinds_are_named_and_files_are_given_by_path(tmp_path: Path) -> None:
    file = tmp_path / "letters.jsonl"
    file.write_text('{"prompt": "Dear"}\n{"prompt": "Yours"}\n')
    found = prompts_by_kind(["code", Path("maths"), file], 2)
    assert list(found) == ["code", "maths", "letters"]
    assert found["letters"] == ["Dear", "Yours"]
    assert found["code"] == [rows_of("code")[at]["prompt"] for at in (0, 6)]
    assert found["maths"] == prompts_of_kind("maths", 2)
    assert len(prompts_of_kind("prose", 12)) == 12


def test_what_is_no_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpeqError, match="'poetry' are neither a kind nor a file; give one of code"):
        prompts_of_kind("poetry", 1)
    with pytest.raises(SpeqError, match=r"num_prompts is 13 and .*code\.jsonl holds 12"):
        prompts_of_kind("code", 13)
    with pytest.raises(SpeqError, match="two kinds of prompts are called 'code'; give each once"):
        prompts_by_kind(["code", PROMPTS / "code.jsonl"], 1)


def test_they_are_installed(tmp_path: Path) -> None:
    """With the page that tells what they are."""
    build = ["egg_info", "--egg-base", tmp_path, "build_py", "--build-lib", tmp_path / "lib"]
    subprocess.run(
        [sys.executable, "setup.py", "-q", *map(str, build)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    installed = {path.name for path in (tmp_path / "lib/speq/bench/prompts").iterdir()}
    assert installed == {"README.md", *(f"{kind}.jsonl" for kind in KINDS)}
    assert (tmp_path / "lib/speq/measure/prompts/mixed.jsonl").exists()
