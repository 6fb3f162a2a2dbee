"""Writes the tables of docs/models.md that come from the code and the tests: what each family was
tested on, and what fits which memory. `python -m tools.models_page`

Columns of published files are written where their folder is given, and otherwise left as they are.
"""

import argparse
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from speq.bench.shapes.published import ROWS
from speq.errors import SpeqError
from speq.files.json_file import read_json
from speq.files.published_format import WORDS
from speq.models.families import FAMILIES, family_of
from speq.planning.assumptions import Assumptions
from speq.planning.budget_plan import plan_budget
from speq.planning.cost.locality import Locality
from speq.planning.cost.presets import preset
from speq.planning.demand import Budget
from speq.planning.memory import BudgetTooSmall
from speq.planning.model_spec import ModelSpec
from tests.helpers.fp8_files import FP8_FAMILIES
from tests.helpers.mxfp4_files import MXFP4_FAMILIES
from tests.helpers.packed_files import FAMILY_KINDS, KINDS, label
from tests.helpers.published_shapes import SHAPES
from tools.tensors import tensors_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
# Ends of the names of published files, which begin with the owner's.
CONFIG, BESIDE = "_config.json", "_hf_quant_config.json"
TESTED_HEADS = ["family", "transformers", "sizes of", "formats", "configurations", "indexes"]
FROM_FOLDER = 2  # the last columns
FOLDERS = (ROOT / "tests/data/configs", ROOT / "tests/data/published")
BUDGETS_GIB = (8, 16, 32, 64)
CONTEXT = 4096
GIB = 1 << 30
# Times do not matter here.
ACCEPTANCE = 0.9


def model_specs() -> list[ModelSpec]:
    """Read every config.json, and the shapes that `speq bench shapes` has of other models; the
    smallest experts come first.
    """
    folders = {path.parent.name: path.parent for at in FOLDERS for path in at.glob("*/config.json")}
    with TemporaryDirectory(prefix="speq-") as temporary:
        for shape in ROWS:
            if not any(name.lower().startswith(shape.name.lower()) for name in folders):
                folders[shape.name] = folder = Path(temporary) / shape.name
                folder.mkdir()
                (folder / "config.json").write_text(json.dumps(shape.content(None, None)))
        found = [ModelSpec.of_config(name, folder, "auto") for name, folder in folders.items()]
    return sorted(found, key=experts_bytes)


def experts_bytes(spec: ModelSpec) -> int:
    return spec.count * spec.codec.record_range[1]


def slots(spec: ModelSpec, budget_gib: int) -> dict[tuple[str, bool], int]:
    """Expert slots that fit, by codec and whether there is an INT4 draft."""
    locality = Locality(spec.shape.experts.num_experts, spec.shape.top_k)
    given = Assumptions(preset("rtx-4090"), locality, acceptance=ACCEPTANCE)
    try:
        made = plan_budget(spec, Budget.of(budget_gib * GIB, CONTEXT, True, spec.shape), given)
    except BudgetTooSmall:
        return {}
    return {(each.codec, each.drafts): each.slots for each in made.candidates}


def share(spec: ModelSpec, count: int | None) -> str:
    if count is None:
        return "-"
    # Nearly all is not 100%.
    return "all" if count == spec.count else f"{min(0.99, count / spec.count):.0%}"


def cell(spec: ModelSpec, budget_gib: int) -> str:
    """Shares without a draft and with one, in the codecs that take least."""
    found, published = slots(spec, budget_gib), spec.codec.shape.published
    plain, drafted = ("lossless", "residual") if published == WORDS else (published, published)
    return f"{share(spec, found.get((plain, False)))}, {share(spec, found.get((drafted, True)))}"


MEMORY_HEADS = ["model", "experts", "experts, GiB", "rest, GiB", *(f"{g} GiB" for g in BUDGETS_GIB)]


def memory_rows() -> Iterator[list[str]]:
    for spec in model_specs():
        published = spec.codec.shape.published
        yield [
            spec.name,
            "BF16" if published == WORDS else published.upper(),
            f"{experts_bytes(spec) / GIB:.1f}",
            f"{spec.shape.resident_bytes(spec.dtype) / GIB:.1f}",
            *(cell(spec, budget) for budget in BUDGETS_GIB),
        ]


