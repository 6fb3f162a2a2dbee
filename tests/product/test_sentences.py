"""What sentences tell a reader to run exists: commands, their options, packages."""

import ast
import re
import tomllib
from functools import cache
from typing import Any

import pytest
import typer

from speq import cli
from tests.helpers.lab import lab_commands
from tests.helpers.sentences import PAGES, ROOT, SOURCES, Said, literals, texts_of

SAID = [said for file in (*SOURCES, *PAGES) for said in texts_of(file)]
APP: Any = typer.main.get_command(cli.app)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# Of programs that are not ours, or of all: pip, uv, systemd-run, Ray and lm-evaluation-harness.
FOREIGN = {
    *("--batch_size", "--tasks", "--model_args"),
    *("--force-reinstall", "--no-build-isolation", "--index-url"),
    *("--user", "--scope"),
    *("--help", "--with"),
    *("--backend", "--constraint", "--data"),
    "--node-ip-address",
}
# What stands for any bench.
ANY = "NAME"


@cache
def packages() -> frozenset[str]:
    """What pip may be told to install: packages that we ask for, and this checkout with extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    asked = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(each for several in extras.values() for each in several),
    ]
    names = {re.split(r"[<>=;\s]", each, maxsplit=1)[0] for each in asked}
    return frozenset({".", *names, *(f".[{extra}]" for extra in extras)})


def strangers(text: str) -> list[str]:
    """Packages that a text has pip install and that we do not ask for, or that are called as
    another project's is.
    """
    told = " ".join(re.findall(r"pip3? install ([^`;#\n]*)", text)).split()
    words = [word.strip("'\",") for word in told if "{" not in word]
    ours = ("-", "dist/", "https://download.pytorch.org/")
    wrong = [word for word in words if not word.startswith(ours) and word not in packages()]
    return wrong + re.findall(r"(?<![\w./])speq\[\w*\]", text)


@cache
def options(command: Any) -> frozenset[str]:
    """The names of a command's options and of all below it."""
    found = {name for each in command.params for name in each.opts + each.secondary_opts}
    return frozenset(found.union(*map(options, getattr(command, "commands", {}).values())))


@cache
def developers_options() -> frozenset[str]:
    """Options of what developers run, declared by argparse or pytest, or as fields."""
    found = set()
    folders = (ROOT / each for each in ("tools", "tests/fuzz", "tests/kernels", "tests/simulation"))
    for file in (ROOT / "tests/conftest.py", *(each for at in folders for each in at.glob("*.py"))):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(attr="add_argument" | "addoption"), args=args):
                    found |= {each.value for each in args if isinstance(each, ast.Constant)}
                case ast.AnnAssign(
                    target=ast.Name(id=name), value=ast.Call(func=ast.Name(id="option"))
                ):
                    found.add(f"--{name.replace('_', '-')}")
    return frozenset(map(str, found))


def wrong_commands(text: str) -> list[str]:
    """Commands that a text quotes and that do not exist, and options that a command lacks."""
    wrong = []
    for span in re.findall(r"`(?:\.venv/bin/|python -m )?speq ([^`{]*)`", text):
        if "=" in span.split()[0]:
            continue  # a row of a table of systems: speq with a setting
        wrong += wrong_words(span)
    for name, span in re.findall(r"`(?:\.venv/bin/)?python -m bench\.lab\.(\w+)([^`{]*)`", text):
        if name == ANY:
            continue
        known = options(lab_commands()[name]) if name in lab_commands() else None
        if known is None or not set(OPTION.findall(span)) <= known:
            wrong.append(f"bench.lab.{name}{span}")
    # The same without quotes, as far as the options go.
    for span in re.findall(r"(?<![\w`./-])speq ((?:[a-z-]+ ){1,2}(?:--[a-z-]+)+)", text):
        wrong += wrong_words(span)
    for option, span in re.findall(r"`?(--[a-z][\w-]*)`? of `speq ([^`{]*)`", text):
        wrong += wrong_words(f"{span} {option}")
    return wrong


