"""README and docs/: commands parse, links and paths lead somewhere, generated parts are current."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import typer

from speq.cli.demo import NEXT
from speq.models.families import FAMILIES
from speq.registries import CACHE_POLICIES, CODECS, DRAFTERS, PREFETCHERS
from tests.helpers.command import parse
from tests.helpers.paths import METADATA
from tools import models_page, pages, run_docs

ROOT = Path(pages.__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = [command for page in PAGES for command in run_docs.commands_of(page)]
# Folders whose files pages name; paths that begin otherwise are a reader's own.
FOLDERS = "speq|scheduler|governor|bench|csrc|tests|tools|docs|models"
# A speed that a GPU would have, in a line that speaks of one.
GPU = re.compile(r"\b(gpu|cuda|rtx[- ]?\d+|[ahbl]\d00|nvidia)\b", re.IGNORECASE)
SPEED = re.compile(r"\d\s*(ms|GB/s|TB/s|tokens?\s*(/|a|per)\s*s(econd)?|tok/s|x faster)\b", re.I)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def speaks_of_a_gpu_speed(line: str) -> bool:
    return bool(GPU.search(line) and SPEED.search(line))


@pytest.mark.parametrize(
    ("name", "lines"), [("README.md", 180), ("docs/figures.md", 250), ("docs/structures.md", 60)]
)
def test_short_pages_stay_short(name: str, lines: int) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= lines


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_commands_parse(command: run_docs.Command) -> None:
    if not command.in_lab:
        parse(command.words)
        return
    from bench.lab.command import app_of

    name, *arguments = command.words
    typer.main.get_command(app_of(name.removeprefix(run_docs.LAB))).make_context(name, arguments)


def test_commands_to_try_after_the_demonstration_parse() -> None:
    assert len(NEXT) >= 4
    for command, arguments in NEXT:
        parse((*command.split(), "models/tiny-moe", *shlex.split(arguments)))


def test_commands_are_found() -> None:
    """A page whose commands were not seen would pass whatever it printed."""
    assert len(COMMANDS) >= 30
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        printed = text.count(run_docs.SPEQ) + text.count(run_docs.PYTHON + run_docs.LAB)
        assert len(run_docs.commands_of(page)) == printed, named(page)


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "models/tiny-moe", "--memory-budget", "1GiB", "--no-such-option"),
        ("nonsense",),
        ("bench", "shapes", "Moonlight-16B-A3B"),
    ],
)
def test_nonsense_does_not_parse(words: tuple[str, ...]) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|missing|no command"):
        parse(words)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_that_pages_name_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    # Beside a path: no letter, dash or slash, so that `/tmp/docs/x` and `a/speq/b` are others'.
    paths = re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w./*-]*[\w/*])", text)
    missing = [path for path in paths if not any(ROOT.glob(path.rstrip("/")))]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        if not linked.exists() or (
            anchor and anchor not in anchors(linked.read_text(encoding="utf-8"))
        ):
            broken.append(target)
    assert broken == []


def test_tests_that_pages_name_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "threats.md").read_text())
    assert len(named) > 12
    for file, test in named:
        assert f"\ndef {test}(" in (ROOT / file).read_text(), f"{file}::{test}"


def test_printed_make_targets_and_tools_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    targets = re.findall(r"^    make ([a-z-]+)", text, re.MULTILINE)
    modules = re.findall(r"python -m ((?:tools|tests)[\w.]*)", text)
    assert targets and modules
    assert [one for one in targets if not re.search(rf"^{one}:", makefile, re.MULTILINE)] == []
    assert [one for one in modules if not any(ROOT.glob(one.replace(".", "/") + "*"))] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_no_page_has_a_gpu_speed(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if speaks_of_a_gpu_speed(line)] == []


def test_a_gpu_speed_would_be_seen() -> None:
    assert speaks_of_a_gpu_speed("On a GPU a token takes 12.5 ms.")
    assert speaks_of_a_gpu_speed("| RTX 4090 | 900 GB/s |")
    assert not speaks_of_a_gpu_speed("A token takes 12.5 ms on two cores.")
    assert not speaks_of_a_gpu_speed("On a GPU the slow tier is pinned host memory.")


def test_python_of_pages_compiles() -> None:
    programs = [program for page in PAGES for program in run_docs.programs_of(page)]
    assert programs
    for program in programs:
        ast.parse(program)


@pytest.mark.parametrize("name", sorted(pages.pages()))
def test_pages_made_from_the_code_are_current(name: str) -> None:
    path = ROOT / "docs" / name
    assert path.read_text(encoding="utf-8") == pages.pages()[name], "run python tools/pages.py"


def test_what_families_were_tested_on_is_current() -> None:
    """What the tests' own lists say; cells of published files stay as they are."""
    page = models_page.PAGE.read_text(encoding="utf-8")
    assert models_page.with_tested(page) == page, "run python -m tools.models_page"


