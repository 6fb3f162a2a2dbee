"""A system's process: what it tells, and every way in which it may not."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from speq.bench.rivals import process
from speq.bench.rivals.job import Job
from speq.bench.rivals.worker import timed
from speq.bench.runs.tpot import run
from speq.bench.settings import TpotSettings
from speq.generator import Generator

Folder = Callable[[str], Path]
JOB = Job("time", "lru-raw", "model", 1000, [[1]], 4)


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Steady:
    """A contestant that takes 3 s to begin, and 2 s a token."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock

    def stream(self, prompt_ids: list[int], max_new_tokens: int) -> Iterator[int]:
        self.clock.now_s += 3
        for at in range(max_new_tokens):
            yield prompt_ids[0] + at
            self.clock.now_s += 2

    def figures(self) -> dict[str, Any]:
        return {"hit_rate": 0.5}

    def choices(self, prompt_ids: list[int], continuation: list[int]) -> list[int]:
        return continuation

    def settled(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


def test_times_are_from_the_first_token_to_the_last() -> None:
    clock = FakeClock()
    told = timed(Steady(clock), [10], JOB, clock)
    assert told.token_ids == [10, 11, 12, 13]
    assert (told.ttft_s, told.tpot_s, told.cut) == (3, 2, False)
    assert told.figures == {"hit_rate": 0.5}


def test_a_slow_text_ends_early_and_says_so() -> None:
    clock = FakeClock()
    job = Job("time", "lru-raw", "model", 1000, [[1]], 50, text_s=7, least_tokens=3)
    told = timed(Steady(clock), [10], job, clock)
    assert told.token_ids == [10, 11, 12, 13, 14]  # 8 s after the first one
    assert (told.tpot_s, told.cut) == (2, True)
    job = Job("time", "lru-raw", "model", 1000, [[1]], 50, text_s=7, least_tokens=9)
    assert len(timed(Steady(clock), [10], job, clock).token_ids) == 9


@pytest.mark.parametrize(
    ("script", "limit_s", "failure"),
    [
        ("import sys; sys.exit('no such model')", 60, "ended with exit status 1: no such model"),
        ("import os; os.kill(os.getpid(), 11)", 60, "ended with exit status -11: it wrote nothing"),
        ("import sys; sys.stdin.read()", 0.2, "took longer than 0 s"),
        ('print(\'{"error": "too small"}\')', 60, "too small"),
    ],
)
def test_a_process_that_fails_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, script: str, limit_s: float, failure: str
) -> None:
    monkeypatch.setattr(process, "COMMAND", (sys.executable, "-c", script))
    assert process.heard(JOB, None, limit_s).failure == failure


def test_what_a_library_prints_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import speq.bench.rivals.worker as worker, speq.bench.rivals.systems as systems\n"
        "def noisy(name):\n"
        "    print('loading'); raise SystemExit(3)\n"
        "systems.system = noisy\n"
        "worker.main()"
    )
    monkeypatch.setattr(process, "COMMAND", (sys.executable, "-c", script))
    assert process.heard(JOB, None, 60).failure == "ended with exit status 3: loading"


def test_systems_of_ours_from_settings_to_rows(tiny_bfloat16: Folder) -> None:
    """Real processes, uncapped, on a small model: the tokens are those of a plain run."""
    folder = tiny_bfloat16("qwen3_moe")
    settings = TpotSettings(
        budgets=("8MiB",),
        systems=("lru-raw", "lru-raw no-such=1"),
        cap="none",
        num_prompts=1,
        max_new_tokens=4,
        rounds=1,
    )
    with pytest.raises(Exception, match="unknown option no_such"):
        run(str(folder), settings, None, force=False)
    settings = TpotSettings(
        budgets=("8MiB", "10KiB"),
        systems=("lru-raw",),
        cap="none",
        num_prompts=1,
        max_new_tokens=4,
        rounds=1,
    )
    report = run(str(folder), settings, None, force=False)
    fits, small = report.rows
    assert (fits["system"], fits["tokens"], fits["failure"]) == ("lru-raw", 4, "")
    assert fits["tpot_ms"] > 0
    assert fits["settled"]["codec"] == "raw"
    assert fits["cap_bytes"] is None
    assert "budget" in small["failure"]
    assert small["tpot_ms"] is None
    generator = Generator.from_pretrained(folder, "64MiB", dtype="float32", draft="none")
    from speq.measure.report import read_prompts

    (prompt,) = read_prompts(None, 1)
    made = generator.generate(prompt, max_new_tokens=24, ignore_eos=True)
    generator.close()
    assert report.compared_tokens == made.token_ids
