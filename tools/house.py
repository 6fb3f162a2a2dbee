"""Prints figures of the code's size and shape, at a review, aimed at, and today's.

python -m tools.house
"""

import ast
import os
import re
import subprocess
import sys
import tokenize
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

ROOT = Path(__file__).parent.parent
MODEL, BUDGET, TOKENS = ROOT / "models/tiny-moe", "24MiB", 8
PRODUCT, NATIVE = ("speq", "scheduler", "governor"), (".cpp", ".cu", ".cuh", ".h", ".hpp")
OWN = tuple(f"{ROOT / folder}{os.sep}" for folder in PRODUCT)
ENGINE, BUILDERS = "speq.engine.engine", ("speq.load", "speq.runtime")
PACKAGES = {"scheduler": "speq.scheduler", "governor": "speq.governor", "bench": "speq.bench"}
# Names that are participles. Words that are verbs as well, such as run, are left out.
PARTICIPLE = re.compile(
    "[a-z]+ed|held|taken|told|heard|made|said|seen|met|given|written|built|found|sent|kept|left|"
    "known|shown|drawn|bound|lent|spoken|done|gone|chosen|drafting|naming"
)


def sources(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> list[Path]:
    files = (file for folder in folders for file in (ROOT / folder).rglob("*"))
    return sorted(file for file in files if file.suffix in suffixes)


def lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_bytes().splitlines()) for file in files)


def words() -> int:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def trees(*folders: str) -> Iterator[ast.Module]:
    for file in sources(*folders):
        yield ast.parse(file.read_text(encoding="utf-8"))


def shared_class_names() -> int:
    """Count the class names that are used for two or more classes."""
    found = Counter(
        node.name
        for tree in trees(*PRODUCT, "bench")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    return sum(times > 1 for times in found.values())


def participles() -> int:
    """Count the module functions whose whole name is a participle."""
    names = [
        node.name.strip("_")
        for tree in trees(*PRODUCT, "bench")
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return sum(PARTICIPLE.fullmatch(name) is not None for name in names)


def text_identifiers() -> int:
    """Count the uses of `text` and `texts` as identifiers where requests are run."""
    count = 0
    for file in sources("speq/engine", "speq/models", "scheduler", "governor"):
        with file.open("rb") as source:
            tokens = tokenize.tokenize(source.readline)
            count += sum(t.type == tokenize.NAME and t.string in ("text", "texts") for t in tokens)
    return count


def modules() -> dict[str, Path]:
    """Map the names of the product's modules to their files."""
    found = {}
    for file in sources(*PRODUCT, "bench"):
        folder, *inside = file.relative_to(ROOT).with_suffix("").parts
        parts = [PACKAGES.get(folder, folder), *inside]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(known: dict[str, Path], name: str, everywhere: bool) -> set[str]:
    """List the modules of the product that a module imports; everywhere: in functions as well."""
    tree = ast.parse(known[name].read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names} & known.keys()
            found |= parts or {node.module} & known.keys()
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known.keys()
    return found - {name}


def closure(known: dict[str, Path]) -> str:
    """Count the modules that importing the engine imports, itself included, and their lines."""
    reached, waiting = {ENGINE}, [ENGINE]
    while waiting:
        for each in imports(known, waiting.pop(), everywhere=False) - reached:
            reached.add(each)
            waiting.append(each)
    return f"{len(reached)}, {lines(known[each] for each in reached):,}"


def help_rows(*command: str) -> list[str]:
    """List the first words of the rows of a command's help."""
    wide = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"}
    text = subprocess.check_output(
        [sys.executable, "-m", "speq", *command, "--help"], env=wide, cwd=ROOT, text=True
    )
    return [row for row in re.findall(r"^│ \*? *(\S+)", text, re.MULTILINE) if row != "--help"]


def step_figures() -> tuple[int, int]:
    """Run the bundled model: own frames from `generate` to a native op, and classes of a step.

    Frames are those of a decode step without a draft, whose passes are recorded. Classes are the
    product's own of which a decode step with a draft made an instance.
    """
    from speq.generator import Generator
    from speq.kernels.op_list import OpList

    depths: list[int] = []
    made: set[type] = set()
    run = OpList.run

    def counted(*arguments: Any, **options: Any) -> Any:
        stack = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1))]
        own = [code for code in stack if code.co_filename.startswith(OWN)]
        if Generator.generate.__code__ in own:
            depths.append(own.index(Generator.generate.__code__) + 2)  # and `run` itself
        return run(*arguments, **options)

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            own = frame.f_locals
            new = own.get("self").__class__ if frame.f_code.co_name == "__init__" else None
            new = own.get("_cls", new)  # of a NamedTuple
            if isinstance(new, type) and new.__module__.startswith("speq."):
                made.add(new)

    def generator(drafter: str) -> Generator:
        return Generator.from_pretrained(str(MODEL), BUDGET, drafter=drafter, profile="none")

    with mock.patch.object(OpList, "run", counted):
        plain = generator("none")
        plain.generate("Once upon a time", max_new_tokens=TOKENS)
        plain.close()
    drafting = generator("int4")
    with drafting.with_draft_length(4), drafting.batch(256) as batch:
        batch.add(
            drafting.prepare("Once upon a time", None, {"max_new_tokens": 200, "ignore_eos": True})
        )
        for _ in range(8):  # prefill, and steps that fill caches and are recorded
            batch.step(4)
        sys.setprofile(watch)
        batch.step(4)
        sys.setprofile(None)
    drafting.close()
    return depths[-1], len(made)


def main() -> None:
    known, (frames, classes) = modules(), step_figures()
    options = [row for row in help_rows("generate") if row.startswith("--")]
    commands = [row for row in help_rows("bench") if row[0].islower()]
    load, runtime = (len(imports(known, name, everywhere=True)) for name in BUILDERS)
    rows = [
        ("product Python, lines", "52,246", "46,200", f"{lines(sources(*PRODUCT)):,}"),
        ("C++, lines", "", "", f"{lines(sources('csrc', suffixes=NATIVE)):,}"),
        ("bench + tools, lines", "16,755", "14,100", f"{lines(sources('bench', 'tools')):,}"),
        ("tests, lines", "61,980", "54,800", f"{lines(sources('tests')):,}"),
        ("docs, README, CONTRIBUTING, words", "65,500", "40,000", f"{words():,}"),
        ("class names used twice or more", "53", "under 10", str(shared_class_names())),
        ("functions named by a participle", "131", "under 30", str(participles())),
        ("options shown by `speq generate`", "62", "48", str(len(options))),
        ("`speq bench` commands", "28", "5", str(len(commands))),
        ("fan-out of `load`, `runtime`", "47, 37", "30, 25", f"{load}, {runtime}"),
        ("closure of the engine: modules, lines", "126, 19,500", "90, 14,000", closure(known)),
        ("own frames, generate to native op", "22", "15", str(frames)),
        ("own classes made in a decode step", "about 35", "24", str(classes)),
        ("`text(s)` for sequences", "1,618 in all", "0", str(text_identifiers())),
    ]
    for row in [("figure", "review", "aim", "today"), *rows]:
        print("{:<40}{:>14}{:>12}{:>14}".format(*row))


if __name__ == "__main__":
    main()