def wrong_words(words: str) -> list[str]:
    command = APP
    for word in words.split():
        if word == ANY or not hasattr(command, "commands") or word.startswith("-"):
            break
        if word not in command.commands:
            return [f"speq {words}"]
        command = command.commands[word]
    return [f"speq {words}"] if not set(OPTION.findall(words)) <= options(command) else []


def unknown_options(said: Said) -> set[str]:
    """Options that a sentence names and that nothing has. A word alone is an argument of a
    program, and no sentence.
    """
    if said.file.suffix == ".py" and " " not in said.text.strip():
        return set()
    known = (options(APP) | FOREIGN).union(*map(options, lab_commands().values()))
    if said.file.suffix == ".md" or said.file.is_relative_to(ROOT / "tools"):
        known |= developers_options()
    return set(OPTION.findall(said.text)) - known


def test_packages_are_ours_or_those_we_ask_for() -> None:
    assert {str(said): strangers(said.text) for said in SAID if strangers(said.text)} == {}


def test_commands_and_their_options_exist() -> None:
    assert {
        str(said): wrong_commands(said.text) for said in SAID if wrong_commands(said.text)
    } == {}


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    wanted = {
        (str(said), name) for said in SAID for name in re.findall("`make ([a-z-]+)", said.text)
    }
    assert len(wanted) > 10
    assert {(where, name) for where, name in wanted if name not in targets} == set()


def test_options_exist() -> None:
    assert {str(said): unknown_options(said) for said in SAID if unknown_options(said)} == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("run it again; pip install 'speq[serve]'", ["speq[serve]", "speq[serve]"]),
        ("install speq[gpu]", ["speq[gpu]"]),
        ("    pip install -q speq", ["speq"]),
        ("`pip install --no-deps gguf nonsense`; then go on", ["nonsense"]),
        ("pip install -e '.[nothing]'", [".[nothing]"]),
        ("pip install -e '.[serve]' and", ["and"]),
        ("pip install {}", []),
        (".venv/bin/pip install --no-build-isolation -e '.[serve]'  # some minutes", []),
        ("is not installed; pip install 'ray[serve]'", []),
    ],
)
def test_strangers_would_be_seen(text: str, wrong: list[str]) -> None:
    assert strangers(text) == wrong


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("write it again with `speq bench kernels --trace`", True),
        ("write it again with `speq bench kernels --sass`", False),
        ("run speq bench kernels --trace FILE", True),
        ("count again with `python -m bench.lab.coverage MODEL --counts`", True),
        ("count again with `python -m bench.lab.hit_rate MODEL --counts FILE`", False),
        ("as `python -m bench.lab.nonsense` does", True),
        ("as `speq walk` does", True),
        ("as `speq bench nonsense` does", True),
        ("`speq bench NAME --json`", False),
        ("`--routes` of `speq chat`", True),
        ("--routes of `speq plan MODEL`", False),
        ("`speq draft-length=4` was measured", False),
        ("speq measures instead", False),
    ],
)
def test_wrong_commands_would_be_seen(text: str, wrong: bool) -> None:
    assert bool(wrong_commands(text)) == wrong


def test_unknown_options_would_be_seen() -> None:
    code, page = ROOT / "speq/load.py", ROOT / "README.md"
    assert unknown_options(Said(code, 1, "give --no-such-thing FILE")) == {"--no-such-thing"}
    assert unknown_options(Said(code, 1, "run it with --slow, or --memory-budget")) == {"--slow"}
    assert unknown_options(Said(code, 1, "--no-such-thing")) == set()
    assert unknown_options(Said(page, 1, "tools take `--slow` and `--no-such`")) == {"--no-such"}


def test_texts_are_found_as_they_are_put_together() -> None:
    code = 'x = f"one {a} " "two"\ny = ("three "\n  "four")\n'
    assert sorted(literals(ast.parse(code))) == [(1, "one {} two"), (2, "three four")]
    assert len(SAID) > 5000