def tested_rows(rows: list[list[str]], folder: Path | None) -> Iterator[list[str]]:
    """rows: of the page; folder: of published files"""
    sizes, formats = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for shape in SHAPES.values():
        sizes[shape.family].add(shape.model)
    for name, families in (("FP8", FP8_FAMILIES), ("MXFP4", MXFP4_FAMILIES)):
        for each in families:
            formats[each].add(name)
    for name, kind in KINDS.items():
        formats[name.split()[0]].add(label(kind))
    for name, kinds in FAMILY_KINDS.items():
        formats[name].update(map(label, kinds))
    there = {row[0]: row[-FROM_FOLDER:] for row in rows}
    if folder is not None:
        found = configurations(folder), indexes(folder / "indexes")
        there = {f"`{name}`": [listed(names[name]) for names in found] for name in FAMILIES}
    for name, family in FAMILIES.items():
        own = family.since, listed(sizes[name]), listed(formats[name])
        yield [f"`{name}`", *own, *there.get(f"`{name}`", ["-"] * FROM_FOLDER)]


def configurations(folder: Path) -> dict[str, set[str]]:
    """Published configurations that are planned, those beside indexes too, by family."""
    found = defaultdict[str, set[str]](set)
    files = {path.name.removesuffix(CONFIG): path for path in folder.glob(f"configs/*{CONFIG}")}
    files |= {path.parent.name: path for path in folder.glob("indexes/*/config.json")}
    for owned, path in files.items():
        if path.name.endswith(BESIDE):
            continue
        with TemporaryDirectory(prefix="speq-") as temporary, suppress(SpeqError):
            alone = Path(temporary)
            shutil.copy(path, alone / "config.json")
            if (beside := path.with_name(owned + BESIDE)).exists():
                shutil.copy(beside, alone / BESIDE[1:])
            name = owned.split("--")[-1]
            ModelSpec.of_config(name, alone, "auto")
            found[family_of(read_json(alone / "config.json"), alone).model_type].add(name)
    return found


def indexes(folder: Path) -> dict[str, set[str]]:
    """Published indexes of which each tensor is known and none is missing, by family."""
    found = defaultdict[str, set[str]](set)
    for path in sorted(folder.iterdir()):
        with suppress(SpeqError, FileNotFoundError):  # a folder may have no index
            tensors = tensors_of(path)
            if not tensors.unknown and not tensors.missing:
                found[tensors.family].add(path.name)
    return found


def listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "-"


def rows_in(page: str, heads: list[str]) -> list[list[str]]:
    """Cells of the table with these heads, without them. Exits with a sentence without it."""
    _, there, after = page.partition(line(heads) + "\n")
    if not there:
        sys.exit(f"{PAGE} has no table of {line(heads)}; write its heads where it is to be")
    lines = after.split("\n\n")[0].splitlines()[1:]
    return [[each.strip() for each in row.strip("|").split("|")] for row in lines]


def with_table(page: str, heads: list[str], rows: Iterable[list[str]]) -> str:
    """The page with other rows below these heads."""
    before, _, after = page.partition(line(heads) + "\n")
    made = [line(heads), f"|{'---|' * len(heads)}", *map(line, rows)]
    _, blank, rest = after.partition("\n\n")
    return before + "\n".join(made) + blank + rest


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def with_tested(page: str, folder: Path | None = None) -> str:
    """The page with the table of families. folder: of published files"""
    rows = tested_rows(rows_in(page, TESTED_HEADS), folder)
    return with_table(page, TESTED_HEADS, rows)


def with_memory(page: str) -> str:
    """The page with the table of memory."""
    rows_in(page, MEMORY_HEADS)
    return with_table(page, MEMORY_HEADS, memory_rows())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.models_page", description=__doc__)
    parser.add_argument(
        "--published", type=Path, metavar="FOLDER", help="with `configs` and `indexes` as published"
    )
    folder = parser.parse_args().published
    page = with_memory(with_tested(PAGE.read_text(encoding="utf-8"), folder))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
