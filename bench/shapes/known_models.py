"""How fast this machine would run published models: plans of their shapes, without weights."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from speq.bench.shapes.published import ROWS
from speq.errors import SpeqError
from speq.measure.plan import PlannedModel
from speq.measure.report import Column
from speq.measure.settings import PlanSettings
from speq.measure.verdict import verdict_of
from speq.options.declared import build
from speq.units import Progress, format_bytes, track

COLUMNS: dict[str, Column] = {
    "model": ("model", "{}"),
    "weights": ("weights", "{}"),
    "files": ("files_bytes", format_bytes),
    "tokens/s": ("tokens_per_s", "{:.2g}"),
    "first token": ("first_token_s", "{:.2g} s"),
}


def known_models(device: str, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Plan each published model, in each form of its weights, within the default budget.

    Figures are None for a model that does not fit.
    """
    kinds = [(shape, weights) for shape in ROWS for weights in shape.formats]
    with TemporaryDirectory(prefix="speq-") as folder:
        return list(rows(Path(folder), device, track("planning", kinds, len(kinds), progress)))


def rows(folder: Path, device: str, kinds: Iterator[Any]) -> Iterator[dict[str, Any]]:
    settings = build(PlanSettings, {"device": device})
    for shape, weights in kinds:
        path = folder / f"{shape.name}-{weights}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(shape.content(None, weights)))
        row = {"model": shape.name, "weights": weights, "files_bytes": None}
        try:
            planned = PlannedModel.of(path, settings)
            made = planned.plan(settings.memory_budget)
        except SpeqError:
            yield row | {"tokens_per_s": None, "first_token_s": None}
            continue
        verdict = verdict_of(made, planned.flops_per_s, None)
        yield row | {
            "files_bytes": verdict.model_bytes,
            "tokens_per_s": verdict.pace.tokens_per_s,
            "first_token_s": verdict.first_token_s,
        }
