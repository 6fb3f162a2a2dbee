"""The chat page in a browser, with a real generator behind it."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from speq import Generator
from speq.engine.engine_thread import Observer
from speq.server.access import Keys, digest
from tests.helpers.api_server import Rig, api_server
from tests.helpers.browser import Opened, opened
from tests.helpers.command import PATIENCE_S
from tests.helpers.often import often

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TOKENS = 12
KEY = "correct-horse-battery"


class Gate(Observer):
    """Holds the engine before the token of a place, once it is closed."""

    def __init__(self) -> None:
        self.closed_at: int | None = None
        self.reached, self.opened = threading.Event(), threading.Event()
        self._told = 0

    def on_start(self, stream: Any) -> None:
        self._told = 0

    def on_tokens(self, stream: Any, tokens: list[Any], origins: list[Any]) -> None:
        self._told += len(tokens)
        if self.closed_at is not None and self._told >= self.closed_at:
            self.closed_at = None
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def generator(bundled: Path) -> Iterator[Generator]:
    options: dict[str, Any] = {"draft_length": 3, "context_length": 256, "profile": "none"}
    with closing(Generator.from_pretrained(bundled, "26MiB", **options)) as made:
        yield made


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def rig(generator: Generator, gate: Gate) -> Iterator[Rig]:
    with api_server(generator, generator, observers=[gate]) as made:
        yield made
        gate.opened.set()


def page_of(rig: Rig) -> str:
    return rig.server.url.removesuffix("v1")


def reached(page: Opened, *states: str) -> None:
    page.page.wait_for_selector(", ".join(f"body[data-state={state}]" for state in states))


def ask(page: Opened, text: str) -> None:
    page.page.fill("#question", text)
    page.page.press("#question", "Enter")


def answers(page: Opened) -> list[str]:
    found: list[str] = page.page.locator(".turn.assistant .text").all_text_contents()
    return found


def set_up(page: Opened, tokens: int = TOKENS) -> None:
    reached(page, "idle")
    page.page.click("#settings summary")
    page.page.fill("#temperature", "0")
    page.page.fill("#max_tokens", str(tokens))


@pytest.mark.parametrize(
    ("width", "scheme"), often([(390, "dark"), (1280, "light")], quick=1, wide=1)
)
def test_a_conversation(
    rig: Rig, generator: Generator, browser: "Browser", width: int, scheme: Any
) -> None:
    """Its texts are those that the generator gives for the same messages."""
    first, second = "Say how are you", "And where?"
    with opened(browser, page_of(rig), width, scheme, pictures=False) as page:
        set_up(page)
        assert "context 256 tokens, drafts by int4" in (page.page.text_content("#served") or "")
        page.page.fill("#system", "Be brief.")
        ask(page, first)
        reached(page, "finished")
        ask(page, second)
        page.wait_until("() => document.querySelectorAll('.turn.assistant .figures').length === 2")
        messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
        for text, said in zip((first, second), answers(page), strict=True):
            messages.append({"role": "user", "content": text})
            wanted = generator.generate(messages, max_new_tokens=TOKENS)
            assert said == wanted.text
            messages.append({"role": "assistant", "content": said})
        page.page.check("#costs")
        spans = page.page.locator(".turn.assistant .token")
        classes = spans.evaluate_all("spans => spans.map(each => each.className.split(' ')[1])")
        assert set(classes) <= {"accepted", "exact"}
        assert "exact" in classes
        figures = page.page.locator(".figures").first.text_content() or ""
        assert figures.startswith(f"{TOKENS} tokens, ")
        assert "tokens/s, the first after " in figures
        assert "s for experts." in figures
        # Again: the last answer goes, and the same one comes, since it is greedy.
        before = answers(page)
        page.page.click("#again")
        reached(page, "running", "finished")
        page.wait_until("() => document.querySelectorAll('.turn.assistant .figures').length === 2")
        assert answers(page) == before
        page.page.click("#new")
        assert answers(page) == []
        assert page.overflow_px() <= 0
        assert page.errors == []
        # Chromium may count an answer as aborted whose body a reader took, to its end as well.
        assert all(each.endswith("completions: net::ERR_ABORTED") for each in page.failed)


def test_an_answer_that_is_stopped(rig: Rig, gate: Gate, browser: "Browser") -> None:
    gate.closed_at = 4
    with opened(browser, page_of(rig), pictures=False) as page:
        set_up(page, 100)
        ask(page, "Once upon a time")
        assert gate.reached.wait(PATIENCE_S)
        page.page.click("#stop")
        reached(page, "finished")
        assert page.page.text_content("#status") == "Stopped."
        gate.opened.set()
        # The server is free again.
        ask(page, "And then?")
        page.wait_until("() => document.querySelectorAll('.turn.assistant').length === 2")
        page.page.click("#new")


def test_a_message_that_is_refused_is_taken_back(rig: Rig, browser: "Browser") -> None:
    with opened(browser, page_of(rig), pictures=False) as page:
        set_up(page)
        ask(page, "word " * 400)
        reached(page, "failed")
        told = page.page.text_content("#status") or ""
        assert "tokens, and the context holds 256; shorten it. Your message was taken back" in told
        assert page.page.input_value("#question").startswith("word word")
        assert answers(page) == []


def test_the_page_asks_for_a_key(generator: Generator, browser: "Browser", tmp_path: Path) -> None:
    keys = Keys((digest(KEY),))
    with (
        api_server(generator, generator, keys) as rig,
        opened(browser, page_of(rig), pictures=False) as page,
    ):
        reached(page, "failed")
        page.page.fill("#key", KEY)
        page.page.press("#key", "Enter")
        reached(page, "idle")
        page.page.click("#settings summary")
        page.page.fill("#max_tokens", "3")
        ask(page, "Hello")
        reached(page, "finished")
        assert len(answers(page)) == 1


def test_nothing_but_the_page_is_open(generator: Generator) -> None:
    with api_server(generator, generator, Keys((digest(KEY),))) as rig:
        for path in ("/", "/assets/chat.js", "/assets/chat.css", "/assets/page.css"):
            reply = rig.get(path)
            assert reply.status == 200
            assert "script-src 'self'" in reply.headers["content-security-policy"]
        for path in ("/v1/speq", "/v1/models", "/assets/page.js", "/assets/../x", "/metrics"):
            assert rig.get(path).status in (401, 404)
