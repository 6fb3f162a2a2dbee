"""Under `python -O`, which leaves out asserts: the same tokens, and the same sentences.

pytest's own asserts go as well, so that no test can run there. Runs do, in processes of their own.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speq.config import MAX_DRAFT_LENGTH, MAX_DRAFT_NODES
from tests.helpers.optimised import Job, outcome_of, under_python_o
from tests.helpers.packing import pack_to
from tests.helpers.tiny_models import FAMILIES, greedy_tokens, load_plain

Folder = Callable[[str], Path]

PROMPT = [7, 8, 9, 10, 11, 12] * 9
PLAIN = {"memory_budget": "64MiB", "packed_copy": "none", "profile": "none", "draft": "none"}
LONGEST = PLAIN | {"draft_length": MAX_DRAFT_LENGTH, "drafter": "ngram"}
TWINS: list[dict[str, Any]] = [
    LONGEST | {"draft": "auto", "drafter": "int4"},
    LONGEST | {"draft": "auto", "drafter": "int4", "draft_nodes": MAX_DRAFT_NODES},
    LONGEST | {"drafter": "cached"},
]


def damaged(tiny: Folder, root: Path) -> list[Job]:
    """Models and requests that are refused, before a weight is read or in the midst of a text."""
    source = tiny("olmoe")
    short = shutil.copytree(source, root / "short")
    shard = short / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    odd = shutil.copytree(source, root / "odd")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"num_experts": 9}))
    pack_to(source, root / "rotten", codec="raw").close()
    experts = root / "rotten" / "experts.bin"
    content = bytearray(experts.read_bytes())
    for at in range(0, len(content), 1000):
        content[at] ^= 255
    experts.write_bytes(content)
    jobs = [Job(str(path), PLAIN, PROMPT, 4) for path in (short, odd)]
    jobs.append(Job(str(root / "rotten"), PLAIN | {"verify_reads": True}, PROMPT, 4))
    good = str(source)
    jobs += [Job(good, PLAIN, [1, -1], 4), Job(good, PLAIN, [9999], 4), Job(good, PLAIN, [], 4)]
    jobs.append(Job(good, PLAIN | {"context_length": 8}, PROMPT, 4))
    jobs.append(Job(good, PLAIN | {"memory_budget": "1KiB"}, PROMPT, 4))
    jobs.append(Job(good, PLAIN, PROMPT, 4, sampling={"seed": 1 << 63}))
    # A draft that no option allows, which states cannot go back over.
    jobs.append(Job(str(tiny("lfm2_moe")), LONGEST, PROMPT, 200, length=100))
    return jobs


def check(jobs: list[Job], expected: list[list[int]]) -> None:
    """Of jobs that give texts, and behind them of those that end in sentences."""
    here = [outcome_of(job) for job in jobs]
    assert here[: len(expected)] == expected
    for sentence in here[len(expected) :]:
        assert isinstance(sentence, str) and "\n" not in sentence
    assert under_python_o(jobs) == here


@pytest.mark.full
def test_the_longest_drafts_and_damaged_input(tiny: Folder, tmp_path: Path) -> None:
    families = ("qwen2_moe", "qwen3_next", "lfm2_moe")
    jobs = [Job(str(tiny(family)), LONGEST, PROMPT, 150) for family in families]
    expected = [greedy_tokens(load_plain(tiny(family)), PROMPT, 150) for family in families]
    check([*jobs, *damaged(tiny, tmp_path)], expected)


@pytest.mark.parametrize(
    "first",
    [pytest.param(at, marks=[pytest.mark.full] if at else [pytest.mark.wide]) for at in range(3)],
)
def test_each_family_and_drafter(first: int, tiny: Folder) -> None:
    jobs, expected = [], []
    for family in [*FAMILIES][first::3]:
        text = greedy_tokens(load_plain(tiny(family)), PROMPT, 150)
        jobs.append(Job(str(tiny(family)), LONGEST, PROMPT, 150))
        jobs += [Job(str(tiny(family)), options, PROMPT, 3, 150) for options in TWINS]
        expected += [text, *[text[:3]] * len(TWINS)]
    check(jobs, expected)
