"""Pictures of benches: what their declarations draw of rows, and what is refused."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from speq.dashboard.panel import Panel
from speq.dashboard.report.pictures import DEFAULTS, PATTERNS, panels_of
from speq.errors import SpeqError
from speq.measure.picture import BUDGET, TPOT, Axis, Picture, percent
from tests.helpers.panels import check
from tests.helpers.paths import ROOT

RESULTS = sorted((ROOT / "bench" / "results").glob("*.json"))
ROWS: list[dict[str, Any]] = [
    {"budget": "2GiB", "k": 0, "variant": "", "tpot_ms": 30.0, "p90": 36.0, "hits": None, "n": 3},
    {"budget": "2GiB", "k": 4, "variant": "", "tpot_ms": 20.0, "p90": None, "hits": 0.5, "n": 1},
    {"budget": "4GiB", "k": 0, "variant": "", "tpot_ms": 10.0, "p90": 11.5, "hits": 0.25, "n": 2},
    {"budget": "4GiB", "k": 4, "variant": "", "tpot_ms": 5.0, "p90": 5.0, "hits": 1, "n": 4},
]
BY = (Axis("k", "draft length"), Axis("variant", "variant"))
TIMES = Picture("tpot", "Time per output token", (BUDGET,), (TPOT,), BY)


def draw(picture: Picture, rows: list[dict[str, Any]] = ROWS, **more: Any) -> list[Panel]:
    """The panels of a report that went through JSON."""
    report = {"bench": "x", "rows": rows, "pictures": [asdict(picture)]} | more
    panels = panels_of(json.loads(json.dumps(report)))
    for panel in panels:
        if not panel.absent:
            check(panel)
    return panels


def test_a_series_for_each_name_in_which_rows_differ() -> None:
    (panel,) = draw(TIMES)
    assert [(each["name"], each["x"], each["y"]) for each in panel.data] == [
        ("draft length 0", ["2GiB", "4GiB"], [30.0, 10.0]),
        ("draft length 4", ["2GiB", "4GiB"], [20.0, 5.0]),
    ]
    assert panel.layout["xaxis"]["title"]["text"] == "memory budget"
    assert panel.layout["yaxis"]["title"]["text"] == "time per output token, ms"
    assert panel.layout["barmode"] == "group" and panel.layout["showlegend"]
    assert panel.table.columns == (
        *("memory budget", "draft length", "variant", "time per output token, ms"),
    )
    assert panel.table.rows[1] == ["2GiB", 4, "", 20.0]


def test_error_bars_end_where_rows_say() -> None:
    (panel,) = draw(replace(TIMES, high="p90", mark="points"))
    assert panel.data[0]["error_y"]["array"] == [6.0, 1.5]
    assert panel.data[1]["error_y"]["array"] == [0.0, 0.0]
    assert panel.data[0]["error_y"]["arrayminus"] == [0.0, 0.0]
    assert panel.layout["yaxis"]["rangemode"] == "tozero"
    far = [row | {"tpot_ms": row["tpot_ms"] * 10 ** row["k"]} for row in ROWS]
    (panel,) = draw(replace(TIMES, mark="points"), far)
    assert panel.layout["yaxis"]["type"] == "log"


def test_figures_are_shown_in_their_units() -> None:
    (panel,) = draw(Picture("hits", "Hits", (BUDGET,), (percent("hits", "hits"),), BY))
    assert [each["y"] for each in panel.data] == [[None, 25.0], [50.0, 100.0]]


def test_several_figures_are_a_stack_over_several_names() -> None:
    figures = (percent("hits", "hits"), percent("misses", "misses"))
    rows = [row | {"misses": 0.5} for row in ROWS]
    (panel,) = draw(Picture("parts", "Parts", (BUDGET, BY[0]), figures, mark="stack"), rows)
    places = ["2GiB, 0", "2GiB, 4", "4GiB, 0", "4GiB, 4"]
    assert [(each["name"], each["x"], each["y"]) for each in panel.data] == [
        ("hits", places, [None, 50.0, 25.0, 100.0]),
        ("misses", places, [50.0] * 4),
    ]
    assert panel.layout["barmode"] == "stack"
    assert panel.layout["yaxis"]["title"]["text"] == "parts, %"


def test_lines_go_along_a_scale() -> None:
    (panel,) = draw(Picture("n", "Over n", (Axis("n", "n"),), (TPOT,), mark="lines"))
    (line,) = panel.data
    assert (line["x"], line["y"]) == ([1, 2, 3, 4], [20.0, 10.0, 30.0, 5.0])
    assert panel.layout["xaxis"]["type"] == "linear"


def test_a_picture_for_each_value_and_rows_that_are_left_out() -> None:
    panels = draw(replace(TIMES, by=(), each="k"))
    assert [(panel.name, panel.title) for panel in panels] == [
        ("tpot-0", "Time per output token, 0"),
        ("tpot-4", "Time per output token, 4"),
    ]
    assert panels[1].data[0]["y"] == [20.0, 5.0]
    (panel,) = draw(replace(TIMES, without="4GiB"))
    assert [each["y"] for each in panel.data] == [[30.0], [20.0]]


def test_other_lists_of_a_report_are_drawn_where_it_has_them() -> None:
    elsewhere = replace(TIMES, rows="positions")
    assert draw(elsewhere)[0].name == "rows"
    (panel,) = draw(elsewhere, positions=ROWS[:1])
    assert panel.data[0]["y"] == [30.0]


def test_what_has_no_figures_says_so() -> None:
    (panel,) = draw(Picture("x", "X", (BUDGET,), (Axis("nothing", "nothing, ms"),)))
    assert panel.absent == "The file has no figures of this kind: nothing, ms."


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_of_older_versions_are_drawn_by_their_kind(path: Path) -> None:
    report = json.loads(path.read_text())
    panels = panels_of(report)
    if report["bench"] not in DEFAULTS:
        assert [panel.name for panel in panels] == ["rows"]
        assert len(panels[0].table.rows) == len(report["rows"])
        return
    (panel,) = panels
    if len(panel.data) <= len(PATTERNS):
        check(panel)
    (figure,) = DEFAULTS[report["bench"]].y
    drawn = [value for trace in panel.data for value in trace["y"]]
    wanted = [row.get(figure.key) for row in report["rows"]]
    assert sorted(filter(None, drawn)) == sorted(filter(None, wanted))
    # No two rows share a place in a series.
    assert all(len(set(trace["x"])) == len(trace["x"]) for trace in panel.data)


GOOD = asdict(TIMES)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ({"pictures": 3}, "pictures is 3; it must be a list of objects"),
        ({"pictures": [7]}, "pictures[0] is 7; it must be a picture as benches declare them"),
        ({"pictures": [GOOD | {"colour": "red"}]}, "pictures[0] is "),
        ({"pictures": [GOOD | {"x": [{"key": 3, "title": ""}]}]}, "pictures[0] is "),
        ({"pictures": [GOOD | {"y": []}]}, "pictures[0] is "),
        ({"pictures": [GOOD | {"mark": "pie"}]}, "pictures[0] is "),
        ({"rows": 3}, "rows is 3; it must be a list of objects"),
        ({"rows": []}, "rows is an empty list, and there is nothing to draw"),
        ({"rows": [{"tpot_ms": "x"}]}, "rows[0].tpot_ms is 'x'; it must be a number"),
        ({"rows": [{"tpot_ms": 1e999}]}, "rows[0].tpot_ms is inf; it must be a number"),
        ({"rows": [{"k": [1]}]}, "rows[0].k is [1]; it must be a name or a number"),
    ],
)
def test_damage_is_a_sentence(damage: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpeqError) as raised:
        panels_of({"bench": "x", "rows": ROWS, "pictures": [GOOD]} | damage)
    assert str(raised.value).startswith(sentence)
    assert str(raised.value).endswith("measure again")
