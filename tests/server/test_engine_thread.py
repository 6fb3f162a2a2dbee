"""The worker over one generator: turns, ends, cancellations, faults; by an engine that is a script.

No test waits for time to pass: the engine's thread says where it is.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from speq import SpeqError
from speq.config import SamplingParams
from speq.engine import engine_thread
from speq.engine.engine_thread import EngineThread, Observer
from speq.engine.request import Request, Token
from speq.engine.token_stream import End, EngineFailed, QueueFull, TokenStream, Unavailable
from speq.errors import EngineLost
from speq.server.answer import tokens_of
from speq.stats import Origin
from tests.helpers.command import PATIENCE_S
from tests.helpers.scripted_engine import ScriptedEngine, pieces

TEXTS = ("a", "b", "c", "d")


class Counted(Observer):
    """An observer that writes down what it hears."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.prompts: list[int] = []
        self.queue: list[int] = []
        self.queued: list[float] = []
        self.shares: list[float] = []

    def on_queue(self, waiting: int) -> None:
        self.queue.append(waiting)

    def on_start(self, stream: TokenStream) -> None:
        self.queued.append(stream.queued_s)

    def on_tokens(self, stream: TokenStream, tokens: list[Token], origins: list[Origin]) -> None:
        if origins == ["prompt"]:
            self.prompts.append(len(stream.request.prompt_token_ids))

    def on_cache(self, share: float) -> None:
        self.shares.append(share)

    def on_end(self, stream: TokenStream, end: End | SpeqError) -> None:
        self.reasons.append(end.finish_reason if isinstance(end, End) else "failed")


def request_of(prompt: int = 1, max_new_tokens: int = 9) -> Request:
    return Request([prompt, 2, 3], SamplingParams(max_new_tokens=max_new_tokens))


def run(
    engine: ScriptedEngine,
    asker: Callable[[EngineThread], Awaitable[None]],
    max_waiting: int = 8,
) -> Counted:
    """What was counted while an asker had a worker."""
    counted = Counted()

    async def asked() -> None:
        worker = EngineThread(engine, [counted], max_waiting)
        try:
            await asyncio.wait_for(asker(worker), PATIENCE_S)
        finally:
            worker.close()

    before = threading.active_count()
    asyncio.run(asked())
    assert threading.active_count() == before
    return counted


async def texts_of(stream: TokenStream) -> list[str]:
    return [token.text async for token in stream]


def test_requests_take_turns() -> None:
    engine = ScriptedEngine(pieces(*TEXTS))

    async def ask(worker: EngineThread) -> None:
        first = worker.submit(request_of(7))
        second = worker.submit(request_of(8, max_new_tokens=2))
        assert await texts_of(second) == ["a", "b"]
        assert await texts_of(first) == list(TEXTS)
        assert first.end is not None and second.end is not None
        assert (first.end.finish_reason, second.end.finish_reason) == ("eos", "length")
        assert first.end.stats["new_tokens"] == 4
        # What is over stays so.
        worker.cancel(first)
        assert await texts_of(first) == []
        assert first.end.finish_reason == "eos"

    counted = run(engine, ask)
    assert [prompt[0] for prompt, _ in engine.asked] == [7, 8]
    assert counted.reasons == ["eos", "length"]
    assert counted.prompts == [3, 3]
    assert all(queued_s >= 0 for queued_s in counted.queued)
    assert counted.queue[-1] == 0
    # One text at a time has all of the room; none is left behind its last token.
    assert set(counted.shares) == {0.0, 1.0}
    assert counted.shares[-1] == 0.0
    assert engine.closed == 2


def test_a_full_queue_refuses() -> None:
    go = threading.Event()
    engine = ScriptedEngine(pieces("a"), before=lambda at: hold(go))

    async def ask(worker: EngineThread) -> None:
        streams = [worker.submit(request_of()) for _ in range(3)]
        with pytest.raises(QueueFull, match="3 requests are running or waiting") as full:
            worker.submit(request_of())
        assert 1 <= full.value.retry_after_s <= 60
        # Who leaves the queue makes room.
        worker.cancel(streams[2])
        assert await texts_of(streams[2]) == []
        streams[2] = worker.submit(request_of())
        go.set()
        for stream in streams:
            assert await texts_of(stream) == ["a"]

    counted = run(engine, ask, max_waiting=2)
    assert counted.reasons == ["eos"] * 3


