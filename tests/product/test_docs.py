"""README and docs/: their commands parse, their links and paths exist, their figures are ours."""

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from speq import cli
from speq.models.families import FAMILIES
from speq.registries import CACHE_POLICIES, CODECS, DRAFTERS, PREFETCHERS, Registry
from tests.helpers.command import parse
from tests.helpers.lab import lab_commands
from tools import pages, run_docs

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


def options(command: Any) -> set[str]:
    """The names of a command's options and of all below it."""
    found = {name for each in command.params for name in each.opts + each.secondary_opts}
    for below in getattr(command, "commands", {}).values():
        found |= options(below)
    return found


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def speaks_of_a_gpu_speed(line: str) -> bool:
    return bool(GPU.search(line) and SPEED.search(line))


def test_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 180


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_commands_parse(command: run_docs.PrintedCommand) -> None:
    parse(command.words)


def test_commands_of_the_makefile_parse() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    printed = re.findall(r"\$\(BIN\)/speq (.*)$", makefile, re.MULTILINE)
    assert len(printed) >= 5
    for line in printed:
        # Lines that are shown, not run, stand in double quotes.
        quoted = line.endswith('"') and line.count('"') == 1
        parse(tuple(shlex.split(line.removesuffix('"') if quoted else line)))


def test_commands_are_found() -> None:
    """A page whose commands were not seen would pass whatever it printed."""
    assert len(COMMANDS) >= 30
    for page in PAGES:
        printed = page.read_text(encoding="utf-8").count(run_docs.SPEQ)
        assert len(run_docs.commands_of(page)) == printed, named(page)


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "models/tiny-moe", "--memory-budget", "1GiB", "--no-such-option"),
        ("plan", "models/tiny-moe"),
        ("nonsense",),
        ("bench", "tpot"),
    ],
)
def test_nonsense_does_not_parse(words: tuple[str, ...]) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|missing|no command"):
        parse(words)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_options_that_pages_speak_of_exist(page: Path) -> None:
    known = options(typer.main.get_command(cli.app)).union(*map(options, lab_commands().values()))
    spoken = set(re.findall(r"`(--[a-z][a-z-]*)", page.read_text(encoding="utf-8")))
    assert spoken <= known | {"--check", "--slow"}


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


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(
        r"\bmake ([a-z][a-z-]*)\b`|^    make ([a-z-]+)", page.read_text("utf-8"), re.M
    )
    for target in (one or other for one, other in targets):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


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


@pytest.mark.parametrize("name", ["README.md", "docs/running.md"])
def test_pages_name_every_family(name: str) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").split("Families", 1)[1]
    named_families = set(
        re.findall(r"`([a-z]+[0-9]*[a-z]*(?:_\w+)?)`", lines.partition(" by name")[0])
    )
    assert named_families == set(FAMILIES)


@pytest.mark.parametrize(
    ("registry", "name"),
    [
        (CACHE_POLICIES, "running.md"),
        (PREFETCHERS, "running.md"),
        (CODECS, "codecs.md"),
        (DRAFTERS, "drafts.md"),
    ],
)
def test_pages_have_a_row_for_everything_that_is_plugged_in(registry: Registry, name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert set(registry.names) <= set(re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE))


def test_code_blocks_are_read_as_printed() -> None:
    text = "a\n\n    one \\\n        --two\n\n```\nthree\n```\nfour\n"
    assert list(run_docs.code_lines(text)) == [(3, "one --two"), (7, "three")]


def test_commands_run_in_a_folder_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "c").mkdir()

    def here(*words: str, wide: bool = False) -> list[str]:
        return run_docs.here(run_docs.PrintedCommand(tmp_path, 1, words), tmp_path, wide)

    assert here("plan", "a/*/") == ["plan", "a/b", "a/c"]
    assert here("plan", "MODEL", "/tmp/x") == ["plan", "models/tiny-moe", f"{tmp_path}/tmp/x"]
    assert here("bench", "widen", "x") == ["bench", "widen", "x", *run_docs.SMALL]
    assert here("bench", "widen", "x", wide=True) == ["bench", "widen", "x"]
