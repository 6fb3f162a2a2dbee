"""`speq profile`: what it writes, and what a browser makes of it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from speq.dashboard.run_panels import panels_of
from speq.dashboard.run_record import read_run
from tests.helpers.browser import opened
from tests.helpers.command import Command

if TYPE_CHECKING:
    from playwright.sync_api import Browser

RUN = ("--memory-budget", "22MiB", "--prompt", "The sea", "--max-new-tokens", 24, "--ignore-eos")


@pytest.fixture(scope="module")
def profiled(bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the bundled model, most of whose experts come from the disk."""
    from speq.cli import app

    folder = tmp_path_factory.mktemp("profiled") / "run"
    given = ["profile", bundled, *RUN, "--draft-length", 3, "--quiet", "--out", folder]
    app([str(each) for each in given], standalone_mode=False)
    return folder


def content(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def test_three_files_of_one_run(profiled: Path) -> None:
    assert sorted(path.name for path in profiled.iterdir()) == [
        *("report.html", "run.json", "trace.json")
    ]
    run = read_run(profiled / "run.json")
    assert run.stats["new_tokens"] == len(run.tokens) == 24
    spans = [e for e in content(profiled, "trace.json")["traceEvents"] if e["ph"] == "X"]
    drafts_ms = sum(e["dur"] for e in spans if e.get("cat") == "draft") / 1e3
    assert drafts_ms == pytest.approx(run.stats["draft_s"] * 1e3, abs=0.01)
    assert drafts_ms == pytest.approx(sum(s.figures["draft_ms"] for s in run.steps), abs=0.1)


def test_the_same_command_again_replaces_nothing(
    profiled: Path, bundled: Path, command: Command
) -> None:
    before = (profiled / "run.json").read_bytes()
    done = command("profile", bundled, *RUN, "--out", profiled)
    assert done.code == 1
    assert "trace.json exists" in done.err
    assert (profiled / "run.json").read_bytes() == before


def test_an_object_is_printed(bundled: Path, tmp_path: Path, command: Command) -> None:
    done = command("profile", bundled, *RUN, "--out", tmp_path / "run", "--json", "-")
    assert done.code == 0
    found = json.loads(done.out)
    assert found["stats"] == content(tmp_path / "run", "run.json")["stats"]
    assert found["files"]["report.html"] == str(tmp_path / "run" / "report.html")


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ((), "give one of --prompt and --prompt-file; neither was given"),
        (("--prompt", "a", "--nonsense", "b"), "No such option"),
    ],
)
def test_nonsense_is_refused(
    more: tuple[str, ...], sentence: str, bundled: Path, tmp_path: Path, command: Command
) -> None:
    given = ("--memory-budget", "22MiB", "--out", tmp_path / "run", *more)
    done = command("profile", bundled, *given)
    assert done.code != 0
    assert sentence in done.err
    assert not (tmp_path / "run").exists()


def test_charts_hold_the_numbers_of_the_run(profiled: Path, browser: "Browser") -> None:
    panels = panels_of(read_run(profiled / "run.json"))
    with opened(browser, profiled / "report.html") as page:
        assert (page.errors, page.failed) == ([], [])
        for panel in panels:
            if panel.frames is not None or panel.absent:
                continue
            (chart,) = page.charts(panel.name)
            assert len(chart["data"]) == len(panel.data)
            for drawn, given in zip(chart["data"], panel.data, strict=True):
                for axis in ("x", "y", "z"):
                    if axis in given:
                        assert drawn[axis] == given[axis], (panel.name, given.get("name"), axis)
        # By a way of its own: the longest step, and the bytes of the run.
        run = content(profiled, "run.json")
        decode = [step for step in run["steps"] if step["phase"] == "decode"]
        bars = [t for t in page.charts("steps")[0]["data"] if min(t["y"]) >= 0]
        heights = [sum(values) for values in zip(*(t["y"] for t in bars), strict=True)]
        assert max(heights) == pytest.approx(
            max(step["end_ms"] - step["start_ms"] for step in decode), abs=0.01
        )
        moved = sum(sum(t["y"]) for t in page.charts("bytes")[0]["data"][:2])
        assert moved * (1 << 20) == pytest.approx(run["stats"]["moved_bytes"])


@pytest.mark.parametrize("width_px", [400, 1400])
def test_nothing_is_wider_than_the_window(
    width_px: int, profiled: Path, browser: "Browser"
) -> None:
    with opened(browser, profiled / "report.html", width_px, "dark") as page:
        assert page.overflow_px() <= 0
        assert page.errors == []
