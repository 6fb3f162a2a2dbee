"""The live page in a browser, with a real generator behind it."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from speq import Generator
from speq.dashboard.live.live_view import LiveView
from speq.dashboard.recording import Recording
from speq.dashboard.run_panels.run_page import panels_of
from speq.dashboard.run_record import RunRecord, run_of
from tests.helpers.api_server import Rig, api_server
from tests.helpers.browser import Opened, opened
from tests.helpers.command import PATIENCE_S
from tests.helpers.live_run import PageClient

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TOKENS = 24


class GatedView(LiveView):
    """A view whose tokens wait at a gate, and the engine with them, from some place on."""

    closed_from: int | None = None

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.gate, self.told = threading.Event(), 0

    def on_start(self, stream: Any) -> None:
        self.told = 0
        super().on_start(stream)

    def on_tokens(self, stream: Any, tokens: list[Any], origins: list[Any]) -> None:
        for token, origin in zip(tokens, origins, strict=True):
            if self.told == self.closed_from:
                assert self.gate.wait(PATIENCE_S)
            self.told += 1
            super().on_tokens(stream, [token], [origin])


@dataclass
class LiveRig:
    api: Rig
    view: GatedView

    @property
    def url(self) -> str:
        return self.api.server.page_url

    @property
    def run(self) -> RunRecord:
        return run_of(PageClient(self.api.server).get("/run.json").json, "run.json")


@pytest.fixture
def rig(bundled: Path) -> Iterator[LiveRig]:
    with ExitStack() as stack:
        generator = Generator.from_pretrained(
            bundled, "24MiB", draft_length=3, reader_threads=2, context_length=64
        )
        stack.enter_context(closing(generator))
        view = GatedView(generator, stack.enter_context(Recording(generator)))
        yield LiveRig(stack.enter_context(api_server(generator, generator, view=view)), view)
        view.gate.set()


def ask(page: Opened, prompt: str, tokens: int = TOKENS) -> None:
    page.page.fill("#prompt", prompt)
    page.page.fill("#max_tokens", str(tokens))
    page.page.click("#generate")


def reached(page: Opened, state: str) -> None:
    page.page.wait_for_selector(f"body[data-state={state}]")


def told(page: Opened) -> tuple[str, list[str]]:
    """The generated text, and the classes of its tokens."""
    spans = page.page.locator("#tokens .token")
    classes = spans.evaluate_all("spans => spans.map(each => each.className)")
    return page.page.locator("#tokens").text_content() or "", classes


def test_a_run_as_a_person_sees_it(rig: LiveRig, browser: "Browser") -> None:
    with opened(browser, rig.url) as page:
        reached(page, "idle")
        ask(page, "hello there")
        reached(page, "finished")
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


@pytest.mark.wide
def test_the_page_goes_on_with_the_run(rig: LiveRig, browser: "Browser") -> None:
    rig.view.closed_from = 5
    with opened(browser, rig.url, 400, "dark") as page:
        ask(page, "hello there")
        reached(page, "running")
        # As far as the gate lets it, with pictures of what has come.
        page.page.wait_for_selector("#tokens .token >> nth=4")
        page.page.locator("#panel-overlap .js-plotly-plot").wait_for()
        assert page.page.is_disabled("#generate") and page.page.is_enabled("#stop")
        before, _ = told(page)
        rig.view.gate.set()
        reached(page, "finished")
        after, _ = told(page)
        assert after.startswith(before) and len(after) > len(before)
        assert page.overflow_px() <= 0
        assert page.errors == []


def test_stop_ends_it(rig: LiveRig, browser: "Browser") -> None:
    rig.view.closed_from = 3
    with opened(browser, rig.url) as page:
        ask(page, "hello there", 40)
        page.page.wait_for_selector("#tokens .token >> nth=2")
        page.page.click("#stop")
        while not rig.api.worker._taken[0].cancelled:  # each look is a request, which takes time
            rig.api.get("/health")
        rig.view.gate.set()
        reached(page, "finished")
        assert len(rig.run.tokens) < 40
        # The next one runs as ever.
        rig.view.closed_from = None
        ask(page, "another", 4)
        page.page.wait_for_selector("#tokens .token >> nth=3")
        reached(page, "finished")
        assert page.errors == []


def test_a_refusal_is_a_sentence_on_the_page(rig: LiveRig, browser: "Browser") -> None:
    with opened(browser, rig.url) as page:
        ask(page, "hello there " * 300, 4)
        page.page.wait_for_selector("#status:has-text('context')")
        assert page.page.get_attribute("body", "data-state") in ("idle", "failed")
        assert page.page.is_enabled("#generate")