def test_any_number_of_requests_are_cancelled_as_they_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More than Python's functions may call themselves."""
    take, gone = EngineThread._take, iter(range(5000))

    def cancelled(worker: EngineThread, takes: Callable[[int], bool]) -> TokenStream | None:
        return None if next(gone, None) is not None else take(worker, takes)

    monkeypatch.setattr(EngineThread, "_take", cancelled)

    async def ask(worker: EngineThread) -> None:
        assert await texts_of(worker.submit(request_of())) == ["a"]

    assert run(ScriptedEngine(pieces("a")), ask).reasons == ["eos"]


def hold(go: threading.Event) -> None:
    assert go.wait(PATIENCE_S)


def test_a_worker_without_a_queue_takes_one() -> None:
    async def ask(worker: EngineThread) -> None:
        assert await texts_of(worker.submit(request_of())) == ["a"]
        # It is free as soon as the end was told, or a moment later.
        while worker.queue_lengths.running:
            await asyncio.sleep(0)
        assert await texts_of(worker.submit(request_of())) == ["a"]

    run(ScriptedEngine(pieces("a")), ask, max_waiting=0)


@pytest.mark.parametrize("at", range(len(TEXTS)))
def test_cancelled_between_two_tokens(at: int) -> None:
    """No token after the next one is generated."""
    reached: list[int] = []
    engine = ScriptedEngine(pieces(*TEXTS))

    async def ask(worker: EngineThread) -> None:
        streams: list[TokenStream] = []
        ready = threading.Event()

        def before(place: int) -> None:
            reached.append(place)
            if place == at and len(streams) == 1:
                hold(ready)
                streams[0].cancelled = True

        engine.before = before
        streams.append(worker.submit(request_of()))
        ready.set()
        told = await texts_of(streams[0])
        assert told == list(TEXTS[:at])
        assert streams[0].end is not None
        assert streams[0].end.finish_reason == "stopped"
        assert reached == list(range(at + 1))
        engine.before = lambda place: None
        assert await texts_of(worker.submit(request_of())) == list(TEXTS)

    counted = run(engine, ask)
    assert counted.reasons == ["stopped", "eos"]
    assert engine.closed == 2


def test_cancelled_within_a_prompt() -> None:
    engine = ScriptedEngine(pieces(*TEXTS))

    async def ask(worker: EngineThread) -> None:
        ready = threading.Event()
        done: list[int] = []

        def before_prompt(at: int) -> None:
            done.append(at)
            hold(ready)
            stream.cancelled = True

        engine.before_prompt = before_prompt
        stream = worker.submit(request_of())
        ready.set()
        assert await texts_of(stream) == []
        assert done == [1]
        engine.before_prompt = lambda at: None
        assert await texts_of(worker.submit(request_of())) == list(TEXTS)

    assert run(engine, ask).reasons == ["stopped", "eos"]


def test_faults_of_a_request_and_of_the_engine() -> None:
    engine = ScriptedEngine(pieces(*TEXTS), fault=SpeqError("too long"), fault_at=-1)

    async def ask(worker: EngineThread) -> None:
        with pytest.raises(SpeqError, match="too long") as refused:
            await texts_of(worker.submit(request_of()))
        assert not isinstance(refused.value, EngineFailed | Unavailable)
        engine.fault, engine.fault_at = SpeqError("a damaged expert"), 1
        stream = worker.submit(request_of())
        assert (await anext(stream)).text == "a"
        with pytest.raises(EngineFailed, match="a damaged expert"):
            await anext(stream)
        assert worker.failure is None
        go = threading.Event()
        engine.fault, engine.before = ZeroDivisionError(), lambda at: hold(go)
        streams = [worker.submit(request_of()) for _ in range(3)]
        go.set()
        for stream in streams:
            with pytest.raises(Unavailable, match="the engine died"):
                await texts_of(stream)
        assert worker.failure is not None
        with pytest.raises(Unavailable, match="the engine died"):
            worker.submit(request_of())
        assert worker.queue_lengths.running == worker.queue_lengths.waiting == 0

    assert run(engine, ask).reasons == ["failed"] * 3


