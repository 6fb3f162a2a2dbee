"""One generation at a time, and what listeners hear of it: with a script and a clock of its own."""

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from speq import SpeqError
from speq.dashboard.live.broadcast import Broadcast, Listener
from speq.dashboard.live.session import Busy, Nothing, Session
from speq.dashboard.panel import Panel
from speq.dashboard.run_record import Origin, RunRecord, TokenRecord
from tests.helpers.command import PATIENCE_S
from tests.helpers.live_run import STATS, Scripted, panel_of_tokens


def token(at: int) -> TokenRecord:
    origin: Origin = "accepted" if at % 3 else "exact"
    return TokenRecord(100 + at, f"word{at} ", at // 3, origin, 1.5 * at)


@dataclass
class Counted:
    """An observer that notes what it is told."""

    calls: list[Any] = field(default_factory=list)

    def begun(self) -> None:
        self.calls.append("begun")

    def prompted(self, prompt_tokens: int, cached_tokens: int, ttft_s: float) -> None:
        self.calls.append((prompt_tokens, cached_tokens, ttft_s))

    def ended(self, reason: str) -> None:
        self.calls.append(reason)


def session_of(
    recording: Any,
    panels_of: Callable[[RunRecord], list[Panel]] = panel_of_tokens,
    clock: Callable[[], float] = lambda: 0.0,
) -> tuple[Session, Counted]:
    observer = Counted()
    return Session(recording, panels_of, observer, clock), observer


def run(session: Session, prompt: str = "Once", **sampling: Any) -> None:
    session.start(prompt, sampling)
    session.wait()


def heard(session: Session, listener: Listener) -> list[tuple[str, Any]]:
    return [(each.kind, json.loads(each.data)) for each in session.broadcast.take(listener)]


def tokens_in(events: list[tuple[str, Any]]) -> list[int]:
    return [data["id"] for kind, data in events if kind == "token"]


def test_what_a_listener_hears() -> None:
    session, observer = session_of(Scripted([token(at) for at in range(4)]))
    woken = []
    with session.broadcast.listening(lambda: woken.append(1)) as listener:
        assert heard(session, listener) == []
        run(session, "Once", temperature=0.5)
        events = heard(session, listener)
        assert heard(session, listener) == []
    assert woken
    assert events[0] == ("begun", {"prompt": "Once", "sampling": {"temperature": 0.5}, "run": 1})
    assert events[1:5] == [("token", asdict(token(at))) for at in range(4)]
    said = dict(events[5:])
    assert [kind for kind, _ in events[5:]] == ["prompt", "panels", "finished"]
    assert said["prompt"] == {"what": "running the prompt", "done": 2, "total": 2}
    assert said["panels"]["panels"][0]["table"]["rows"] == [[4]]
    assert said["finished"] == {"finish_reason": "length", "stats": STATS | {"new_tokens": 4}}
    assert observer.calls == ["begun", (3, 2, 0.25), "length"]


def test_who_comes_late_hears_all() -> None:
    recording = Scripted([token(at) for at in range(5)])
    session, _ = session_of(recording)
    early: list[list[tuple[str, Any]]] = []

    def look(at: int) -> None:
        if at == 3:
            with session.broadcast.listening(lambda: None) as listener:
                early.append(heard(session, listener))

    recording.before = look
    run(session)
    with session.broadcast.listening(lambda: None) as listener:
        late = heard(session, listener)
    assert tokens_in(early[0]) == [100, 101, 102]
    assert early[0][0][0] == "begun" and "finished" not in dict(early[0])
    assert tokens_in(late) == [100, 101, 102, 103, 104]
    assert late[-1][0] == "finished"


def test_a_slow_listener_loses_pictures_and_no_tokens() -> None:
    now = [0.0]
    recording = Scripted([token(at) for at in range(6)])
    session, _ = session_of(recording, clock=lambda: now[0])
    drawn: dict[str, list[int]] = {"quick": [], "slow": []}
    ids: dict[str, list[int]] = {"quick": [], "slow": []}

    def take(name: str, listener: Listener) -> None:
        events = heard(session, listener)
        ids[name] += tokens_in(events)
        drawn[name] += [
            data["panels"][0]["table"]["rows"][0][0] for kind, data in events if kind == "panels"
        ]

    with (
        session.broadcast.listening(lambda: None) as quick,
        session.broadcast.listening(lambda: None) as slow,
    ):

        def before(at: int) -> None:
            take("quick", quick)
            now[0] += 2.0

        recording.before = before
        run(session)
        take("quick", quick)
        take("slow", slow)
    assert ids["quick"] == ids["slow"] == [token(at).id for at in range(6)]
    # Those behind each token, as two seconds lie between them, and those of the end.
    assert drawn == {"quick": [1, 2, 3, 4, 5, 6, 6], "slow": [6]}


@pytest.mark.parametrize(
    ("cost_s", "drawn"),
    [
        # Tokens come at 0.25, 0.5, ...: with the first one, then a second or more after the last
        # pictures, and at the end.
        (0.0, [1, 5, 9, 12]),
        # 0.25 s of making them are a tenth of 2.5 s: 2.25 s then go by.
        (0.25, [1, 10, 12]),
    ],
)
def test_pictures_take_a_tenth_of_the_time(cost_s: float, drawn: list[int]) -> None:
    now = [0.0]
    made: list[int] = []

    def before(at: int) -> None:
        now[0] += 0.25

    def panels_of(record: RunRecord) -> list[Panel]:
        now[0] += cost_s
        made.append(len(record.tokens))
        return panel_of_tokens(record)

    recording = Scripted([token(at) for at in range(12)], before=before)
    session, _ = session_of(recording, panels_of, lambda: now[0])
    with session.broadcast.listening(lambda: None):
        run(session)
    assert made == drawn
    made.clear()
    run(session)  # nobody looks before the end
    assert made == [12]


def test_one_at_a_time() -> None:
    recording = Scripted([token(at) for at in range(3)])
    session, observer = session_of(recording)
    refused = []

    def ask(at: int) -> None:
        assert session.running
        with pytest.raises(Busy, match="a generation runs already") as error:
            session.start("again", {})
        refused.append(error)

    recording.before = ask
    run(session)
    assert len(refused) == 4
    assert not session.running
    recording.before = lambda at: None
    assert session.start("again", {}) == 2
    session.wait()
    assert observer.calls == ["begun", (3, 2, 0.25), "length"] * 2


@pytest.mark.parametrize("at", [0, 2])
def test_stop_ends_after_the_token_that_comes(at: int) -> None:
    recording = Scripted([token(each) for each in range(9)])
    session, observer = session_of(recording)
    assert session.stop() is False

    def stop(now: int) -> None:
        assert now <= at, "the stream goes on"
        if now == at:
            assert session.stop() is True

    recording.before = stop
    with session.broadcast.listening(lambda: None) as listener:
        run(session)
        events = heard(session, listener)
    assert tokens_in(events) == [100 + each for each in range(at + 1)]
    assert events[-1] == (
        "finished",
        {"finish_reason": "stopped", "stats": STATS | {"new_tokens": at + 1}},
    )
    assert recording.closed == 1
    assert observer.calls == ["begun", (3, 2, 0.25), "stopped"]
    # What was stopped before does not stop what is asked for next.
    recording.before = lambda now: None
    run(session)
    assert observer.calls[-1] == "length"


def test_stop_ends_a_prompt() -> None:
    recording = Scripted([token(0)])
    session, observer = session_of(recording)

    def stop(done: int) -> None:
        if done == 2:
            session.stop()

    recording.before_prompt = stop
    with session.broadcast.listening(lambda: None) as listener:
        run(session)
        events = heard(session, listener)
    assert [kind for kind, _ in events] == ["begun", "prompt", "finished"]
    assert events[1][1]["done"] == 1
    assert events[2][1] == {"finish_reason": "stopped", "stats": None}
    assert recording.closed == 1
    assert observer.calls == ["begun", "stopped"]


def test_a_run_that_is_refused_is_told_of() -> None:
    recording = Scripted([token(0), token(1)])
    session, observer = session_of(recording)

    def refuse(at: int) -> None:
        if at == 1:
            raise SpeqError("the context is full; ask for less")

    recording.before = refuse
    with session.broadcast.listening(lambda: None) as listener:
        run(session)
        events = heard(session, listener)
    assert events[-1] == ("failed", {"error": "the context is full; ask for less"})
    assert tokens_in(events) == [100]
    assert observer.calls == ["begun", (3, 2, 0.25), "failed"]
    assert not session.running


def test_a_fault_of_ours_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def panels_of(record: RunRecord) -> list[Panel]:
        raise KeyError("no such figure")

    session, observer = session_of(Scripted([token(0)]), panels_of)
    with session.broadcast.listening(lambda: None) as listener:
        run(session)
        events = heard(session, listener)
    assert events[-1] == ("failed", {"error": "speq failed (KeyError); its log has more"})
    assert "no such figure" in caplog.text
    assert observer.calls == ["begun", (3, 2, 0.25), "failed"]
    assert not session.running


@pytest.mark.parametrize(
    ("prompt", "sampling", "sentence"),
    [
        (None, {}, "prompt is None; it must be a text"),
        (["a"], {}, "it must be a text"),
        ("", {}, "prompt is empty; give a text to go on from"),
        ("a\ud800", {}, r"half a character at 1"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ("a", {"temperature": float("nan")}, "temperature is nan"),
        ("a", {"seed": "one"}, "seed is 'one'"),
        ("a", {"tokens": 5}, "unknown option tokens"),
        ("a", {"on_finish": 5}, "unknown option on_finish"),
    ],
)
def test_what_no_run_would_take_is_refused_at_once(
    prompt: Any, sampling: dict[str, Any], sentence: str
) -> None:
    recording = Scripted([token(0)])
    session, observer = session_of(recording)
    with pytest.raises(SpeqError, match=sentence):
        session.start(prompt, sampling)
    assert not session.running
    assert not recording.begun
    assert observer.calls == []


def test_there_is_no_record_before_the_first_run() -> None:
    session, _ = session_of(Scripted([token(0)]))
    with pytest.raises(Nothing, match="nothing was generated yet"):
        session.record()
    run(session)
    assert [each.id for each in session.record().tokens] == [100]


def test_closing_stops_what_runs_and_sends_listeners_home() -> None:
    recording = Scripted([token(at) for at in range(9)])
    session, observer = session_of(recording)
    reached = threading.Event()

    def wait(at: int) -> None:
        if at == 1:
            reached.set()
            assert session._stop.wait(PATIENCE_S)

    recording.before = wait
    with session.broadcast.listening(lambda: None) as listener:
        session.start("Once", {})
        assert reached.wait(PATIENCE_S)
        session.close()
        assert listener.closed
        assert tokens_in(heard(session, listener)) == [100, 101]
    assert observer.calls == ["begun", (3, 2, 0.25), "stopped"]
    assert not session.running
    with pytest.raises(SpeqError, match="the session was closed"):
        session.start("again", {})
    with session.broadcast.listening(lambda: None) as later:
        assert later.closed


def test_who_left_is_not_called() -> None:
    broadcast = Broadcast()
    calls = []
    with broadcast.listening(lambda: calls.append("heard")):
        broadcast.begin({})
        assert broadcast.heard
    broadcast.token({})
    assert calls == ["heard"]
    assert not broadcast.heard


def test_a_new_run_replaces_the_one_before() -> None:
    broadcast = Broadcast()
    with broadcast.listening(lambda: None) as listener:
        broadcast.begin({"prompt": "one"})
        broadcast.token({"id": 1})
        assert [each.kind for each in broadcast.take(listener)] == ["begun", "token"]
        broadcast.token({"id": 2})
        broadcast.end("finished", {})
        broadcast.begin({"prompt": "two"})
        broadcast.token({"id": 3})
        news = [(each.kind, json.loads(each.data)) for each in broadcast.take(listener)]
    assert news == [("begun", {"prompt": "two", "run": 2}), ("token", {"id": 3})]
