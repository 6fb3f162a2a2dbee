"""The live page in a browser, with a real generator behind it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from speq import Generator
from speq.dashboard.live.metrics import Metrics
from speq.dashboard.live.server import LiveServer, bound
from speq.dashboard.live.session import Session
from speq.dashboard.recording import Recording
from speq.dashboard.run_panels.run_page import panels_of
from speq.dashboard.run_record import RunRecord, TokenRecord, run_of
from tests.helpers.browser import Opened, opened
from tests.helpers.command import PATIENCE_S
from tests.helpers.live_run import Browser as Client
from tests.helpers.live_run import served

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TOKENS = 24


class Gated:
    """A recording whose tokens wait at a gate from some place on."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.closed_from: int | None = None
        self.gate = threading.Event()

    def stream(self, prompt: str, **options: Any) -> Iterator[TokenRecord]:
        stream = self._recording.stream(prompt, **options)
        with closing(stream):
            for at, token in enumerate(stream):
                if at == self.closed_from:
                    assert self.gate.wait(PATIENCE_S)
                yield token

    def record(self) -> RunRecord | None:
        return self._recording.record()


class Rig:
    def __init__(self, generator: Generator, recording: Recording) -> None:
        self.generator = generator
        self.recording = Gated(recording)
        metrics = Metrics("tiny")
        self.session = Session(self.recording, panels_of, metrics)  # type: ignore[arg-type]
        self.server = LiveServer(self.session, metrics, bound("127.0.0.1"))
        self.client = Client(self.server)

    @property
    def run(self) -> RunRecord:
        return run_of(self.client.get("/run.json").json, "run.json")


@pytest.fixture
def rig(tiny: Callable[[str], Path]) -> Iterator[Rig]:
    with ExitStack() as stack:
        generator = stack.enter_context(
            closing(
                Generator.from_pretrained(
                    tiny("qwen3_moe"), "1MiB", draft_length=3, reader_threads=2, context_length=64
                )
            )
        )
        made = Rig(generator, stack.enter_context(Recording(generator)))
        stack.enter_context(closing(made.session))
        stack.callback(made.recording.gate.set)
        stack.enter_context(served(made.server))
        yield made


def ask(page: Opened, prompt: str, tokens: int = TOKENS) -> None:
    page.page.fill("#prompt", prompt)
    page.page.fill("#max_new_tokens", str(tokens))
    page.page.click("#generate")


def reached(page: Opened, state: str) -> None:
    page.page.wait_for_selector(f"body[data-state={state}]")


def told(page: Opened) -> tuple[str, list[str]]:
    """The generated text, and the classes of its tokens."""
    spans = page.page.locator("#tokens .token")
    classes = spans.evaluate_all("spans => spans.map(each => each.className)")
    return page.page.locator("#tokens").text_content() or "", classes


def test_a_run_as_a_person_sees_it(rig: Rig, browser: "Browser") -> None:
    with opened(browser, rig.server.url) as page:
        reached(page, "idle")
        ask(page, "hello there")
        reached(page, "finished")
        rig.session.wait()
        run = rig.run
        text, classes = told(page)
        assert text == "".join(token.text for token in run.tokens)
        # The one behind the prompt is the exact model's own, as well.
        origins = [token.origin.replace("prompt", "exact") for token in run.tokens]
        assert [each.split()[1] for each in classes] == origins
        waited = [token.waited_ms > 0 for token in run.tokens]
        assert ["waited" in each.split() for each in classes] == waited
        page.page.locator("#panel-steps .js-plotly-plot").wait_for()
        page.page.wait_for_selector("#panel-memory .js-plotly-plot")
        for panel in panels_of(run):
            if panel.frames is not None or panel.absent:
                continue
            (chart,) = page.charts(panel.name)
            for drawn, given in zip(chart["data"], panel.data, strict=True):
                for axis in ("x", "y", "z"):
                    if axis in given:
                        assert drawn[axis] == given[axis], (panel.name, given.get("name"), axis)
        assert (page.errors, page.failed) == ([], [])


def test_the_page_goes_on_with_the_run(rig: Rig, browser: "Browser") -> None:
    rig.recording.closed_from = 5
    with opened(browser, rig.server.url, 400, "dark") as page:
        ask(page, "hello there")
        reached(page, "running")
        # As far as the gate lets it, with pictures of what has come.
        page.page.wait_for_selector("#tokens .token >> nth=4")
        page.page.locator("#panel-overlap .js-plotly-plot").wait_for()
        assert page.page.is_disabled("#generate") and page.page.is_enabled("#stop")
        before, _ = told(page)
        rig.recording.gate.set()
        reached(page, "finished")
        after, _ = told(page)
        assert after.startswith(before) and len(after) > len(before)
        assert page.overflow_px() <= 0
        assert page.errors == []


def test_stop_ends_it(rig: Rig, browser: "Browser") -> None:
    rig.recording.closed_from = 3
    with opened(browser, rig.server.url) as page:
        ask(page, "hello there", 40)
        page.page.wait_for_selector("#tokens .token >> nth=2")
        page.page.click("#stop")
        rig.recording.gate.set()
        reached(page, "finished")
        rig.session.wait()
        assert len(rig.run.tokens) < 40
        # The next one runs as ever.
        rig.recording.closed_from = None
        ask(page, "another", 4)
        page.page.wait_for_selector("#tokens .token >> nth=3")
        reached(page, "finished")
        assert page.errors == []


def test_a_refusal_is_a_sentence_on_the_page(rig: Rig, browser: "Browser") -> None:
    with opened(browser, rig.server.url) as page:
        ask(page, "hello there", 4000)
        page.page.wait_for_selector("#status:has-text('context')")
        assert page.page.get_attribute("body", "data-state") in ("idle", "failed")
        assert page.page.is_enabled("#generate")
