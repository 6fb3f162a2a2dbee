"""Systems beside each other: their order, what is compared, and systems that fail."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from speq.bench.rivals.contest import COMPARED_TOKENS, Contest, ContestCell, Terms, first_difference
from speq.bench.rivals.job import RivalJob
from speq.bench.rivals.process import ProcessResult
from speq.bench.rivals.standings import notes_of, row_of, rows_of
from speq.bench.rivals.systems import SYSTEMS, entry
from speq.bench.rivals.tpot import arrange
from speq.bench.rivals.worker import TextRun
from speq.bench.settings import TpotSettings
from speq.errors import SpeqError
from tests.helpers.command import Command

Folder = Callable[[str], Path]
TERMS = Terms(
    model=Path("model"),
    stores={},
    scratch=Path("scratch"),
    prompts=[[1, 2], [3]],
    kinds=["code", "prose"],
    max_new_tokens=4,
    warm_up_tokens=1,
    text_s=20.0,
    reserve_bytes=100,
    capped=True,
    device="cpu",
    dtype="auto",
    threads=0,
    neighbours=0,
    limit_s=60.0,
)
DONE = {"load_s": 2.0, "peak_rss_bytes": 900, "device_peak_bytes": None, "cap_peak_bytes": 950}


def cell(label: str, budget_bytes: int = 1000) -> ContestCell:
    return ContestCell(entry(label, {}, 1 << 30), str(budget_bytes), budget_bytes)


def texts(*tpot_s: float, **figures: float) -> ProcessResult:
    return ProcessResult(
        {"codec": "raw"},
        [TextRun([5, 6], 0.5, each, False, dict(figures)) for each in tpot_s],
        DONE,
    )


class Played(Contest):
    """A contest whose processes are answers by system, and a list of who ran."""

    def __init__(self, answers: dict[str, Callable[[RivalJob], ProcessResult]]) -> None:
        super().__init__(TERMS)
        self.answers = answers
        self.ran: list[tuple[str, int, str]] = []

    def run(self, job: RivalJob, budget_bytes: int) -> ProcessResult:
        self.ran.append((job.system, budget_bytes, job.task))
        return self.answers[job.system](job)


def test_systems_rotate_and_one_that_failed_is_not_tried_again() -> None:
    contest = Played(
        {
            "lru-raw": lambda job: texts(0.1),
            "llama.cpp": lambda job: ProcessResult(failure="is not installed"),
            "speq-published": lambda job: texts(0.2),
        }
    )
    cells = [cell("lru-raw"), cell("llama.cpp"), cell("speq-published")]
    contest.measure(cells, 3, None)
    assert [name for name, _, _ in contest.ran] == [
        *("lru-raw", "llama.cpp", "speq-published"),
        *("speq-published", "lru-raw"),
        *("speq-published", "lru-raw"),
    ]
    assert cells[1].failure == "is not installed"


def test_a_system_whose_form_cannot_be_written_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def prepare(job: RivalJob, progress: None) -> None:
        made.append(job.system)
        raise SpeqError("llama.cpp is not installed")

    monkeypatch.setattr("speq.bench.rivals.llama_cpp.prepare", prepare)
    cells = [cell("llama.cpp", 1000), cell("lru-raw"), cell("llama.cpp", 2000)]
    contest = Played({"lru-raw": lambda job: texts(0.1)})
    contest.prepare(cells, None)
    contest.measure(cells, 2, None)
    assert made == ["llama.cpp"]
    assert [each.failure for each in cells] == [
        *("llama.cpp is not installed", "", "llama.cpp is not installed")
    ]
    assert [name for name, _, _ in contest.ran] == ["lru-raw", "lru-raw"]


def test_tokens_of_ours_are_compared_in_float32_under_the_largest_budget() -> None:
    jobs: list[RivalJob] = []

    def answer(job: RivalJob) -> ProcessResult:
        jobs.append(job)
        return ProcessResult(texts=[TextRun([7, 8, 9])], done=DONE)

    contest = Played({"lru-raw": answer, "moe-speq": answer})
    cells = [cell(name, size) for size in (1000, 2000) for name in ("lru-raw", "moe-speq")]
    assert contest.compare([*cells, cell("llama.cpp")], None) == [7, 8, 9]
    assert [name for name, _, _ in contest.ran] == ["lru-raw", "moe-speq"]
    for job in jobs:
        assert (job.task, job.dtype, job.memory_bytes) == ("tokens", "float32", 2500)
        assert (job.prompts, job.max_new_tokens) == ([[1, 2]], COMPARED_TOKENS)
        assert job.finish_copy


def test_different_tokens_end_the_contest() -> None:
    contest = Played(
        {
            "lru-raw": lambda job: ProcessResult(texts=[TextRun([7, 8])], done=DONE),
            "moe-speq": lambda job: ProcessResult(texts=[TextRun([7, 4])], done=DONE),
        }
    )
    message = "moe-speq and lru-raw compute different tokens in float32: token 1 is 4 and 8"
    with pytest.raises(SpeqError, match=message):
        contest.compare([cell("lru-raw"), cell("moe-speq")], None)
    assert first_difference([1, 2], [1, 2, 3]) == "2 tokens and 3"


def test_agreement_is_asked_of_other_programs_once() -> None:
    asked: list[RivalJob] = []

    def chosen(job: RivalJob) -> ProcessResult:
        asked.append(job)
        return ProcessResult(texts=[TextRun([7, 0, 9, 1])], done=DONE)

    contest = Played({"llama.cpp": chosen})
    cells = [cell("llama.cpp", 1000), cell("llama.cpp", 2000), cell("lru-raw", 2000)]
    contest.agree(cells, [7, 8, 9, 1], None)
    assert [each.agreement for each in cells] == [0.75, 0.75, None]
    (job,) = asked
    assert (job.task, job.memory_bytes, job.continuations) == ("choices", 2000, [[7, 8, 9, 1]])


def test_a_row_holds_medians_and_their_spread_over_rounds() -> None:
    one = cell("lru-raw")
    one.rounds = [texts(0.1, 0.2, hit_rate=0.5), texts(0.3, 0.4, hit_rate=0.7)]
    row = row_of(one, TERMS)
    assert row["by_kind"] == {"code": pytest.approx(200), "prose": pytest.approx(300)}
    assert row["tpot_ms"] == pytest.approx(250)
    assert row["tpot_p90_ms"] == pytest.approx(400)
    assert row["tpot_spread"] == pytest.approx((350 - 150) / 250)
    assert row["tokens_per_s"] == pytest.approx(4)
    assert row["hit_rate"] == pytest.approx(0.6)
    assert row["acceptance_rate"] is None
    assert (row["samples"], row["tokens"], row["cap_bytes"]) == (4, 2, 1100)
    assert (row["peak_bytes"], row["cap_peak_bytes"], row["load_s"]) == (950, 950, 2.0)


def test_rows_stand_beside_the_fastest_of_their_budget() -> None:
    cells = [cell("lru-raw"), cell("moe-speq"), cell("llama.cpp"), cell("lru-raw", 2000)]
    for each, time in zip(cells, (0.3, 0.2, None, 0.5), strict=True):
        each.rounds = [ProcessResult(failure="crashed") if time is None else texts(time, time)]
    rows = rows_of(cells, TERMS)
    assert [row["of_best"] for row in rows] == [pytest.approx(1.5), 1.0, None, 1.0]
    assert notes_of(rows) == ["1000, llama.cpp: crashed"]
    rows[0] |= {"cut": True, "tokens": 9}
    assert "1000, lru-raw: texts were ended after 9 tokens" in notes_of(rows)
    assert not any("the host gave" in note for note in notes_of(rows))
    rows[0]["stolen_share"] = 0.42
    assert any("the host gave up to 42%" in note for note in notes_of(rows))


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("ollama", "system 'ollama' is unknown; there are speq, "),
        ("", "system '' is unknown"),
        ("speq fast", "system 'speq fast' has 'fast'; give NAME=VALUE"),
        ("speq draft-length=99", "draft_length is 99"),
        ("speq no-option=1", "unknown option no_option"),
        ("llama.cpp threads=2", "has options; llama.cpp takes none"),
    ],
)
def test_what_is_no_system_is_refused(label: str, message: str) -> None:
    with pytest.raises(SpeqError, match=message):
        entry(label, {}, 1 << 30)


def test_every_system_of_ours_has_options_that_a_run_takes() -> None:
    for name, system in SYSTEMS.items():
        made = entry(name, {}, 1 << 30)
        assert made.system is system
        assert dict(made.options) == dict(system.options)
    own = entry("speq draft-length=2", {"reader_threads": 2}, 1 << 30)
    assert own.options == {"reader_threads": 2, "draft_length": "2"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"systems": ("speq",)}, "'speq' reads the model packed as lossless; give --lossless"),
        ({"systems": ("lru-raw", "lru-raw")}, "systems name one twice"),
        ({"systems": ("lru-raw",), "variants": ("codec=raw",)}, "variants and systems are given"),
        ({"systems": ("lru-raw",), "synthetic_acceptance": 0.5}, "systems run as they are"),
        ({"systems": ("lru-raw",), "neighbours": (0, 1)}, "neighbours are several numbers"),
    ],
)
def test_nonsense_settings_are_refused(
    tiny: Folder, change: dict[str, object], message: str
) -> None:
    settings = replace(TpotSettings(budgets=("8MiB",), cap="none"), **change)
    with pytest.raises(SpeqError, match=message):
        arrange(str(tiny("qwen3_moe")), settings)


def test_systems_are_listed(command: Command) -> None:
    """Of no model, which need not be there."""
    arguments = ("bench", "tpot", "nowhere", "--budgets", "1GiB", "--systems", "?")
    shown = command(*arguments)
    assert (shown.code, shown.err) == (0, "")
    names = [line.split()[1] for line in shown.out.splitlines() if line.startswith("│ ")]
    assert [name for name in names if name != "│"] == [*SYSTEMS]
    assert "by LRU, no draft" in shown.out
    alone = command("bench", "tpot", "--systems", "?")
    assert "by LRU, no draft" in alone.out
    assert "rtx-4090" in command("plan", "--preset", "?").out
    found = json.loads(command(*arguments, "--json", "-").out)
    assert [row["system"] for row in found["rows"]] == [*SYSTEMS]
