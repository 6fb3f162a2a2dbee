"""Generates the pages of docs/ that are made from the code: `python tools/pages.py`.

`--check` writes nothing and fails if a page is not current.
"""

import argparse
import sys
from pathlib import Path

from speq.stats import BUDGET_FIGURES, FIGURES, LAYER_FIGURES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
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

`budget` is there for runs within an [expert budget](budgets.md), which are not exact.

{budget}

## Tables and timelines

`--stats` prints the layers as a table. `--trace FILE` writes the run as a timeline, which
https://ui.perfetto.dev opens:

    .venv/bin/speq generate models/tiny-moe --memory-budget 26MiB --prompt "The sea" \\
        --cache-policy lookahead --prefetch three-phase --stats --trace /tmp/run.json
"""


def entries(meanings: dict[str, str]) -> str:
    return "\n".join(f"- `{name}`: {meaning}" for name, meaning in meanings.items())


def pages() -> dict[str, str]:
    """Text of every generated page, by file name."""
    return {
        "statistics.md": STATISTICS.format(
            figures=entries(FIGURES), layers=entries(LAYER_FIGURES), budget=entries(BUDGET_FIGURES)
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