@pytest.mark.skipif(not METADATA.is_dir(), reason="no metadata of published models lies here")
def test_what_published_files_say_of_families_is_current() -> None:
    page = models_page.PAGE.read_text(encoding="utf-8")
    made = models_page.with_tested(page, METADATA)
    assert made == page, "run python -m tools.models_page --published FOLDER"


@pytest.mark.wide
def test_what_fits_which_memory_is_current() -> None:
    page = models_page.PAGE.read_text(encoding="utf-8")
    assert models_page.with_memory(page) == page, "run python -m tools.models_page"


def test_tables_of_models_have_rows_for_a_family_that_comes(tmp_path: Path) -> None:
    """A page without rows, as with the rows of fewer families, gets all of them."""
    page = models_page.PAGE.read_text(encoding="utf-8")
    empty = models_page.with_table(page, models_page.TESTED_HEADS, [])
    made = models_page.with_tested(empty)
    rows = models_page.rows_in(made, models_page.TESTED_HEADS)
    assert [row[0] for row in rows] == [f"`{name}`" for name in FAMILIES]
    assert {tuple(row[-2:]) for row in rows} == {("-", "-")}
    assert made.replace("\n", "").startswith(page.split("| `qwen2_moe` | 5")[0].replace("\n", ""))
    with pytest.raises(SystemExit, match=r"has no table of \| family"):
        models_page.rows_in("# Models", models_page.TESTED_HEADS)


def test_readme_names_every_family() -> None:
    row = re.search(r"^\| Families \|.*$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert row
    assert set(re.findall(r"`([a-z]\w+)`", row[0].partition(";")[0])) == set(FAMILIES)


@pytest.mark.parametrize(
    ("names", "page"),
    [
        (CACHE_POLICIES.names, "running.md"),
        (PREFETCHERS.names, "running.md"),
        (CODECS.names, "codecs.md"),
        (DRAFTERS.names, "drafts.md"),
        (tuple(FAMILIES), "models.md"),
    ],
)
def test_pages_have_a_row_for_everything_that_is_plugged_in(
    names: tuple[str, ...], page: str
) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert set(names) <= set(re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE))


def test_code_blocks_are_read_as_printed() -> None:
    text = "a\n\n    one \\\n        --two\n\n```\nthree\n```\nfour\n"
    assert list(run_docs.code_lines(text)) == [(3, "one --two"), (7, "three")]


def test_commands_run_in_a_folder_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "c").mkdir()

    def here(*words: str, wide: bool = False) -> list[str]:
        return run_docs.here(run_docs.Command(tmp_path, 1, words), tmp_path, wide)

    assert here("plan", "a/*/") == ["plan", "a/b", "a/c"]
    assert here("plan", "MODEL", "/tmp/x") == ["plan", "models/tiny-moe", f"{tmp_path}/tmp/x"]
    assert here("bench", "widen", "x") == ["bench", "widen", "x", *run_docs.SMALL]
    assert here("bench", "widen", "x", wide=True) == ["bench", "widen", "x"]
