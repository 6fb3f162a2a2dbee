"""Which tensors of a checkpoint its family uses: `python -m tools.tensors FOLDER ...`.

A folder needs config.json and an index, or a file of safetensors; no weight is read. Every tensor
is used, or left knowingly, or unknown; and what the model wants and the files lack is missing.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.conversion_mapping import WeightRenaming, get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key

from speq.errors import SpeqError
from speq.experts.expert_names import FUSED, PROJECTIONS, UNGATED_PROJECTIONS
from speq.files.json_file import read_json
from speq.files.published_format import words_name
from speq.files.shards import INDEX, SINGLE, read_weight_map
from speq.models.families import family_of
from speq.models.family import Family
from speq.models.shape import config_in, skeleton

HEADS = (
    "checkpoint",
    "family",
    "tensors",
    "of experts",
    "of the rest",
    "left",
    "unknown",
    "missing",
)


@dataclass(frozen=True, slots=True)
class Tensors:
    """What becomes of a checkpoint's tensors; `unknown` and `missing` are names."""

    family: str
    experts: int
    rest: int
    left: int
    unknown: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def count(self) -> int:
        return self.experts + self.rest + self.left + len(self.unknown)


def tensors_of(folder: Path) -> Tensors:
    """Sort the tensors of a checkpoint. Raises SpeqError for a folder that speq does not run."""
    family = family_of(read_json(folder / "config.json"), folder)
    config = config_in(folder)
    model = skeleton(family, config, folder)
    buffers = {name for name, _ in model.named_buffers()}
    wanted = set(model.state_dict()) - buffers
    if config.tie_word_embeddings:
        wanted.discard("lm_head.weight")
    blocks, counts = family.moe_blocks(model), Counter[str]()
    experts: set[tuple[int, int | None, str]] = set()
    seen, unknown = set[str](), list[str]()
    names = own_names(stored_names(folder), family, model)
    for stored, (name, *parts) in names.items():
        words = words_name(name)
        matrix = family.names.matrix(words)
        if not family.holds(name, config.num_hidden_layers) and matrix is None:
            counts["left"] += 1
        elif matrix is not None and matrix.layer in blocks:
            counts["experts"] += 1
            experts.add((matrix.layer, matrix.expert, matrix.projection))
        elif matrix is not None:
            counts["left"] += 1
        elif name in wanted | buffers or words in wanted:
            counts["rest"] += 1
            seen |= {name if name in wanted else words, *parts}
        elif family.names.router.search(name):
            counts["rest"] += 1
        else:
            unknown.append(stored)
    number = getattr(config, family.num_experts)
    lacking = [
        f"expert {expert} of layer {layer}, {projection}"
        for layer in blocks
        if not {(layer, None, each) for each in FUSED} <= experts
        for expert in range(number)
        for projection in (PROJECTIONS if family.gated else UNGATED_PROJECTIONS)
        if experts.isdisjoint((layer, each, projection) for each in (expert, None))
    ]
    missing = (*sorted(wanted - seen), *lacking)
    given = counts["experts"], counts["rest"], counts["left"]
    return Tensors(family.model_type, *given, tuple(unknown), missing)


def stored_names(folder: Path) -> list[str]:
    if (folder / INDEX).exists():
        return [*read_weight_map(folder / INDEX)]
    with safe_open(folder / SINGLE, framework="pt") as file:
        return [*file.keys()]


def own_names(stored: Iterable[str], family: Family, model: Any) -> dict[str, list[str]]:
    """What speq and transformers' loader make of names on disk; experts keep theirs. Several where
    the loader splits a tensor.
    """
    part = family.text_part
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    wanted = model.state_dict()
    joined = [
        each
        for each in mapping
        if isinstance(each, WeightConverter)
        and not any("experts" in n for n in each.source_patterns)
    ]
    made = {}
    for name in stored:
        own = name if part is None else part.called(name)
        taken = own if part is None else part.published(own)
        if family.names.is_expert(own):
            made[name] = [own]
            continue
        own, by = rename_source_key(taken, renamings, joined)
        if own not in wanted and taken in wanted:  # as the loader does
            own = taken
        parts = next((each.target_patterns for each in joined if by in each.source_patterns), [""])
        made[name] = [own.replace(parts[0], each) for each in parts]
    return made


def row(name: str, found: Tensors) -> list[str]:
    counts = (found.count, found.experts, found.rest, found.left)
    ends = (len(found.unknown), len(found.missing))
    return [name, found.family, *(f"{each:,}" for each in (*counts, *ends))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.tensors", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    rows, refused = [], 0
    for folder in parser.parse_args().folders:
        try:
            found = tensors_of(folder)
        except (SpeqError, OSError) as error:
            print(f"{folder}: {error}", file=sys.stderr)
            refused += 1
            continue
        rows.append(row(folder.name, found))
        for name in (*found.unknown[:3], *found.missing[:3]):
            print(f"{folder}: {name}", file=sys.stderr)
        refused += bool(found.unknown or found.missing)
    for cells in (list(HEADS), ["---"] * len(HEADS), *rows):
        print(f"| {' | '.join(cells)} |")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
