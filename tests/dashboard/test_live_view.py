"""What the live page is told of requests, whoever made them."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from speq import Generator, SpeqError
from speq.config import SamplingParams
from speq.dashboard.live.live_view import LiveView
from speq.dashboard.panel import Panel
from speq.dashboard.recording import Recording
from speq.dashboard.run_record import RunRecord
from speq.engine.engine_thread import EngineThread
from speq.engine.token_stream import End, TokenStream
from speq.generator import Token
from tests.helpers.live_run import panel_of_tokens


@pytest.fixture(scope="module")
def generator(bundled: Path) -> Iterator[Generator]:
    made = Generator.from_pretrained(bundled, "80MiB", dtype="float32", draft_length=0)
    yield made
    made.close()


@contextmanager
def viewed(generator: Generator, **options: Any) -> Iterator[LiveView]:
    with Recording(generator) as recording:
        yield LiveView(generator, recording, **{"panels_of": panel_of_tokens} | options)


def told_of(view: LiveView) -> list[tuple[str, Any]]:
    """All that a subscriber that comes now reads."""
    with view.bus.subscribe(lambda: None) as subscriber:
        return [(each.kind, json.loads(each.data)) for each in view.bus.take(subscriber)]


def test_one_request_at_a_time(generator: Generator) -> None:
    """The next to begin is shown once the one before has ended; and ends of all kinds."""

    async def see(view: LiveView) -> None:
        first, beside, following = (
            TokenStream(generator.prepare(prompt, None, {"max_new_tokens": 4}), 0.0)
            for prompt in ("first", "beside it", "next")
        )
        view.on_start(first)
        view.on_start(beside)
        view.on_prefill(beside, 1, 3)
        view.on_prefill(first, 2, 3)
        kinds = [(kind, data.get("prompt", data.get("done"))) for kind, data in told_of(view)]
        assert kinds == [("begun", "first"), ("prompt", 2)]
        view.on_tokens(beside, [Token(5, "a")], ["prompt"])
        view.on_end(beside, End("length"))
        assert [kind for kind, _ in told_of(view)] == ["begun", "prompt"]
        view.on_end(first, End("stopped"))
        kind, data = told_of(view)[-1]
        assert (kind, data["finish_reason"], data["stats"]) == ("finished", "stopped", None)
        view.on_start(following)
        view.on_end(following, SpeqError("an expert is damaged"))
        (_, begun), (kind, data) = told_of(view)[0], told_of(view)[-1]
        assert (begun["prompt"], kind, data["error"]) == ("next", "failed", "an expert is damaged")

    with viewed(generator) as view:
        asyncio.run(see(view))


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
def test_pictures_take_a_tenth_of_the_time(
    generator: Generator, cost_s: float, drawn: list[int]
) -> None:
    now = [0.0]
    made: list[int] = []

    def panels_of(record: RunRecord) -> list[Panel]:
        now[0] += cost_s
        made.append(len(record.tokens))
        return panel_of_tokens(record)

    class Paced(LiveView):
        def on_tokens(self, *given: Any) -> None:
            now[0] += 0.25
            super().on_tokens(*given)

    async def generate(view: LiveView) -> None:
        thread = EngineThread(generator, [view])
        sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
        async for _ in thread.submit(generator.request([5, 6, 7], sampling)):
            continue
        thread.close()

    with Recording(generator) as recording:
        view = Paced(generator, recording, panels_of, lambda: now[0])
        with view.bus.subscribe(lambda: None):
            asyncio.run(generate(view))
        assert made == drawn
        made.clear()
        asyncio.run(generate(view))  # nobody looks before the end
        assert made == [12]
