"""`speq report` and `--picture`: from files to one page, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from speq.dashboard.panel import Page
from speq.dashboard.report import report_page as report
from speq.dashboard.run_panels import run_page
from speq.errors import SpeqError
from tests.helpers.command import Command, command_in_process
from tests.helpers.paths import BUNDLED, ROOT
from tests.helpers.run_records import RUN

RESULTS = ROOT / "bench" / "results"
CODEC = RESULTS / "codec-tiny-moe-widened-intel-xeon-2-cores.json"
SYSTEMS = RESULTS / "systems-tiny-moe-widened-intel-xeon-2-cores.json"
WANTED = "give JSON files that `speq bench NAME --json` or `speq profile` wrote, or folders of them"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command_in_process(monkeypatch, capsys)


def page_in(path: Path) -> dict[str, Any]:
    """What a page was made of, as it stands in its HTML."""
    text = path.read_text(encoding="utf-8")
    start = text.index('{"title": ', text.index('id="page"'))
    found: dict[str, Any] = json.JSONDecoder().raw_decode(text[start:])[0]
    return found


# Pages.


def test_one_file_is_a_page_of_its_panels() -> None:
    page = report.page_of([CODEC])
    content = json.loads(CODEC.read_text())
    assert page.title == f"codec: {content['model']}"
    assert [panel.name for panel in page.panels] == ["rows"]
    assert page.notes == []
    assert page.facts == [
        ("bench", "codec"),
        ("model", content["model"]),
        ("speq", f"{content['version']} at {content['commit']}"),
        (
            "machine",
            f"{content['machine']['processor']}, 2 cores, 23.5 GiB, Linux x86_64, "
            f"python {content['machine']['python']}, torch {content['machine']['torch']}",
        ),
        ("settings", "experts 256, threads 2"),
    ]


def test_several_files_are_told_apart() -> None:
    copy = RESULTS / "hit-rate-tiny-moe-amd-epyc-2-cores.json"
    page = report.page_of([CODEC, SYSTEMS, copy])
    assert page.title == "3 measurements"
    assert [name for name, _ in page.facts] == [CODEC.stem, SYSTEMS.stem, copy.stem]
    assert page.facts[0][1].startswith("bench: codec; model: FOLDER/model; speq: 0.1.0 at ")
    names = [panel.name for panel in page.panels]
    assert names == [
        f"{CODEC.stem}-rows",
        f"{SYSTEMS.stem}-tpot-ms",
        f"{copy.stem}-coverage-in-time",
    ]
    assert page.panels[0].title == f"What was measured ({CODEC.stem})"


def test_a_file_given_twice_has_names_of_its_own() -> None:
    page = report.page_of([CODEC, CODEC, CODEC])
    rows = f"{CODEC.stem}-rows"
    assert [panel.name for panel in page.panels] == [rows, f"{rows}-2", f"{rows}-3"]


def test_the_results_of_the_repository_are_one_page() -> None:
    page = report.page_of([RESULTS])
    files = sorted(path.stem for path in RESULTS.glob("*.json"))
    assert [name for name, _ in page.facts] == files
    assert len({panel.name for panel in page.panels}) == len(page.panels) >= len(files)
    assert not any("Left out" in note for note in page.notes)


def test_what_a_folder_holds_besides_is_left_out_and_named(tmp_path: Path) -> None:
    shutil.copy(CODEC, tmp_path / "codec.json")
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    (tmp_path / "cut.json").write_text(SYSTEMS.read_text()[:3000])
    (tmp_path / "rows.json").write_text('{"bench": "tpot", "rows": 3, "settings": {}}')
    (tmp_path / "text.txt").write_text("no JSON")
    page = report.page_of([tmp_path])
    assert [panel.name for panel in page.panels] == ["rows"]
    foreign, cut, damaged = page.notes
    assert foreign == (
        f"Left out: {tmp_path}/config.json is neither of a bench nor of a run; {WANTED}."
    )
    assert cut.startswith(f"Left out: {tmp_path}/cut.json is not valid JSON: ")
    assert cut.endswith("; measure again.")
    assert damaged == (
        f"Left out: {tmp_path}/rows.json cannot be drawn: rows is 3; it must be a list of "
        "objects: measure again."
    )


def test_runs_stand_beside_benches(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    RUN.write(path)
    assert report.page_of([path]) == run_page.page_of(RUN)
    page = report.page_of([path, CODEC])
    names = [f"run-{panel.name}" for panel in run_page.panels_of(RUN)]
    assert [panel.name for panel in page.panels][:-1] == names
    assert page.panels[-1].name == f"{CODEC.stem}-rows"
    assert page.facts[0][0] == "run"
    assert page.facts[0][1].startswith("model: by-hand; machine: abacus, 2 cores; ")
    assert page.notes == [f"run: {note}" for note in run_page.page_of(RUN).notes]


@pytest.mark.parametrize(
    "damage",
    [
        {"stats": {}},
        {"memory": {}},
        {"memory": None},
        {"steps": []},
        {"layers": 7},
        {"estimates": [{"draft_length": 1}]},
        {"link": "a rope"},
        {"steps": "abc"},
        {"expected": 3},
    ],
    ids=str,
)
def test_a_damaged_run_is_one_sentence(damage: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(json.loads(RUN.to_json()) | damage))
    with pytest.raises(
        SpeqError, match=r"run.json is .*; write (it again|one) with `speq profile`"
    ):
        report.page_of([path])


def test_a_cut_run_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"format": "speq-run-1", "model": "tiny"}')
    with pytest.raises(SpeqError, match=r"run.json is no run of format speq-run-1 .*; write one"):
        report.page_of([path])


def test_a_machine_and_settings_of_any_shape_are_told() -> None:
    assert report.machine_line(None) == "not recorded"
    machine = {"processor": "P", "cores": 4, "gpu": "H200", "memory_bytes": 1 << 30}
    assert report.machine_line(machine) == "P, 4 cores, 1 GiB, H200"
    settings = {
        "budgets": ["1GiB", "2GiB"],
        "rounds": 0,
        "prompts": None,
        "reference": False,
        "times": {"layer_s": 1.0},
        "run": {"device": "auto", "dtype": None, "drafter": "int4"},
        "note": "A remark.",
    }
    assert report.settings_line(settings) == "budgets 1GiB,2GiB, rounds 0, drafter int4"


# The command.


def test_the_command_writes_one_page(tmp_path: Path, command: Command) -> None:
    out = tmp_path / "pictures" / "report.html"
    ended = command("report", CODEC, SYSTEMS, "--out", out)
    assert (ended.code, ended.err) == (0, "")
    written = page_in(out)
    wanted = report.page_of([CODEC, SYSTEMS])
    assert ended.out == f"{out}: {len(wanted.panels)} pictures\n"
    assert [panel["name"] for panel in written["panels"]] == [p.name for p in wanted.panels]
    assert written["panels"][0]["table"]["rows"] == wanted.panels[0].table.rows
    before = out.read_bytes()
    ended = command("report", CODEC, "--out", out)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == f"error: {out} exists already; choose another name or add --force\n"
    assert out.read_bytes() == before
    ended = command("report", CODEC, "--out", out, "--force", "--quiet")
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    assert len(page_in(out)["panels"]) == 1


DEEP = "[" * 100 + "]" * 100


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "is not valid JSON: "),
        (CODEC.read_text()[:-200], "is not valid JSON: "),
        (DEEP, "is not valid JSON: it is nested deeper than 64 levels; measure again"),
        ("[1, 2]", "holds a JSON list; it must hold an object: measure again"),
        ("{}", f"is neither of a bench nor of a run; {WANTED}"),
        ('{"bench": 3}', f"is neither of a bench nor of a run; {WANTED}"),
        ('{"bench": "codec"}', "cannot be drawn: settings is missing; it must be an object"),
        (
            '{"bench": "codec", "settings": {}}',
            "cannot be drawn: rows is missing; it must be a list of objects: measure again",
        ),
        (
            '{"bench": "tpot", "settings": {}, "rows": [{"budget": "1GiB", "tpot_ms": "x"}]}',
            "cannot be drawn: rows[0].tpot_ms is 'x'; it must be a number: measure again",
        ),
    ],
)
def test_a_damaged_file_is_one_sentence(
    content: str, sentence: str, tmp_path: Path, command: Command
) -> None:
    path, out = tmp_path / "bench.json", tmp_path / "report.html"
    path.write_text(content)
    ended = command("report", path, "--out", out)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith(f"error: {path} ") and ended.err.count("\n") == 1
    assert sentence in ended.err
    assert not out.exists()


def test_nothing_to_draw_is_refused(tmp_path: Path, command: Command) -> None:
    out = tmp_path / "report.html"
    ended = command("report", tmp_path / "no.json", "--out", out)
    assert ended.code == 1 and ended.err.endswith(f"; {WANTED}\n")
    ended = command("report", tmp_path, "--out", out)
    assert ended.err == f"error: {tmp_path} holds nothing to draw; {WANTED}\n"
    (tmp_path / "config.json").write_text("{}")
    ended = command("report", tmp_path, "--out", out)
    said = f"{tmp_path} holds nothing to draw: {tmp_path}/config.json is neither of a bench nor"
    assert ended.err.startswith(f"error: {said}")
    assert not out.exists()


def test_a_page_that_cannot_be_written_is_refused_first(tmp_path: Path, command: Command) -> None:
    ended = command("report", tmp_path / "no.json", "--out", tmp_path)
    said = f"error: {tmp_path} cannot be written; choose a file in a folder of yours\n"
    assert (ended.code, ended.err) == (1, said)


# What benches draw.


def test_a_bench_draws_what_it_found(tmp_path: Path, command: Command) -> None:
    out, kept = tmp_path / "tpot.html", tmp_path / "tpot.json"
    small = ("--budgets", "18MiB", "--draft-lengths", 0, "--num-prompts", 1, "--max-new-tokens", 2)
    given = ("bench", "tpot", BUNDLED, *small, "--rounds", 1)
    ended = command(*given, "--json", kept, "--picture", out)
    assert ended.code == 0, ended.err
    drawn, of_file = page_in(out), report.page_of([kept])
    names = [panel["name"] for panel in drawn["panels"]]
    assert names == ["tpot", "moved", "shares", "ttft", "hit-rate", "acceptance"]
    tables = [panel["table"]["rows"] for panel in drawn["panels"]]
    assert tables == [panel.table.rows for panel in of_file.panels]
    # Nothing is replaced unasked, nor measured before that is known.
    before = out.read_bytes()
    ended = command(*given, "--picture", out)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == f"error: {out} exists already; choose another name or add --force\n"
    assert out.read_bytes() == before
    ended = command(*given, "--json", "-", "--picture", out, "--force")
    assert ended.code == 0 and json.loads(ended.out)["bench"] == "tpot"


def test_a_full_disk_leaves_no_page(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    ended = command("report", CODEC, "--out", tmp_path / "report.html")
    assert ended.code == 1
    assert "cannot be written: No space left on device" in ended.err
    assert not [*tmp_path.iterdir()]


def test_pages_of_no_source_say_why() -> None:
    page = report.page_of_sources([], ["a.json is not valid JSON"])
    assert page == Page("0 measurements", [], [], ["Left out: a.json is not valid JSON."])
