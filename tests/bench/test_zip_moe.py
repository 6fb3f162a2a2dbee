"""The system zipmoe: tokens of the plain store's, memory divided as was fastest, and refusals."""

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from speq.bench.rivals import zip_moe
from speq.bench.rivals.generator_contestant import GeneratorContestant
from speq.bench.rivals.job import RivalJob
from speq.bench.rivals.zip_store import ZipStore
from speq.errors import SpeqError
from speq.generator import Generator
from speq.models.opened import open_model
from speq.planning.memory import BudgetTooSmall

Folder = Callable[[str], Path]
PROMPTS = [[*b"once upon a time"], [*b"def f(x):"]]
TOKENS = 20


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zstandard")
    return tmp_path_factory.mktemp("scratch")


def job_of(model: Path, scratch: Path, dtype: str, slots: int) -> RivalJob:
    """A job under memory for so many slots, or somewhat more."""
    job = RivalJob(
        "tokens", "zipmoe", str(model), 1, PROMPTS, TOKENS, dtype=dtype, threads=2,
        scratch=str(scratch), options={"reader_threads": 2},
    )  # fmt: skip
    zip_moe.prepare(job)
    with pytest.raises(BudgetTooSmall) as refused:
        zip_moe.with_share(job, 0.0)
    with closing(open_model(model)) as opened:
        slot_bytes = opened.store.codec.slot_bytes
    return replace(job, memory_bytes=refused.value.needed_bytes + (slots - 2) * slot_bytes)


@pytest.fixture(scope="module")
def plain(bundled: Path) -> Callable[[str], list[list[int]]]:
    """Tokens behind each prompt with all experts in slots, by dtype."""

    @cache
    def tokens(dtype: str) -> list[list[int]]:
        options = {"dtype": dtype, "draft": "none", "codec": "raw", "profile": "none"}
        generator = Generator.from_pretrained(bundled, "256MiB", **options)  # type: ignore[arg-type]
        with closing(generator):
            return [
                generator.generate(prompt, max_new_tokens=TOKENS, ignore_eos=True).token_ids
                for prompt in PROMPTS
            ]

    return tokens


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("slots", "share"), [(48, 0.0), (160, 0.5)], ids=["no pool", "pool"])
def test_tokens_are_those_of_the_plain_store(
    bundled: Path,
    scratch: Path,
    plain: Callable[[str], list[list[int]]],
    dtype: str,
    slots: int,
    share: float,
) -> None:
    """What slots miss comes from the file; where there is a pool, mostly from there."""
    job = job_of(bundled, scratch, dtype, slots)
    with closing(zip_moe.with_share(job, share)) as made:
        store = made.generator.runtime.opened.store
        assert isinstance(store, ZipStore)
        plan = made.generator.runtime.plan
        assert plan.slots < 200 < store.num_layers * store.num_experts
        assert plan.budget + store.pool_bytes == job.memory_bytes
        assert store.pool_bytes <= share * job.memory_bytes
        assert (store.pool_bytes > 0) == (share > 0)
        assert [list(made.stream(prompt, TOKENS)) for prompt in PROMPTS] == plain(dtype)
        figures = made.figures()
        assert 0 < figures["hit_rate"] < 1
        records = store.file.records
        least = min(record.nbytes for record in records)
        assert figures["moved_bytes"] > 30 * least
        if share:
            assert figures["read_bytes"] < figures["moved_bytes"] / 2
        else:
            assert figures["read_bytes"] >= figures["moved_bytes"]
        settled = made.settled()
        assert settled["pool_bytes"] == store.pool_bytes
        assert settled["codec"] == "raw" and settled["dense"] == "raw"
        assert settled["draft_length"] == 0
        assert 10 < settled["bits_per_weight"] < 11.5


