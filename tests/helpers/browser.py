"""Pages in a browser without a window, and whatever it complains of."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# Long enough for a machine that is busy with other tests.
PATIENCE_MS = 60_000


@dataclass
class Opened:
    """A page in a browser.

    errors    of its scripts, and of the console
    requests  URLs of whatever was asked for, the page's own among them
    failed    URLs of those that came to nothing, and why
    """

    page: "Page"
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def charts(self, panel: str) -> list[dict[str, Any]]:
        """`data` and `layout` of a panel's charts, as plotly.js holds them."""
        found: list[dict[str, Any]] = self.page.eval_on_selector_all(
            f"#panel-{panel} .js-plotly-plot",
            "charts => charts.map(({data, layout}) => ({data, layout}))",
        )
        return found

    def cells(self, panel: str, table: int = 0, attribute: str | None = None) -> list[list[Any]]:
        """Cells of a panel's table, opened where it was not; or an attribute of these."""
        details = self.page.locator(f"#panel-{panel} details:not([hidden])").nth(table)
        if details.get_attribute("open") is None:
            details.locator("summary").click()
        details.locator("table").wait_for()
        read = "cell.getAttribute(name)" if attribute else "cell.textContent"
        rows: list[list[Any]] = details.evaluate(
            "(details, name) => [...details.querySelectorAll('tbody tr')].map("
            f"row => [...row.cells].map(cell => {read}))",
            attribute,
        )
        return rows

    def wait_until(self, condition: str, argument: Any = None) -> None:
        """Wait for a condition, a function of JavaScript, to be true of `argument`.

        The page compiles it once: Playwright's `wait_for_function` compiles it at every look,
        which a page whose policy forbids `eval` refuses from the second look on.
        """
        self.page.evaluate(
            f"""argument => new Promise((resolve, reject) => {{
              const condition = {condition};
              const end_ms = performance.now() + {PATIENCE_MS};
              const look = () => {{
                if (condition(argument)) resolve();
                else if (performance.now() > end_ms) reject(new Error("never: " + condition));
                else requestAnimationFrame(look);
              }};
              look();
            }})""",
            argument,
        )

    def overflow_px(self) -> int:
        """By how much the page is wider than the window."""
        return int(
            self.page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
        )


@contextmanager
def opened(
    browser: "Browser",
    url: str | Path,
    width_px: int = 1400,
    scheme: Literal["light", "dark"] = "light",
    motion: Literal["reduce", "no-preference"] = "no-preference",
    pictures: bool = True,
) -> Iterator[Opened]:
    """A page of a server or of a file, once all its pictures, if it has some, are drawn."""
    context = browser.new_context(
        viewport={"width": width_px, "height": 900}, color_scheme=scheme, reduced_motion=motion
    )
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    seen = Opened(page)
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on(
        "console",
        lambda said: seen.errors.append(said.text) if said.type in ("error", "warning") else None,
    )
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on(
        "requestfailed", lambda request: seen.failed.append(f"{request.url}: {request.failure}")
    )
    try:
        page.goto(url.resolve().as_uri() if isinstance(url, Path) else url)
        if pictures:
            page.evaluate("speqPage.opened")
        yield seen
    finally:
        context.close()
