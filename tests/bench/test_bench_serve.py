"""`speq bench serve`: arrivals, sums by hand, and a small load on a server of this process."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from speq import SpeqError
from speq.bench.runs import serve
from speq.bench.runs.http_client import AnswerTimes, Target
from speq.bench.runs.serve import arrivals_at, load, percentile, summed_up
from speq.bench.settings import ServeBenchSettings
from speq.server.access import Keys
from tests.helpers.api_server import NAME, Rig, api_server
from tests.helpers.command import PATIENCE_S, Command
from tests.helpers.scripted_engine import ScriptedEngine, ScriptedModel, pieces

TEXTS = ("a", "b", "c", "d")


@pytest.fixture
def rig() -> Iterator[Rig]:
    with api_server(ScriptedEngine(pieces(*TEXTS)), ScriptedModel(max_context=4000)) as made:
        yield made


def test_arrivals_are_those_of_a_poisson_process() -> None:
    times = arrivals_at(4.0, 4000, seed=1)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.05)
    # Of an exponential distribution the standard deviation is the mean.
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance**0.5 == pytest.approx(0.25, rel=0.08)
    assert arrivals_at(4.0, 10, seed=1) == times[:10] != arrivals_at(4.0, 10, seed=2)


HEARD = [
    AnswerTimes(200, 10.0, 10.5, 12.5, 5, 100.0),
    AnswerTimes(200, 11.0, 12.0, 20.0, 5, 300.0),
    AnswerTimes(429, 11.5),
    AnswerTimes(0, 12.0, 13.0),
    AnswerTimes(500, 12.0),
    AnswerTimes(200, 13.0, None, 14.0, 0),
]


@pytest.mark.parametrize(
    ("values", "share", "wanted"),
    [
        ([], 50, None),
        ([7.0], 99, 7.0),
        ([3.0, 1.0, 2.0, 4.0], 50, 2.0),
        ([float(value) for value in range(1, 101)], 95, 95.0),
        ([float(value) for value in range(1, 101)], 99, 99.0),
    ],
)
def test_percentiles(values: list[float], share: int, wanted: float | None) -> None:
    assert percentile(values, share) == wanted


def test_sums() -> None:
    row = summed_up(0.5, HEARD)
    assert (row["requests"], row["whole"], row["refused"], row["failed"]) == (6, 2, 1, 3)
    assert row["statuses"] == {"0": 1, "200": 3, "429": 1, "500": 1}
    assert (row["took_s"], row["tokens"], row["tokens_per_s"]) == (10.0, 10, 1.0)
    assert (row["ttft_p50_ms"], row["ttft_p99_ms"]) == (500.0, 1000.0)
    assert (row["tpot_p50_ms"], row["tpot_p95_ms"]) == (500.0, 2000.0)
    assert (row["latency_p50_ms"], row["latency_p99_ms"]) == (2500.0, 9000.0)
    assert row["queued_p99_ms"] == 300.0
    nothing = summed_up(1.0, [AnswerTimes(0, 1.0)])
    assert nothing["tokens_per_s"] is nothing["ttft_p50_ms"] is None


def test_requests_are_sent_at_their_times() -> None:
    """By a clock that only sleeping moves; no answer is waited for before the next."""
    now = [100.0]
    sent: list[tuple[float, str]] = []
    all_sent = threading.Event()

    def sleep(time_s: float) -> None:
        now[0] += time_s

    def one(prompt: str) -> AnswerTimes:
        sent.append((now[0], prompt))
        if len(sent) == 3:
            all_sent.set()
        assert all_sent.wait(PATIENCE_S)
        return AnswerTimes(200, 0.0)

    heard = load(one, ["a", "b"], [1.0, 2.5, 4.0, 9.0], 5.0, None, lambda: now[0], sleep)
    # The fourth would have come after the time is over.
    assert len(heard) == 3
    assert sorted(prompt for _, prompt in sent) == ["a", "a", "b"]
    assert now[0] == pytest.approx(109.0)


def test_a_small_load(rig: Rig) -> None:
    settings = ServeBenchSettings(rates=(2000.0, 500.0), num_requests=5, max_new_tokens=3)
    report = serve.run(rig.url, settings)
    assert (report.bench, report.model) == ("serve", NAME)
    for row, rate in zip(report.rows, (2000.0, 500.0), strict=True):
        assert (row["rate"], row["requests"], row["whole"], row["tokens"]) == (rate, 5, 5, 15)
        assert row["refused"] == row["failed"] == 0
        assert 0 < row["ttft_p50_ms"] <= row["latency_p50_ms"]
        assert row["queued_p50_ms"] >= 0
    assert b"vllm:num_requests_running" in rig.get("/metrics").body


def test_refusals_are_counted() -> None:
    go = threading.Event()
    engine = ScriptedEngine(pieces(*TEXTS), before=lambda at: hold(go))
    with api_server(engine, ScriptedModel(max_context=4000), max_waiting=0) as rig:
        target = Target.of(rig.url, None, PATIENCE_S)
        heard: list[AnswerTimes] = []

        def one(prompt: str) -> AnswerTimes:
            found = serve.ask(target, NAME, prompt, 4, float)
            if found.status == 429:
                go.set()
            return found

        heard = load(one, ["a"], [0.0, 0.0], 60.0, None, float, lambda time_s: None)
    assert sorted(each.status for each in heard) == [200, 429]
    assert [each.tokens for each in heard if each.whole] == [4]


def hold(go: threading.Event) -> None:
    assert go.wait(PATIENCE_S)


def test_keys_are_given(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_text("a-key-of-this-server\n")
    engine = ScriptedEngine(pieces(*TEXTS))
    with api_server(engine, ScriptedModel(max_context=4000), Keys.read(path)) as rig:
        few = {"num_requests": 1, "rates": (100.0,), "max_new_tokens": 2}
        with pytest.raises(SpeqError, match="answers with 401"):
            serve.run(rig.url, ServeBenchSettings(**few))  # type: ignore[arg-type]
        settings = ServeBenchSettings(api_key_file=path, **few)  # type: ignore[arg-type]
        report = serve.run(rig.url, settings)
        assert report.rows[0]["whole"] == 1
        assert "api_key_file" not in report.settings


def test_no_server(rig: Rig, command: Command) -> None:
    for url, sentence in (
        ("nonsense", "is no URL of a server"),
        ("ftp://127.0.0.1/v1", "is no URL of a server"),
        ("http://127.0.0.1:99999/v1", "is no URL of a server"),
        (rig.url.replace("/v1", ""), "answers with 404"),
    ):
        with pytest.raises(SpeqError, match=sentence):
            serve.run(url, ServeBenchSettings(num_requests=1))
    rig.stop()
    ended = command("bench", "serve", rig.url, "--num-requests", 1)
    assert (ended.code, "has no models to tell of" in ended.err) == (1, True)


def test_a_server_that_answers_nothing() -> None:
    """Its context has no room for any prompt."""
    settings = ServeBenchSettings(num_requests=2, rates=(100.0,))
    with (
        api_server(ScriptedEngine(pieces("a")), ScriptedModel(max_context=1)) as rig,
        pytest.raises(SpeqError, match=r"answered none of the requests \(statuses 400;"),
    ):
        serve.run(rig.url, settings)