def test_memory_is_divided_as_was_fastest_once_for_each_budget(
    bundled: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = replace(job_of(bundled, scratch, "bfloat16", 100), task="time")
    times_ms = {0.0: 30.0, 1 / 3: 20.0, 2 / 3: 25.0}
    tried: list[float] = []
    shares: list[float] = []
    with_share = zip_moe.with_share

    def noted(job: RivalJob, share: float, *rest: Any) -> GeneratorContestant:
        shares.append(share)
        return with_share(job, share, *rest)

    def trial_ms(made: GeneratorContestant, prompt_token_ids: list[int]) -> float:
        assert prompt_token_ids == PROMPTS[-1]
        tried.append(shares[-1])
        return times_ms[shares[-1]]

    monkeypatch.setattr(zip_moe, "with_share", noted)
    monkeypatch.setattr(zip_moe, "trial_ms", trial_ms)
    for turn in range(2):
        with closing(zip_moe.load(job)) as made:
            assert shares[-1] == 1 / 3
            assert sorted(tried) == sorted(times_ms)
            settled = made.settled()
            assert settled["pool_trials_ms"] == {"0": 30.0, "1/3": 20.0, "2/3": 25.0}, turn
            assert settled["pool_bytes"] > 0
    times_ms[0.0] = 10.0
    with closing(zip_moe.load(replace(job, memory_bytes=job.memory_bytes + 1))) as made:
        assert len(tried) == 6
        assert made.settled()["pool_bytes"] == 0


def test_a_trial_is_timed_behind_the_prompt(bundled: Path, scratch: Path) -> None:
    job = job_of(bundled, scratch, "bfloat16", 40)
    with closing(zip_moe.with_share(job, 0.0)) as made:
        taken_ms = zip_moe.trial_ms(made, PROMPTS[0])
        assert taken_ms == made.figures()["tpot_ms"]
        assert made.figures()["new_tokens"] == zip_moe.TRIAL_TOKENS


def test_shares_that_leave_no_slots_are_not_tried(bundled: Path, scratch: Path) -> None:
    job = job_of(bundled, scratch, "bfloat16", 4)
    trials_ms = zip_moe.tried(job)
    assert trials_ms["2/3"] is None
    assert trials_ms["0"] is not None and trials_ms["0"] > 0
    assert zip_moe.fastest({"0": 3.0, "1/3": None, "2/3": 2.0}) == 2 / 3


def test_untimed_tasks_have_a_pool_where_there_is_room(bundled: Path, scratch: Path) -> None:
    for slots, wanted in ((4, False), (60, True)):
        with closing(zip_moe.load(job_of(bundled, scratch, "bfloat16", slots))) as made:
            assert (made.settled()["pool_bytes"] > 0) == wanted
            assert made.settled()["pool_trials_ms"] is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"device": "cuda"}, "zipmoe runs on the cpu and device is cuda; leave zipmoe out"),
        ({"options": {"codec": "lossless"}}, "codec is 'lossless' and the system zipmoe has 'raw'"),
        ({"options": {"speed": 3}}, "speed"),
        ({"options": {"draft_length": "2"}}, "draft_length is '2' and the system zipmoe has '0'"),
        ({"memory_bytes": 1 << 20}, "too small"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_what_is_not_this_system_is_refused(
    bundled: Path, scratch: Path, change: dict[str, Any], sentence: str
) -> None:
    job = replace(job_of(bundled, scratch, "bfloat16", 40), **change)
    with pytest.raises(SpeqError, match=sentence) as refused:
        zip_moe.load(job)
    assert "\n" not in str(refused.value)


def test_damaged_files_are_refused(bundled: Path, scratch: Path, tmp_path: Path) -> None:
    job = replace(job_of(bundled, tmp_path, "bfloat16", 40), task="time")
    (tmp_path / "zipmoe" / zip_moe.SPLITS_FILE).write_text("[]")
    with pytest.raises(SpeqError, match=r"splits.json holds a JSON list; it must hold an object"):
        zip_moe.load(job)
    (tmp_path / "zipmoe" / zip_moe.SPLITS_FILE).unlink()
    data = tmp_path / "zipmoe" / "zipmoe.bin"
    content = bytearray(data.read_bytes())
    content[::1000] = bytes(len(content[::1000]))
    data.write_bytes(content)
    refused = pytest.raises(SpeqError, match="is not what was written")
    with closing(zip_moe.with_share(job, 0.0)) as made, refused:
        list(made.stream(PROMPTS[0], 4))


def test_a_missing_package_is_named(
    tiny_bfloat16: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    model = str(tiny_bfloat16("qwen3_moe"))
    job = RivalJob("time", "zipmoe", model, 1 << 30, PROMPTS, 4, scratch=str(tmp_path))
    with pytest.raises(SpeqError, match=r"pip install zstandard"):
        zip_moe.load(job)
