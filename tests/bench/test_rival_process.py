"""A system's process: what it tells, and every way in which it may not."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speq.bench.rivals import process
from speq.bench.rivals.job import RivalJob
from speq.bench.rivals.worker import perform, time_texts
from speq.bench.runs.tpot import run
from speq.bench.settings import TpotSettings
from speq.generator import Generator
from speq.measure.report import read_prompts
from tests.helpers.host_device import host_device

Folder = Callable[[str], Path]
JOB = RivalJob("time", "lru-raw", "model", 1000, [[1]], 4)


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Steady:
    """A contestant that takes 3 s to begin, and 2 s a token."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock

    def stream(self, prompt_token_ids: list[int], max_new_tokens: int) -> Iterator[int]:
        self.clock.now_s += 3
        for at in range(max_new_tokens):
            yield prompt_token_ids[0] + at
            self.clock.now_s += 2

    def figures(self) -> dict[str, Any]:
        return {"hit_rate": 0.5}

    def choices(self, prompt_token_ids: list[int], continuation: list[int]) -> list[int]:
        return continuation

    def settled(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


def test_times_are_from_the_first_token_to_the_last() -> None:
    clock = FakeClock()
    told = time_texts(Steady(clock), [10], JOB, clock)
    assert told.token_ids == [10, 11, 12, 13]
    assert (told.ttft_s, told.tpot_s, told.cut) == (3, 2, False)
    assert told.figures == {"hit_rate": 0.5}


def test_a_slow_text_ends_early_and_says_so() -> None:
    clock = FakeClock()
    job = RivalJob("time", "lru-raw", "model", 1000, [[1]], 50, text_s=7, least_tokens=3)
    told = time_texts(Steady(clock), [10], job, clock)
    assert told.token_ids == [10, 11, 12, 13, 14]  # 8 s after the first one
    assert (told.tpot_s, told.cut) == (2, True)
    job = RivalJob("time", "lru-raw", "model", 1000, [[1]], 50, text_s=7, least_tokens=9)
    assert len(time_texts(Steady(clock), [10], job, clock).token_ids) == 9


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
    assert process.run_process(JOB, None, limit_s).failure == failure


def test_what_a_library_prints_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import speq.bench.rivals.worker as worker, speq.bench.rivals.systems as systems\n"
        "def noisy(name):\n"
        "    print('loading'); raise SystemExit(3)\n"
        "systems.system = noisy\n"
        "worker.main()"
    )
    monkeypatch.setattr(process, "COMMAND", (sys.executable, "-c", script))
    assert process.run_process(JOB, None, 60).failure == "ended with exit status 3: loading"


def test_a_gpu_is_rehearsed_on_a_device_of_the_tests(
    tiny: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is held to the budget, and the peak is the device's."""
    shares: list[float] = []
    cuda = SimpleNamespace(
        is_available=lambda: True,
        get_device_properties=lambda index: SimpleNamespace(total_memory=64 << 20),
        set_per_process_memory_fraction=shares.append,
        max_memory_reserved=lambda: 12345,
    )
    prompts, options = [[1, 2, 3]], {"draft_length": 0, "host_budget": "8MiB", "codec": "raw"}
    job = RivalJob(
        *("time", "lru-raw", str(tiny("olmoe")), 8 << 20, prompts, 4),
        device="cuda",
        dtype="float32",
        options=options,
    )
    told: list[dict[str, Any]] = []
    with host_device():
        for name, value in vars(cuda).items():
            monkeypatch.setattr(f"torch.cuda.{name}", value)
        perform(job, told.append)
        monkeypatch.undo()
    plain = Generator.from_pretrained(tiny("olmoe"), "8MiB", dtype="float32", draft_length=0)
    expected = plain.generate(prompts[0], max_new_tokens=4, ignore_eos=True).token_ids
    plain.close()
    loaded, text, done = told
    assert loaded["loaded"]["codec"] == "raw"
    assert text["text"]["token_ids"] == expected
    assert done["done"]["device_peak_bytes"] == 12345
    assert shares == [0.125]


def test_no_gpu_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    told: list[dict[str, Any]] = []
    perform(RivalJob("time", "lru-raw", "model", 1000, [[1]], 4, device="cuda"), told.append)
    assert told == [{"error": "device is cuda and torch finds no CUDA device; give cpu"}]


@pytest.mark.wide
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
        run(str(folder), settings)
    settings = TpotSettings(
        budgets=("8MiB", "10KiB"),
        systems=("lru-raw",),
        cap="none",
        num_prompts=1,
        max_new_tokens=4,
        rounds=1,
    )
    report = run(str(folder), settings)
    fits, small = report.rows
    assert (fits["system"], fits["tokens"], fits["failure"]) == ("lru-raw", 4, "")
    assert fits["tpot_ms"] > 0
    assert fits["settled"]["codec"] == "raw"
    assert fits["cap_bytes"] is None
    assert "budget" in small["failure"]
    assert small["tpot_ms"] is None
    generator = Generator.from_pretrained(folder, "64MiB", dtype="float32", draft="none")
    (prompt,) = read_prompts(None, 1)
    made = generator.generate(prompt, max_new_tokens=24, ignore_eos=True)
    generator.close()
    assert report.compared_tokens == made.token_ids
