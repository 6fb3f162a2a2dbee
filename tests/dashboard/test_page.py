"""Pages as HTML: what a browser shows of them is what was given."""

import base64
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speq import SpeqError
from speq.dashboard.page import ASSETS, render, write_page
from speq.dashboard.panel import COLOURS, Frames, Page, Panel, Table
from tests.helpers.browser import Opened, opened
from tests.helpers.sample_page import PARTS, bars, frames, heat, lines, random_frames, sample_page

AWAY, HOST, HELD, ASKED, MISSED = range(5)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "sample.html"
    write_page(sample_page(), path)
    return path


@pytest.fixture(scope="module")
def shown(browser: Any, sample: Path) -> Iterator[Opened]:
    """The sample page, for tests that leave it as it is."""
    with opened(browser, sample) as page:
        yield page


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A page with one panel of the sample: that is drawn sooner."""
    folder = tmp_path_factory.mktemp("alone")

    def page(name: str) -> Path:
        path = folder / f"{name}.html"
        if not path.exists():
            write_page(Page(name, [], [panel_of_sample(name)]), path)
        return path

    return page


def panel_of_sample(name: str) -> Panel:
    return next(each for each in sample_page().panels if each.name == name)


def frames_of_sample(name: str) -> Frames:
    given = panel_of_sample(name).frames
    assert given is not None
    return given


def bits(text: str, given: Frames) -> np.ndarray[Any, Any]:
    """What `Frames` says of a string, read by numpy."""
    packed = np.frombuffer(base64.b64decode(text), np.uint8)
    flat = np.unpackbits(packed, bitorder="little")[: given.layers * given.experts]
    return flat.reshape(given.layers, given.experts).astype(bool)


def states(given: Frames, step: int) -> np.ndarray[Any, Any]:
    held, asked = bits(given.slots[step], given), bits(given.used[step], given)
    host = bits(given.host, given) if given.host else np.zeros_like(held)
    elsewhere = np.where(asked, MISSED, np.where(host, HOST, AWAY))
    return np.where(held, np.where(asked, ASKED, HELD), elsewhere)


def uses(given: Frames, step: int) -> np.ndarray[Any, Any]:
    return np.sum([bits(each, given) for each in given.used[: step + 1]], axis=0)


def move(page: Opened, panel: str, key: str, to: int) -> None:
    """Press a key on a panel's slider, and wait until that step is drawn."""
    page.page.locator(f"#panel-{panel} input[type=range]").press(key)
    page.page.locator(f"#panel-{panel} .experts[data-drawn='{to}']").wait_for()


def panel_names(page: Opened) -> list[str]:
    read = "all => all.map(each => each.dataset.name)"
    return list(page.page.locator(".panel").evaluate_all(read))