def test_an_engine_that_is_lost_while_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to ask for that to be known; what is lost in a text is the end too."""
    monkeypatch.setattr(engine_thread, "CHECK_S", 0.01)
    lost = EngineLost("stage 2 of 2 has ended")
    engine = ScriptedEngine(pieces(*TEXTS))

    async def ask(worker: EngineThread) -> None:
        assert await texts_of(worker.submit(request_of())) == list(TEXTS)
        assert worker.failure is None
        engine.lost = lost
        await asyncio.to_thread(worker._thread.join, PATIENCE_S)
        assert worker.failure == "stage 2 of 2 has ended"
        with pytest.raises(Unavailable, match="stage 2 of 2 has ended"):
            worker.submit(request_of())

    run(engine, ask)
    engine = ScriptedEngine(pieces(*TEXTS), fault=lost, fault_at=1)

    async def ask_in_vain(worker: EngineThread) -> None:
        with pytest.raises(EngineFailed, match="stage 2 of 2 has ended"):
            await texts_of(worker.submit(request_of()))
        with pytest.raises(Unavailable, match="stage 2 of 2 has ended"):
            worker.submit(request_of())

    run(engine, ask_in_vain)


def test_draining_lets_the_one_under_way_finish() -> None:
    go = threading.Event()
    reached = threading.Event()

    def before(at: int) -> None:
        reached.set()
        hold(go)

    engine = ScriptedEngine(pieces(*TEXTS), before=before)

    async def ask(worker: EngineThread) -> None:
        running, waiting = worker.submit(request_of()), worker.submit(request_of())
        assert await asyncio.to_thread(reached.wait, PATIENCE_S)
        worker.drain()
        with pytest.raises(Unavailable, match="the server is ending"):
            await texts_of(waiting)
        with pytest.raises(Unavailable, match="the server is ending"):
            worker.submit(request_of())
        go.set()
        assert await texts_of(running) == list(TEXTS)

    assert run(engine, ask).reasons == ["eos"]


def test_aborting_ends_the_one_under_way() -> None:
    go = threading.Event()
    reached = threading.Event()

    def before(at: int) -> None:
        if at == 1:
            reached.set()
            hold(go)

    engine = ScriptedEngine(pieces(*TEXTS), before=before)

    async def ask(worker: EngineThread) -> None:
        stream = worker.submit(request_of())
        assert await asyncio.to_thread(reached.wait, PATIENCE_S)
        worker.abort()
        go.set()
        assert (await anext(stream)).text == "a"
        with pytest.raises(Unavailable, match="the server is ending"):
            await anext(stream)

    assert run(engine, ask).reasons == ["stopped"]
    assert engine.closed == 1


def test_silence_is_told() -> None:
    """A line goes out where no token came for so long, and no token is lost by that."""
    told: list[str | None] = []

    async def ask(worker: EngineThread) -> None:
        stream = worker.submit(request_of())
        async for news in tokens_of([stream], 0.001):
            if news is None:
                told.append(None)
            elif news[1] is not None:
                told.append(news[1].text)
            go.set()

    go = threading.Event()
    engine = ScriptedEngine(pieces(*TEXTS), before=lambda at: hold(go) if at == 0 else None)
    run(engine, ask)
    assert told[0] is None
    assert [text for text in told if text is not None] == list(TEXTS)


@pytest.mark.parametrize("turns", range(6))
def test_who_leaves_as_a_token_comes_is_gone(turns: int) -> None:
    """The reader ends, whichever of the two the loop comes to first."""

    async def read() -> None:
        stream = TokenStream(request_of(), 0.0)

        async def tokens() -> list[object]:
            async with aclosing(tokens_of([stream], PATIENCE_S)) as found:
                return [each async for each in found]

        reader = asyncio.ensure_future(tokens())
        await asyncio.sleep(0)
        stream.put(pieces("a"))
        for _ in range(turns):
            await asyncio.sleep(0)
        reader.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert reader.cancelled()

    asyncio.run(read())


class Rounds:
    """A scripted engine of several texts at a time, which waits before each token."""

    def __init__(self, max_batch: int) -> None:
        self.reached: list[int] = []
        self._at, self._allowed = threading.Condition(), 0
        self.engine = ScriptedEngine(pieces(*TEXTS), before=self._wait, max_batch=max_batch)

    def _wait(self, at: int) -> None:
        with self._at:
            self.reached.append(at)
            self._at.notify_all()
            assert self._at.wait_for(lambda: self._allowed >= len(self.reached), PATIENCE_S)

    def allow(self, tokens: int) -> None:
        """Let so many tokens come, of all texts together."""
        with self._at:
            self._allowed = tokens
            self._at.notify_all()

    async def reach(self, tokens: int) -> None:
        def wait() -> None:
            with self._at:
                assert self._at.wait_for(lambda: len(self.reached) >= tokens, PATIENCE_S)

        await asyncio.to_thread(wait)


def test_requests_run_side_by_side() -> None:
    """Two at a time; a third joins between two steps, in the place of one that has ended."""
    rounds = Rounds(2)

    async def ask(worker: EngineThread) -> None:
        assert worker.capacity == 10
        first = worker.submit(request_of(max_new_tokens=3))
        await rounds.reach(1)
        second, third = worker.submit(request_of()), worker.submit(request_of())
        rounds.allow(1)
        await rounds.reach(2)
        assert (worker.queue_lengths.running, worker.queue_lengths.waiting) == (2, 1)
        rounds.allow(99)
        assert await texts_of(first) == list(TEXTS[:3])
        assert await texts_of(second) == await texts_of(third) == list(TEXTS)

    counted = run(rounds.engine, ask)
    # A round of one, then of two; the third one joins where the first has ended.
    assert rounds.reached == [0, 1, 0, 2, 1, 2, 0, 3, 1, 2, 3]
    assert counted.reasons == ["length", "eos", "eos"]
    assert counted.prompts == [3, 3, 3]


def test_one_of_a_batch_is_cancelled() -> None:
    rounds = Rounds(3)

    async def ask(worker: EngineThread) -> None:
        streams = [worker.submit(request_of())]
        await rounds.reach(1)
        streams += [worker.submit(request_of()) for _ in range(2)]
        rounds.allow(1)
        await rounds.reach(2)
        rounds.allow(4)  # a round of all three
        await rounds.reach(5)
        worker.cancel(streams[1])
        rounds.allow(99)
        assert await texts_of(streams[0]) == await texts_of(streams[2]) == list(TEXTS)
        assert await texts_of(streams[1]) == ["a"]
        assert streams[1].end is not None and streams[1].end.finish_reason == "stopped"

    counted = run(rounds.engine, ask)
    # It was under way when it was cancelled, and ends with that step.
    assert rounds.reached == [0, *[1, 0, 0], *[2, 1, 1], *[3, 2], 3]
    assert sorted(counted.reasons) == ["eos", "eos", "stopped"]
    assert rounds.engine.closed == 3


def test_a_fault_of_one_leaves_the_others_and_a_lost_device_none() -> None:
    rounds = Rounds(2)
    engine = rounds.engine

    async def ask(worker: EngineThread) -> None:
        first = worker.submit(request_of())
        await rounds.reach(1)
        second = worker.submit(request_of())
        rounds.allow(1)
        await rounds.reach(2)
        rounds.allow(2)
        await rounds.reach(3)
        engine.fault, engine.fault_at = SpeqError("its numbers are none"), 0
        rounds.allow(3)
        with pytest.raises(EngineFailed, match="its numbers are none"):
            await texts_of(second)
        rounds.allow(4)
        await rounds.reach(5)
        third = worker.submit(request_of())
        rounds.allow(5)
        await rounds.reach(6)
        lost = SpeqError("the GPU failed")
        lost.__cause__ = RuntimeError("CUDA error: unspecified launch failure")
        engine.fault, engine.fault_at = lost, 0
        rounds.allow(99)
        assert await texts_of(first) == list(TEXTS)
        with pytest.raises(EngineFailed, match="the GPU failed"):
            await texts_of(third)
        with pytest.raises(Unavailable, match="the GPU failed"):
            worker.submit(request_of())

    assert sorted(run(engine, ask).reasons) == ["eos", "failed", "failed"]


def test_when_to_ask_again() -> None:
    """By the time of the request before, and how many run together."""
    now_s = [100.0]

    async def ask() -> None:
        go = threading.Event()
        engine = ScriptedEngine(pieces("a"), before=lambda at: hold(go), max_batch=2)
        worker = EngineThread(engine, [Counted()], 1, clock=lambda: now_s[0])
        try:
            stream = worker.submit(request_of())
            while worker.queue_lengths.running == 0:
                await asyncio.sleep(0)
            now_s[0] += 10.0
            go.set()
            assert await texts_of(stream) == ["a"]
            go.clear()
            streams = [worker.submit(request_of()) for _ in range(3)]
            with pytest.raises(QueueFull, match="3 requests are running or waiting") as full:
                worker.submit(request_of())
            assert full.value.retry_after_s == 15  # three of 10 s, two at a time
            go.set()
            for stream in streams:
                assert await texts_of(stream) == ["a"]
        finally:
            worker.close()

    asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))
