"""Opens pages in the system's Chromium, without a window, for tests and screenshots."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")


def installed_browser() -> str | None:
    """Path of the first browser there is."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def reason_absent() -> str | None:
    """Reason that no page can be opened here; None: pages can be opened."""
    if installed_browser() is None:
        return f"there is no browser here ({', '.join(NAMES)}); tools/browser.sh installs one"
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "playwright is not installed; pip install playwright"
    return None


@contextmanager
def launch_browser() -> Iterator["Browser"]:
    """Launch a browser for the block. An event loop runs in this thread for as long."""
    from playwright.sync_api import sync_playwright

    # Chromium's sandbox refuses to work for root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=installed_browser(), args=arguments)
        try:
            yield browser
        finally:
            browser.close()
