"""`speq bench all`: its steps, going on where it was interrupted, and the page it writes."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from speq.bench.settings import AllSettings
from speq.bench.suite import suite
from speq.bench.suite.page import MODULES, sections, table
from speq.bench.suite.steps import WIDENED_BYTES, SuiteStep, budgets_of, steps_of
from speq.cli import app
from speq.cli.bench import BENCHES, function_of
from speq.cli.from_dataclass import command
from speq.config import RunConfig
from speq.errors import SpeqError
from speq.files.checkpoint import EXPERTS_MANIFEST
from tests.helpers.paths import BUNDLED, ROOT

Folder = Callable[[str], Path]


class Machine:
    """Runs no process: writes what each would, and remembers the commands."""

    def __init__(self, failing: str = "") -> None:
        self.ran: list[str] = []
        self.failing = failing

    def __call__(self, command: list[str], **_: Any) -> SimpleNamespace:
        arguments = command[3:]
        name = arguments[1] if arguments[0] == "bench" else arguments[0]
        self.ran.append(name)
        if "--json" in arguments and name != self.failing:
            path = Path(arguments[arguments.index("--json") + 1])
            path.write_text(json.dumps({"rows": [ROWS[path.stem]]}))
        elif name != self.failing and "--json" not in arguments:
            made = arguments[3] if name == "widen" else arguments[arguments.index("--out") + 1]
            Path(made).mkdir()
        return SimpleNamespace(returncode=int(name == self.failing))


ROWS = {
    "tpot": {"budget": "1GiB", "tpot_ms": 12.25},
    "codec": {"codec": "raw", "bits": 16.0},
}
COLUMNS = {"budget": ("budget", "{}"), "TPOT ms": ("tpot_ms", "{:.1f}")}


@pytest.fixture
def steps(tmp_path: Path) -> list[SuiteStep]:
    return [
        SuiteStep(
            "widen",
            ["bench", "widen", "model", str(tmp_path / "out" / "m")],
            60,
            makes=tmp_path / "out" / "m",
        ),
        SuiteStep("tpot", ["bench", "tpot", "model"], 120),
        SuiteStep("codec", ["bench", "codec", "model"], 60),
    ]


def run(
    monkeypatch: pytest.MonkeyPatch,
    steps: list[SuiteStep],
    out: Path,
    failing: str = "",
    quiet: bool = False,
) -> tuple[list[str], Any]:
    machine = Machine(failing)
    monkeypatch.setattr(suite, "subprocess", SimpleNamespace(run=machine, DEVNULL=None))
    monkeypatch.setattr(suite, "steps_of", lambda model, settings: steps)
    monkeypatch.setattr(suite, "current_commit", lambda: "abc")
    monkeypatch.setattr(suite.page, "sections", lambda found: [str(found["rows"])])
    report = suite.run("model", AllSettings(out=out), quiet)
    return machine.ran, report


def test_what_is_done_is_not_done_again(
    monkeypatch: pytest.MonkeyPatch, steps: list[SuiteStep], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run(monkeypatch, steps, out)[0] == ["widen", "tpot", "codec"]
    assert run(monkeypatch, steps, out)[0] == []
    (out / "codec.json").unlink()
    assert run(monkeypatch, steps, out)[0] == ["codec"]
    steps[1] = SuiteStep("tpot", ["bench", "tpot", "model", "--rounds", "1"], 120)
    assert run(monkeypatch, steps, out)[0] == ["tpot"]
    ran, report = run(monkeypatch, steps, out)
    assert ran == []
    assert [row["step"] for row in report.rows] == ["widen", "tpot", "codec"]
    page = (out / "report.md").read_text()
    assert "    speq bench tpot model --rounds 1\n" in page
    assert "[{'budget': '1GiB', 'tpot_ms': 12.25}]" in page
    assert (out / "tpot.txt").read_text().startswith("$ speq bench tpot model --rounds 1\n")
    # These files say nothing of their benches.
    pictures = (out / "report.html").read_text()
    for name in ("tpot", "codec"):
        assert f"Left out: {out / name}.json is neither of a bench nor of a run" in pictures


def test_other_code_measures_again_and_makes_no_models_again(
    monkeypatch: pytest.MonkeyPatch, steps: list[SuiteStep], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(monkeypatch, steps, out)
    journal = json.loads((out / "steps.json").read_text())
    for step in journal.values():
        step["code"] = "0.0 older"
    (out / "steps.json").write_text(json.dumps(journal))
    assert run(monkeypatch, steps, out)[0] == ["tpot", "codec"]


def test_a_step_that_fails_is_told_of_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
    steps: list[SuiteStep],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    ran, report = run(monkeypatch, steps, out, failing="widen")
    assert ran == ["widen", "tpot", "codec"]
    assert report.rows[0]["failure"] == "ended with exit status 1; it said why above"
    said = capsys.readouterr().err
    assert "3 of 3 steps are left: about 1 min to make models, and 3 min to measure" in said
    assert "step 2 of 3: tpot; about 3 min left in all" in said
    assert "widen failed: ended with exit status 1" in said
    assert run(monkeypatch, steps, out)[0] == ["widen"]


def test_quiet_tells_of_failures_alone(
    monkeypatch: pytest.MonkeyPatch,
    steps: list[SuiteStep],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(monkeypatch, steps, tmp_path / "out", "codec", quiet=True)
    assert capsys.readouterr().err == "codec failed: ended with exit status 1; it said why above\n"


def test_an_interrupted_widening_begins_anew_and_a_users_folder_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, steps: list[SuiteStep], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    made = out / "m"
    made.mkdir(parents=True)
    (made / "file").write_text("a user's")
    for _ in range(2):
        with pytest.raises(SpeqError, match="is there, and this command did not make it"):
            run(monkeypatch, steps, out)
    assert (made / "file").exists()
    (made / "file").unlink()
    made.rmdir()
    run(monkeypatch, steps, out)
    journal = json.loads((out / "steps.json").read_text())
    journal["widen"]["failure"] = "was interrupted"
    (out / "steps.json").write_text(json.dumps(journal))
    (made / "half").write_text("")
    assert run(monkeypatch, steps, out)[0] == ["widen"]
    assert [*made.iterdir()] == []


def test_a_folder_that_is_none_of_ours_is_refused(
    monkeypatch: pytest.MonkeyPatch, steps: list[SuiteStep], tmp_path: Path
) -> None:
    (tmp_path / "steps.json").write_text('{"tpot": {"minutes": 3}}')
    with pytest.raises(SpeqError, match=r"steps.json is no list of steps that were done"):
        run(monkeypatch, steps, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SpeqError, match=r"cannot be made: .*; give another --out"):
        run(monkeypatch, steps, tmp_path / "file")


def test_a_small_model_is_widened_first_and_a_large_one_is_not(
    tiny_bfloat16: Folder, tmp_path: Path
) -> None:
    settings = AllSettings(out=tmp_path / "out")
    small = steps_of(str(tiny_bfloat16("qwen3_moe")), settings)
    assert [step.name for step in small][:4] == ["widen", "quantize", "pack-lossless", "tpot"]
    tpot = small[3].command
    assert tpot[2] == str(tmp_path / "out" / "model")
    assert tpot[tpot.index("--budgets") + 1] == "1926MiB,2881MiB,5570MiB"
    full = steps_of(str(tiny_bfloat16("qwen3_moe")), AllSettings(out=tmp_path, full=True))
    assert [step.name for step in full][3] == "pack-residual"
    assert [step.name for step in full][-4:] == ["variants", "transfer", "kernels", "neighbours"]
    assert full[-1].command[-2:] == ["--neighbours", "1"]
    variants = next(step for step in full if step.name == "variants").command
    for at in (at for at, each in enumerate(variants) if each == "--variants"):
        name, value = variants[at + 1].split("=")
        RunConfig.of("1GiB", **{name.replace("-", "_"): value})  # or raises


def test_every_step_is_a_command_that_speq_takes(tmp_path: Path) -> None:
    """Parsed and checked as the command line does, and not run."""
    for step in steps_of(str(BUNDLED), AllSettings(out=tmp_path / "out", full=True)):
        of_command, arguments = typer.main.get_command(app), list(step.command)
        while hasattr(of_command, "commands"):
            of_command = of_command.commands[arguments.pop(0)]
        context = of_command.make_context("speq", arguments)
        assert not context.args
        for bench in BENCHES:
            if step.command[:2] == ["bench", bench.name]:
                (settings,) = (
                    part
                    for part in command(function_of(bench)).parameters
                    if part.name == "settings"
                )
                assert isinstance(settings.value(context.params), bench.settings)


def test_budgets_of_a_model_that_a_process_would_outweigh() -> None:
    settings = AllSettings(out=Path("out"))
    assert len(budgets_of(settings, WIDENED_BYTES)) == 3
    with pytest.raises(SpeqError, match=r"leaves next to nothing .*; give --budgets"):
        budgets_of(settings, 1 << 30)
    given = AllSettings(out=Path("out"), budgets=("1GiB",))
    assert budgets_of(given, 1 << 20) == ["1GiB"]


def test_a_packed_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / EXPERTS_MANIFEST).write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SpeqError, match="is packed; give the folder as it was published"):
        steps_of(str(tmp_path), AllSettings(out=tmp_path / "out"))


# What each bench wrote once, as committed.
MEASURED = {
    "tpot-systems": "systems-in-memory-tiny-moe-widened-intel-xeon-2-cores",
    "transfer": "transfer-tiny-moe-widened-amd-epyc-2-cores",
    "kernels": "kernels-amd-epyc-2-cores",
}


@pytest.mark.parametrize("bench", MEASURED)
def test_the_page_shows_what_a_bench_wrote(bench: str) -> None:
    assert bench in MODULES
    found = json.loads((ROOT / "bench" / "results" / f"{MEASURED[bench]}.json").read_text())
    shown = "\n".join(sections(found)).splitlines()
    # A line of names and a line of dashes; a contest has one more table, by kind of prompt.
    tables = 2 if bench == "tpot-systems" else 1
    expected = tables * (len(found["rows"]) + 2)
    assert sum(line.startswith("|") for line in shown) == expected


def test_tables_are_markdown() -> None:
    rows = [{"budget": "1GiB", "tpot_ms": 12.25}, {"budget": "2GiB", "tpot_ms": None}]
    assert table(COLUMNS, rows) == (
        "| budget | TPOT ms |\n| --- | --- |\n| 1GiB | 12.2 |\n| 2GiB | - |\n"
    )