def rgb(hexadecimal: str) -> str:
    red, green, blue = (int(hexadecimal[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgb({red}, {green}, {blue})"


def theme_colours() -> dict[str, tuple[str, str]]:
    """Of each variable of the style sheet: its colour in the light theme, and in the dark one."""
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    found = re.findall(r"--(?:c-)?([a-z0-9]+): light-dark\((#\w{6}), (#\w{6})\);", style)
    return {name: (light, dark) for name, light, dark in found}


def luminance(hexadecimal: str) -> float:
    """Relative luminance of WCAG 2."""
    parts = [int(hexadecimal[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_stand_out(theme: int) -> None:
    """WCAG 2: 4.5 for words, 3 for what is drawn."""
    colours = {name: pair[theme] for name, pair in theme_colours().items()}
    assert set(COLOURS) <= set(colours)
    series = [name for name in COLOURS if name != "grid"]
    background = colours["background"]
    assert {n: c for n in series if (c := contrast(colours[n], background)) < 3} == {}
    words = ("text", "quiet", "link")
    grounds = (background, colours["box"])
    assert {n for n in words for g in grounds if contrast(colours[n], g) < 4.5} == set()
    # States of experts tell themselves apart without colours, but for those with a cross.
    kinds = ("away", "host", "held", "asked")
    lightness = sorted(luminance(colours[name]) for name in kinds)
    steps = [(b + 0.05) / (a + 0.05) for a, b in pairwise(lightness)]
    assert min(steps) > 1.25


def test_nothing_is_complained_of_and_nothing_asked_for(browser: Any, sample: Path) -> None:
    for scheme in ("light", "dark"):
        with opened(browser, sample, scheme=scheme) as page:
            assert page.errors == []
            # `data:` is no request of the network: the page's own, empty, icon.
            assert [url for url in page.requests if not url.startswith("data:")] == [
                sample.as_uri()
            ]
            assert page.failed == []


def test_policy_stops_requests_and_foreign_scripts(
    browser: Any, alone: Callable[[str], Path]
) -> None:
    with opened(browser, alone("lines")) as page:
        refused = page.page.evaluate("fetch('https://example.org').then(() => 'went', () => 'no')")
        assert refused == "no"
        page.page.evaluate(
            "document.body.append(Object.assign(document.createElement('script'),"
            " {textContent: 'window.foreign = true'}))"
        )
        assert page.page.evaluate("window.foreign") is None
        assert any("Content Security Policy" in error for error in page.errors)


def test_charts_hold_the_numbers_given(shown: Opened) -> None:
    for panel in (bars(), lines(), heat()):
        (chart,) = shown.charts(panel.name)
        assert len(chart["data"]) == len(panel.data)
        for drawn, given in zip(chart["data"], panel.data, strict=True):
            for key in ("type", "name", "x", "y", "z"):
                assert drawn.get(key) == given.get(key), (panel.name, key)
        for axis in ("xaxis", "yaxis"):
            assert chart["layout"][axis]["title"]["text"] == panel.layout[axis]["title"]["text"]


def test_bars_have_patterns_and_their_colours(shown: Opened) -> None:
    (chart,) = shown.charts("bars")
    colours = theme_colours()
    for trace, (name, shape) in zip(chart["data"], PARTS, strict=True):
        assert trace["marker"]["color"] == rgb(colours[name][0])
        assert trace["marker"]["pattern"]["shape"] == shape


def test_tables_hold_the_numbers_given(shown: Opened) -> None:
    for panel in (bars(), lines()):
        exact = shown.cells(panel.name, attribute="title")
        assert [[float(cell) for cell in row] for row in exact] == panel.table.rows
        for row, given in zip(shown.cells(panel.name), panel.table.rows, strict=True):
            for cell, value in zip(row, given, strict=True):
                assert float(cell.replace(",", "")) == pytest.approx(value, rel=1e-3)
        heads = shown.page.locator(f"#panel-{panel.name} th").all_text_contents()
        assert tuple(heads) == panel.table.columns


def test_cells_are_written_readably(browser: Any, tmp_path: Path) -> None:
    rows = [
        [1234567, "1,234,567"],
        [1234567.891, "1,234,568"],
        [0.123456789, "0.1235"],
        [12.0, "12"],
        [-3.14159, "-3.142"],
        [0.0000123456, "1.23e-5"],
        [None, "\N{EN DASH}"],
        [True, "yes"],
        ["<b>&amp;", "<b>&amp;"],
    ]
    table = Table(("given", "written"), rows)
    write_page(Page("cells", [], [replace(lines(), table=table)]), tmp_path / "cells.html")
    with opened(browser, tmp_path / "cells.html") as page:
        for given, written in page.cells("lines"):
            assert given == written
        with page.page.expect_download() as download:
            page.page.get_by_role("button", name="Save as CSV").click()
        lines_of_file = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    assert download.value.suggested_filename == "lines.csv"
    assert lines_of_file[0] == "given,written"
    assert lines_of_file[1:4] == [
        '1234567,"1,234,567"',
        '1234567.891,"1,234,568"',
        "0.123456789,0.1235",
    ]


def test_long_tables_show_all_rows_when_asked(browser: Any, alone: Callable[[str], Path]) -> None:
    given = heat().table.rows
    with opened(browser, alone("heat")) as page:
        assert 100 < len(page.cells("heat")) < len(given)
        page.page.get_by_role("button", name="Show all 1,440 rows").click()
        assert len(page.cells("heat")) == len(given)


def test_absent_panels_say_why(shown: Opened) -> None:
    panel = panel_of_sample("drafted")
    section = shown.page.locator(f"#panel-{panel.name}")
    assert section.locator(".absent").inner_text() == panel.absent
    assert shown.charts(panel.name) == []
    assert section.locator("details:visible").count() == 0


def test_facts_contents_and_notes(shown: Opened) -> None:
    page = sample_page()
    assert shown.page.title() == page.title
    what = shown.page.locator("dt").all_text_contents()
    values = shown.page.locator("dd").all_text_contents()
    assert list(zip(what, values, strict=True)) == page.facts
    assert shown.page.locator("nav a").all_text_contents() == [each.title for each in page.panels]
    assert shown.page.locator("#notes li").all_text_contents() == page.notes
    for link in shown.page.locator("nav a").all():
        assert shown.page.locator(str(link.get_attribute("href"))).count() == 1


def test_texts_are_no_markup(browser: Any, tmp_path: Path) -> None:
    """A text with markup is shown as it stands, wherever it is, and runs nothing."""
    evil = "</script><script>window.ran = 1</script><!-- <script> <img src=x onerror=window.ran=1>"
    panel = replace(lines(), title=evil, aid=evil, table=Table((evil,), [[evil]]))
    panel.data[0]["name"] = evil
    page = Page(
        evil, [(evil, evil)], [panel, replace(panel, name="none", absent=evil)], [evil], evil
    )
    write_page(page, tmp_path / "evil.html")
    with opened(browser, tmp_path / "evil.html") as seen:
        assert seen.page.evaluate("window.ran") is None
        assert seen.page.title() == evil
        for where in (
            "h1",
            "#summary",
            "dt",
            "dd",
            "#panel-lines h2",
            "#panel-lines .aid",
            ".absent >> nth=1",
        ):
            assert seen.page.locator(where).text_content() == evil, where
        assert seen.cells("lines") == [[evil]]
        assert seen.errors == [] and seen.failed == []


@pytest.mark.parametrize("panel", ["experts", "hosted"])
def test_frames_are_those_given(browser: Any, alone: Callable[[str], Path], panel: str) -> None:
    given = frames_of_sample(panel)
    last = len(given.labels) - 1
    steps = [("End", last), ("ArrowLeft", last - 1), ("Home", 0), ("ArrowRight", 1)]
    with opened(browser, alone(panel)) as page:
        for key, step in steps:
            move(page, panel, key, step)
            now, total = page.charts(panel)
            expected = states(given, step)
            assert np.array_equal(now["data"][0]["z"], expected)
            assert np.array_equal(total["data"][0]["z"], uses(given, step))
            rows, columns = np.nonzero(expected == MISSED)
            assert now["data"][1]["x"] == columns.tolist()
            assert now["data"][1]["y"] == rows.tolist()
            assert page.page.locator(f"#panel-{panel} output").inner_text() == given.labels[step]
            counts = page.page.locator(f"#panel-{panel} .key b").all_text_contents()
            kinds = [AWAY, HELD, ASKED, MISSED] if given.host is None else range(5)
            assert [int(each.replace(",", "")) for each in counts] == [
                int((expected == kind).sum()) for kind in kinds
            ]


@pytest.mark.parametrize("panel", ["experts", "hosted"])
def test_words_tell_states_apart(browser: Any, alone: Callable[[str], Path], panel: str) -> None:
    """The words on hovering, of each state, and of those that the host's memory has too."""
    given = frames_of_sample(panel)
    expected = states(given, len(given.labels) - 1)
    host = bits(given.host, given) if given.host else np.zeros_like(expected)
    with opened(browser, alone(panel)) as page:
        texts = np.array(page.charts(panel)[0]["data"][0]["text"])
    said: dict[tuple[int, bool], set[str]] = {}
    for state, there, words in zip(expected.flat, host.flat, texts.flat, strict=True):
        said.setdefault((int(state), bool(there)), set()).add(str(words))
    assert all(len(words) == 1 for words in said.values())
    assert len(set.union(*said.values())) == len(said) == (4 if given.host is None else 8)


def test_table_of_the_step_follows_the_slider(browser: Any, alone: Callable[[str], Path]) -> None:
    given = frames_of_sample("experts")
    with opened(browser, alone("experts")) as page:
        for key, step in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2)):
            move(page, "experts", key, step)
            held, asked = bits(given.slots[step], given), bits(given.used[step], given)
            columns = [held, asked, asked & ~held, uses(given, step)]
            expected = np.stack([np.arange(given.layers), *(c.sum(axis=1) for c in columns)], 1)
            assert np.array_equal(np.array(page.cells("experts")).astype(int), expected)


def test_play_goes_to_the_end_and_stops(browser: Any, alone: Callable[[str], Path]) -> None:
    with opened(browser, alone("hosted")) as page:
        panel = page.page.locator("#panel-hosted")
        move(page, "hosted", "ArrowLeft", 4)
        move(page, "hosted", "ArrowLeft", 3)
        button = panel.get_by_role("button", name="Play")
        button.press("Enter")
        panel.locator(".experts[data-drawn='5']").wait_for()
        button.wait_for()
        assert panel.locator("input").input_value() == "5"


def test_themes(browser: Any, alone: Callable[[str], Path]) -> None:
    """The system's at first, then the one that the button says; charts follow."""
    colours = theme_colours()
    with opened(browser, alone("bars"), scheme="dark") as page:
        for theme, button in ((1, "Light theme"), (0, "Dark theme"), (1, "Light theme")):
            (chart,) = page.charts("bars")
            assert chart["data"][0]["marker"]["color"] == rgb(colours["draft"][theme])
            ground = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert ground == rgb(colours["background"][theme])
            page.page.get_by_role("button", name=button).click()
            page.page.evaluate("speqPage.show([])")
    with opened(browser, alone("bars"), scheme="light") as page:
        page.page.emulate_media(color_scheme="dark")
        page.wait_until(
            "rgb => document.querySelector('#panel-bars .chart').data[0].marker.color === rgb",
            rgb(colours["draft"][1]),
        )
        assert page.errors == []


@pytest.mark.parametrize("width_px", [320, 400, 700, 1400])
def test_no_page_is_wider_than_its_window(browser: Any, sample: Path, width_px: int) -> None:
    with opened(browser, sample, width_px=width_px) as page:
        for panel in ("bars", "lines", "heat", "experts"):
            page.cells(panel)
        assert page.overflow_px() <= 0
        # Charts and their parts stay in their boxes, and legends below the axes' titles.
        assert page.page.evaluate(PARTS_THAT_STICK_OUT) == []


# Names of parts of charts beyond the chart's own box, and of legends over titles of axes.
PARTS_THAT_STICK_OUT = """() => {
  const found = [];
  for (const chart of document.querySelectorAll(".js-plotly-plot")) {
    const box = chart.getBoundingClientRect();
    const name = chart.closest(".panel").id;
    const parts = ".legend, .xtitle, .ytitle, .xtick, .ytick, .colorbar";
    for (const part of chart.querySelectorAll(parts)) {
      const at = part.getBoundingClientRect();
      const out = at.left < box.left - 1 || at.right > box.right + 1 || at.top < box.top - 1
        || at.bottom > box.bottom + 1;
      if (out) found.push(`${name} ${part.getAttribute("class")}`);
    }
    const title = chart.querySelector(".xtitle").getBoundingClientRect();
    for (const part of chart.querySelectorAll(".legend, .cbtitle")) {
      const at = part.getBoundingClientRect();
      const over = at.top < title.bottom && title.top < at.bottom
        && at.left < title.right && title.left < at.right;
      if (over) found.push(`${name} ${part.getAttribute("class")} over the axis`);
    }
  }
  return found;
}"""


def test_charts_follow_the_window(browser: Any, sample: Path) -> None:
    with opened(browser, sample, width_px=1400) as page:
        page.page.set_viewport_size({"width": 500, "height": 900})
        page.wait_until(
            "() => [...document.querySelectorAll('.chart')].filter(chart => chart.layout)"
            ".every(chart => chart.layout.width === chart.clientWidth && chart.clientWidth < 500)"
        )
        assert page.overflow_px() <= 0


def test_panels_are_drawn_anew_in_place(browser: Any, sample: Path) -> None:
    """What a live page does: the same panels with other numbers, again and again."""
    longer = random_frames(8, 16, 14, seed=3)
    with opened(browser, sample) as page:
        names = page.page.locator(".panel").evaluate_all(
            "all => all.map(each => each.dataset.name)"
        )
        page.page.evaluate("document.querySelector('#panel-bars .chart').mine = true")
        page.cells("bars")
        panel = bars()
        panel.data[0]["y"] = [1.5] * len(panel.data[0]["y"])
        panel = replace(panel, table=Table(("step",), [[7]]))
        gone = replace(lines(), absent="Nothing yet.")
        given = [panel.to_dict(), gone.to_dict(), frames("experts", longer).to_dict()]
        new = replace(heat(4, 4), name="new", title="New").to_dict()
        page.page.evaluate("panels => speqPage.show(panels)", [*given, new])
        assert page.charts("bars")[0]["data"][0]["y"] == panel.data[0]["y"]
        assert page.page.evaluate("document.querySelector('#panel-bars .chart').mine") is True
        assert page.cells("bars") == [["7"]]
        assert page.page.locator("#panel-lines .absent").inner_text() == "Nothing yet."
        # Whoever looked at the last step looks at the new last one.
        assert np.array_equal(page.charts("experts")[0]["data"][0]["z"], states(longer, 13))
        now = panel_names(page)
        assert now == [*names, "new"]
        assert page.page.locator("nav a").last.inner_text() == "New"
        # And of an earlier step, at the same one.
        move(page, "experts", "Home", 0)
        page.page.evaluate("panels => speqPage.show(panels)", given)
        assert np.array_equal(page.charts("experts")[0]["data"][0]["z"], states(longer, 0))
        page.page.evaluate("panels => speqPage.show(panels)", [lines().to_dict()])
        assert page.page.locator("#panel-lines .absent").is_hidden()
        assert page.errors == []


def test_unknown_colours_are_told(browser: Any, tmp_path: Path) -> None:
    panel = bars()
    panel.data[0]["marker"]["color"] = "@stal"
    write_page(Page("colours", [], [panel, lines()]), tmp_path / "colours.html")
    with opened(browser, tmp_path / "colours.html") as page:
        assert "@stal" in page.page.locator("#panel-bars .absent").inner_text()
        assert any("@stal" in error for error in page.errors)
        assert len(page.charts("lines")) == 1


def test_keyboard_reaches_all_and_charts_have_words(browser: Any, sample: Path) -> None:
    panels = {panel.name: panel for panel in sample_page().panels}
    with opened(browser, sample) as page:
        page.page.keyboard.press("Tab")
        assert page.page.evaluate("document.activeElement.className") == "skip"
        page.page.keyboard.press("Enter")
        assert page.page.evaluate("document.activeElement.id") == "panels"
        outlined = 0
        for _ in range(4):
            page.page.keyboard.press("Tab")
            width = page.page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
            outlined += width == "3px"
        assert outlined == 4
        for chart in page.page.locator(".chart:visible").all():
            assert chart.get_attribute("role") == "img"
            panel = panels[str(chart.evaluate("each => each.closest('.panel').dataset.name"))]
            if panel.frames is None:
                assert chart.get_attribute("aria-label") == f"{panel.title}. {panel.aid}"
            else:
                assert panel.frames.labels[-1] in str(chart.get_attribute("aria-label"))


def test_a_large_page_is_under_5_mb() -> None:
    """Frames of 48 layers and 128 experts in 256 steps, and large heat maps with their tables."""
    panels: list[Panel] = [frames("experts", random_frames(48, 128, 256, seed=5, host=True))]
    panels += [heat(48, 128, name) for name in ("misses", "uses", "waits")]
    html = render(Page("large", [], panels))
    assert len(html.encode()) < 5_000_000


def test_pages_that_cannot_be_are_refused() -> None:
    panel = lines()
    cases = {
        "two panels are named lines": [panel, panel],
        "small letters": [replace(panel, name="Two words")],
        "a row of 1 cells; it must have 2": [replace(panel, table=Table(("a", "b"), [[1]]))],
        "infinite or none": [replace(panel, table=Table(("a",), [[float("nan")]]))],
    }
    for sentence, panels in cases.items():
        with pytest.raises(SpeqError, match=sentence):
            render(Page("refused", [], panels))


def test_page_is_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(sample_page(), path)
    before = path.read_bytes()
    with pytest.raises(SpeqError, match="two panels"):
        write_page(Page("refused", [], [lines(), lines()]), path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(SpeqError, match="cannot be written"):
        write_page(sample_page(), path / "below.html")
