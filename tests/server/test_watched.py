"""What the live page hears of requests that others make."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from speq import Generator, SpeqError
from speq.config import SamplingParams
from speq.dashboard.live.session import Busy, Nothing
from speq.dashboard.recording import Recording
from speq.engine.request import Request
from speq.engine.token_stream import End, TokenStream
from speq.generator import Token
from speq.server.watched import Watched
from tests.helpers.api_server import QUESTION, api_server
from tests.helpers.live_run import panel_of_tokens

TOKENS = 8


@pytest.fixture
def watched(generator: Generator) -> Iterator[Watched]:
    with (
        Recording(generator) as recording,
        contextlib.closing(Watched(generator, recording, panel_of_tokens)) as made,
    ):
        yield made


def told_of(watched: Watched) -> list[tuple[str, Any]]:
    """All that a listener that comes now hears."""
    with watched.broadcast.listening(lambda: None) as listener:
        return [(each.kind, json.loads(each.data)) for each in watched.broadcast.take(listener)]


def test_a_request_is_shown(watched: Watched, generator: Generator) -> None:
    with pytest.raises(Nothing, match="nothing was generated yet"):
        watched.record()
    wanted = generator.generate(QUESTION, max_new_tokens=TOKENS)
    with api_server(generator, generator, viewers=[watched]) as rig:
        reply = rig.chat(max_tokens=TOKENS, temperature=0, logprobs=True)
        choice = reply.json["choices"][0]
        assert choice["message"]["content"] == wanted.text
        assert len(choice["logprobs"]["content"]) == TOKENS
    told = told_of(watched)
    kind, begun = told[0]
    assert (kind, begun["run"]) == ("begun", 1)
    assert begun["prompt"] == generator.tokenizer.decode(generator.encode(QUESTION))
    tokens = [data for kind, data in told if kind == "token"]
    assert [each["id"] for each in tokens] == wanted.token_ids
    assert tokens[0]["origin"] == "prompt"
    assert {each["origin"] for each in tokens[1:]} <= {"accepted", "exact"}
    kind, end = told[-1]
    assert (kind, end["finish_reason"], end["stats"]["new_tokens"]) == (
        "finished",
        "length",
        TOKENS,
    )
    assert [each.id for each in watched.record().tokens] == wanted.token_ids
    pictures = [data for kind, data in told if kind == "panels"]
    assert pictures[-1]["panels"][0]["table"]["rows"] == [[TOKENS]]


def test_one_text_at_a_time(watched: Watched, generator: Generator) -> None:
    """The next to begin is shown once the one before has ended; and ends of all kinds."""

    async def see() -> None:
        streams = [
            TokenStream(Request(generator.encode(prompt), SamplingParams(max_new_tokens=4)), 0.0)
            for prompt in ("first", "beside it", "next")
        ]
        first, beside, following = streams
        watched.begun(first)
        watched.begun(beside)
        watched.reading(beside, 1, 3)
        watched.reading(first, 2, 3)
        kinds = [(kind, data.get("prompt", data.get("done"))) for kind, data in told_of(watched)]
        assert kinds == [("begun", "first"), ("prompt", 2)]
        watched.told(beside, [Token(5, "a")], ["prompt"])
        watched.ended(beside, End("length"))
        assert [kind for kind, _ in told_of(watched)] == ["begun", "prompt"]
        watched.ended(first, End("stopped"))
        kind, data = told_of(watched)[-1]
        assert (kind, data["finish_reason"], data["stats"]) == ("finished", "stopped", None)
        watched.begun(following)
        watched.ended(following, SpeqError("an expert is damaged"))
        (_, begun), (kind, data) = told_of(watched)[0], told_of(watched)[-1]
        assert (begun["prompt"], kind, data["error"]) == ("next", "failed", "an expert is damaged")

    asyncio.run(see())


def test_the_page_asks_for_nothing(watched: Watched) -> None:
    assert not watched.asks
    with pytest.raises(Busy, match="ask the server for text"):
        watched.start("a", {})
    with pytest.raises(Busy, match="its clients stop it"):
        watched.stop()


def test_listeners_are_sent_home(watched: Watched) -> None:
    async def listen() -> bool:
        with watched.broadcast.listening(lambda: None) as listener:
            watched.close()
            return listener.closed

    assert asyncio.run(listen())
