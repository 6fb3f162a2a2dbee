"""Writes the pages of docs/ that are made from the code: `python tools/pages.py`.

`--check` writes nothing and fails if a page is not current.
"""

import argparse
import ast
import re
import sys
from pathlib import Path

from speq.stats import BUDGET_FIGURES, FIGURES, LAYER_FIGURES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# Rooms in the order in which they build on each other.
ROOMS = (
    *("speq", "speq/engine", "speq/planning", "speq/models", "speq/layers", "speq/experts"),
    *("speq/drafts", "speq/kernels", "speq/files", "speq/quantizing", "speq/measure"),
    *("speq/dashboard", "speq/server", "speq/offline", "speq/options", "speq/text", "speq/cli"),
    *("scheduler", "governor", "bench", "tools"),
)
FILES = """# Files: one line each

<!-- Made from the first sentence of each module by tools/pages.py: change the sentences there. -->

[architecture.md](architecture.md) says how the rooms belong together. Kernels in `csrc/` say in
their first lines what they are.
"""
STATISTICS = """# Statistics: the figures of a run

<!-- Made from speq/stats.py by tools/pages.py: change the sentences there. -->

`speq generate MODEL --json FILE` writes `{{"text", "token_ids", "finish_reason", "stats"}}`;
`--json -` prints it. In Python `Generation.stats` is the same dictionary as `stats`. A figure that
does not exist for a run is `null`: there is no acceptance rate without a draft, for example. Names
end in their unit: `_ms`, `_s`, `_bytes`.

{figures}

## Layers

`layers` has one entry for each MoE layer. The sums are over the decode steps.

{layers}

## Expert budgets

`budget` is there for runs with `--expert-budget` or `--set expert_floor`, which are not exact.

{budget}

## Tables and timelines

`--stats` prints the layers as a table. `--trace FILE` writes the run as a timeline, which
https://ui.perfetto.dev opens:

    .venv/bin/speq generate models/tiny-moe --memory-budget 26MiB --prompt "The sea" \\
        --cache-policy lookahead --prefetch three-phase --stats --trace /tmp/run.json
"""


def table(meanings: dict[str, str], head: str = "name") -> str:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in meanings.items()]
    return "\n".join([f"| {head} | meaning |", "|---|---|", *rows])


def purpose(module: Path) -> str:
    """The first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8")))
    if docstring is None:
        raise ValueError(f"{module} has no docstring")
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"\.(?= [A-Z])", paragraph)[0].rstrip(".")


def room_of(module: Path) -> str:
    """The innermost room that a module lies in."""
    relative = module.relative_to(ROOT).as_posix()
    return max((room for room in ROOMS if relative.startswith(f"{room}/")), key=len)


def files() -> str:
    """A table of the modules of each room."""
    parts = [FILES]
    for room in ROOMS:
        folder = ROOT / room
        modules = [path for path in sorted(folder.rglob("*.py")) if room_of(path) == room]
        if not modules:
            continue
        rows = {
            path.relative_to(folder).as_posix(): purpose(path)
            for path in modules
            if path.name != "__init__.py"
        }
        parts.append(f"\n## {room}/\n")
        if folder / "__init__.py" in modules:
            parts.append(f"\n{purpose(folder / '__init__.py')}.\n")
        parts.append(f"\n{table(rows, 'file')}\n")
    return "".join(parts)


def pages() -> dict[str, str]:
    """Text of every generated page, by file name."""
    return {
        "files.md": files(),
        "statistics.md": STATISTICS.format(
            figures=table(FIGURES), layers=table(LAYER_FIGURES), budget=table(BUDGET_FIGURES)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the pages of docs/ made from the code.")
    parser.add_argument("--check", action="store_true", help="fail if a page is not current")
    check = parser.parse_args().check
    for name, text in pages().items():
        path = DOCS / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            sys.exit(f"docs/{name} is not current; run python tools/pages.py")
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
