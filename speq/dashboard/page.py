"""Pages of pictures as HTML: each is one file with all that it needs, and asks no network."""

import base64
import hashlib
import html
import json
import re
from dataclasses import asdict
from pathlib import Path
from string import Template

from speq.dashboard.panel import Page, Panel
from speq.errors import FileError
from speq.files.atomic_file import write_whole

ASSETS = Path(__file__).parent / "assets"
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def render(page: Page) -> str:
    """The HTML of a page.

    Its policy allows its own scripts, by their hashes, and no request of any kind. Raises SpeqError
    for a panel that no page can hold: see `check`.
    """
    check(page)
    bundle, script = asset("plotly-cartesian.min.js"), asset("page.js")
    values = {
        "policy": _policy(bundle, script),
        "title": _ascii(html.escape(page.title)),
        "summary": _ascii(html.escape(page.summary)),
        "style": asset("page.css"),
        "page": in_script(page),
        "bundle": bundle,
        "script": script,
    }
    return Template(asset("page.html")).substitute(values)


def write_page(page: Page, path: Path) -> None:
    """Whole or not at all. Raises SpeqError as `render` does, and where it cannot be written."""
    write_whole(path, render(page).encode())


def asset(name: str) -> str:
    """The text of a file that pages are made of."""
    return (ASSETS / name).read_text(encoding="utf-8")


def in_script(page: Page) -> str:
    """A page as JSON that may stand within a script element: it has no "<"."""
    try:
        return json.dumps(asdict(page), allow_nan=False).replace("<", "\\u003c")
    except ValueError as error:
        raise FileError(
            f"page {page.title!r} holds a number that is infinite or none; give None instead"
        ) from error


def check(page: Page) -> None:
    """Raises SpeqError for panels that share a name or have an ill-formed one, and for table rows
    that are not as long as their columns.
    """
    names = [panel.name for panel in page.panels]
    for panel in page.panels:
        if NAME.fullmatch(panel.name) is None:
            raise FileError(
                f"a panel is named {panel.name!r}; it must be of small letters, digits and hyphens"
            )
        if names.count(panel.name) > 1:
            raise FileError(f"two panels are named {panel.name}; name each differently")
        _check_table(panel)


def _check_table(panel: Panel) -> None:
    columns = len(panel.table.columns)
    for row in panel.table.rows:
        if len(row) != columns:
            raise FileError(
                f"the table of panel {panel.name} has a row of {len(row)} cells; "
                f"it must have {columns}, as many as columns"
            )


def _policy(*scripts: str) -> str:
    """What a page may do. plotly.js writes styles itself, hence 'unsafe-inline' for these."""
    hashes = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _ascii(text: str) -> str:
    """Names of files may hold bytes that are no text, and those cannot be written as UTF-8."""
    return text.encode("ascii", "xmlcharrefreplace").decode()
