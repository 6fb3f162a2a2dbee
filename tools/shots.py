"""Takes screenshots of a page of pictures in both themes, on a wide and on a narrow screen.

    python -m tools.shots PAGE.html FOLDER
    python -m tools.shots PAGE.html FOLDER --panel overlap

The second form takes one picture of the page in the light theme, as for docs/. No test asserts what
a page looks like: look at these after a change.
"""

import argparse
import sys
from pathlib import Path
from typing import Literal

from tools.chromium import launch_browser, reason_absent

WIDTHS_PX = (400, 1400)
PICTURE_PX = 1000
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def shots(page: Path, folder: Path) -> list[Path]:
    """Write PNG files to `folder`, one for each theme and width."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    with launch_browser() as browser:
        for theme in THEMES:
            for width in WIDTHS_PX:
                opened = browser.new_page(
                    viewport={"width": width, "height": 900}, color_scheme=theme
                )
                opened.goto(page.resolve().as_uri())
                opened.evaluate("speqPage.opened")
                made.append(folder / f"{page.stem}-{theme}-{width}.png")
                opened.screenshot(path=made[-1], full_page=True)
                opened.close()
    return made


def shot_of(page: Path, folder: Path, panel: str) -> Path:
    """Write a PNG file of one panel to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{panel}.png"
    with launch_browser() as browser:
        opened = browser.new_page(viewport={"width": PICTURE_PX, "height": 900})
        opened.goto(page.resolve().as_uri())
        opened.evaluate("speqPage.opened")
        opened.locator(f"#panel-{panel}").screenshot(path=made)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="Take screenshots of a page of pictures.")
    parser.add_argument("page", type=Path, metavar="PAGE.html")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--panel", help="take this picture alone, by its name")
    given = parser.parse_args()
    reason = reason_absent()
    if reason is not None:
        sys.exit(reason)
    if not given.page.is_file():
        sys.exit(f"{given.page} is no file; give a page that speq wrote")
    if given.panel is not None:
        print(shot_of(given.page, given.folder, given.panel))
        return
    for path in shots(given.page, given.folder):
        print(path)


if __name__ == "__main__":
    main()
