"""Teacher-forced comparison: our exact path with plain transformers, and the draft with both.

Each text is run through all models token by token position; no model sees another's output, so one
disagreement does not cause the next.
"""

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speq.errors import SpeqError
from speq.experts.packed_store import PackedExpertStore
from speq.files.atomic_file import check_target
from speq.files.checkpoint import EXPERTS_MANIFEST, Checkpoint, locate
from speq.files.published_format import MEANINGS, MXFP4_DTYPE, WORDS
from speq.generator import Generator
from speq.machine import available_bytes
from speq.measure import pack_check
from speq.measure.report import Column, Report, read_prompts
from speq.measure.teacher_forced import forced_passes
from speq.models.dequantised import from_checkpoint
from speq.models.moe_model import quiet_transformers
from speq.models.opened import Opened, open_model
from speq.scheduler.lookahead import LookaheadBuffer
from speq.units import Progress, format_bytes, no_progress, tracked

# Tokens verified at a time: the shape of a verification with four drafted tokens.
VERIFY_ROWS = 5
MAX_TOKENS = 256
# What progress is told of as.
PLAIN = "loading the model with plain transformers"
# Share of positions whose likeliest token must be the same. In 16 bits the shape of a pass may turn
# a near-tie; in 32 it must not.
NEEDED_AGREEMENT = {
    torch.float64: 1.0,
    torch.float32: 1.0,
    torch.bfloat16: 0.97,
    torch.float16: 0.97,
}

COLUMNS: dict[str, Column] = {
    "tokens": ("tokens", "{}"),
    "same token": ("agreement", "{:.2%}"),
    "largest logit": ("max_logit", "{:.1f}"),
    "largest difference": ("max_logit_difference", "{:.1e}"),
    "draft: same token": ("draft_agreement", "{:.1%}"),
    "route recall": ("route_recall", "{:.1%}"),
    "same experts": ("same_route_sets", "{:.1%}"),
}

PACK_COLUMNS: dict[str, Column] = {
    "experts": ("experts", "{}"),
    "their bytes": ("record_bytes", format_bytes),
    "tensors": ("tensors", "{}"),
    "files": ("files", "{}"),
    "dense records": ("dense", "{}"),
    "draft": ("draft", lambda there: "as packed" if there else "-"),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    passed: bool
    sentence: str


@dataclass(frozen=True, slots=True)
class Trace:
    """What our models made of a text: logits [T, V], and how the draft's routes compare."""

    exact: Tensor
    draft: Tensor | None
    named: int
    same_sets: int
    choices: int
    sets: int


def run(
    model: str,
    memory_budget: str,
    *,
    prompts: Path | None,
    num_prompts: int,
    json_file: Path | None,
    force: bool,
    progress: Progress = no_progress,
    **options: Any,
) -> tuple[Report, Verdict]:
    """Compare on the first MAX_TOKENS tokens of each prompt; a pack, with its checksums instead."""
    check_target(json_file, force)
    texts = read_prompts(prompts, num_prompts)
    if os.path.exists(locate(model) / EXPERTS_MANIFEST):
        report, found = run_on_pack(model, progress)
        if json_file is not None:
            report.write(json_file)
        return report, found
    # The draft is compared too, whether or not it would pay.
    drafter = {} if options.get("draft") == "none" else {"drafter": "int4"}
    generator = Generator.from_pretrained(
        model, memory_budget, progress=progress, **(drafter | options)
    )
    dtype, device = generator.runtime.dtype, generator.runtime.device
    opened = generator.runtime.opened
    path, part = opened.checkpoint.path, opened.checkpoint.part
    try:
        check_memory(opened, dtype, device)
        limit = min(MAX_TOKENS, generator.max_context)
        encoded = [generator.encode(text)[:limit] for text in texts]
        generator.reserve(min(max(map(len, encoded)) + VERIFY_ROWS, generator.max_context))
        turns = tracked("running texts", encoded, len(encoded), progress)
        traces = [trace(generator, ids) for ids in turns]
    finally:
        generator.close()
    del generator

    progress(PLAIN, 0, 1)
    with quiet_transformers(), closing(Checkpoint(path, part)) as checkpoint:
        published = checkpoint.format
        plain = from_checkpoint(
            checkpoint, lambda name: True, dtype=dtype, experts_implementation="eager"
        )
    plain = plain.eval().to(device)
    progress(PLAIN, 1, 1)
    pairs = tracked("comparing texts", zip(encoded, traces, strict=True), len(encoded), progress)
    rows = [compare(plain, ids, ours) for ids, ours in pairs]
    report = Report("check", model, {"dtype": str(dtype), **options}, rows)
    if json_file is not None:
        report.write(json_file)
    return report, verdict(rows, dtype, published)


def run_on_pack(model: str, progress: Progress) -> tuple[Report, Verdict]:
    """Compare all of a pack with its checksums: plain transformers reads models as published only.

    Raises SpeqError for the first thing that is not what was packed.
    """
    opened = open_model(model)
    try:
        if not isinstance(opened.store, PackedExpertStore):
            raise SpeqError(f"{model} is no pack, whose records could be compared; give one")
        row = pack_check.compare(opened, opened.store, progress)
    finally:
        opened.close()
    dense = f"{row['dense']} dense records, " if row["dense"] else ""
    others = f"{dense}{row['tensors']} other tensors and {row['files']} files"
    if not row["tensors"]:
        others = "nothing else, which this pack has no checksums of: pack the model again"
    sentence = (
        f"passed: {row['experts']} experts are what was packed, and {others}; to compare with "
        "transformers, check the model that it was packed from"
    )
    return Report("check", model, {}, [row]), Verdict(True, sentence)


def columns_of(report: Report) -> dict[str, Column]:
    """How a report of `run` is shown."""
    return PACK_COLUMNS if "experts" in report.rows[0] else COLUMNS


def check_memory(opened: Opened, dtype: torch.dtype, device: torch.device) -> None:
    """Raise SpeqError where plain transformers, which holds all weights, has no room for them."""
    free = available_bytes()
    if device.type == "cuda":
        free = min(free, torch.cuda.mem_get_info()[0])
    checkpoint, part = opened.checkpoint, opened.checkpoint.part
    words = sum(
        info.nbytes // info.dtype.itemsize * (2 if info.dtype == MXFP4_DTYPE else 1)
        for name, (_, info) in checkpoint.tensors.items()
        if part is None or not part.is_beside(name)
    )
    needed = words * dtype.itemsize
    if checkpoint.format != WORDS and dtype != torch.bfloat16:
        needed += words * torch.bfloat16.itemsize  # which they are before they are anything else
    if needed > free:
        raise SpeqError(
            f"plain transformers needs {format_bytes(needed)} for the whole model "
            f"in {str(dtype).removeprefix('torch.')} and {format_bytes(free)} of "
            "memory are left; check a model that fits, or in a smaller dtype"
        )


def trace(generator: Generator, ids: list[int]) -> Trace:
    """Run a text as verification would, and token by token as the draft would."""
    exact, drafted = [], []
    named = same = choices = sets = 0
    for forced in forced_passes(generator.runtime, ids, VERIFY_ROWS):
        exact.append(forced.exact.cpu())
        if forced.draft is not None:
            drafted.append(forced.draft.cpu())
        step_named, step_choices = forced.lookahead.recall(list(range(forced.tokens)))
        named, choices = named + step_named, choices + step_choices
        step_same, step_sets = equal_sets(forced.lookahead, forced.tokens)
        same, sets = same + step_same, sets + step_sets
    draft = torch.cat(drafted) if drafted else None
    return Trace(torch.cat(exact), draft, named, same, choices, sets)


def equal_sets(lookahead: LookaheadBuffer, tokens: int) -> tuple[int, int]:
    """(equal, all): layers and tokens where the draft named exactly the experts that were used."""
    pairs = [
        (set(lookahead.expert_ids(token, layer)), set(route.ids[token]))
        for layer, route in lookahead.used.items()
        for token in range(tokens)
        if (token, layer) in lookahead.predicted
    ]
    return sum(predicted == used for predicted, used in pairs), len(pairs)


@torch.inference_mode()
def compare(plain: Any, ids: list[int], ours: Trace) -> dict[str, Any]:
    """One row of figures for one text."""
    theirs = plain(torch.tensor([ids], device=plain.device)).logits[0].float().cpu()
    exact = ours.exact.float()
    agrees = exact.argmax(-1) == theirs.argmax(-1)
    row: dict[str, Any] = {
        "tokens": len(ids),
        "agreement": agrees.double().mean().item(),
        "max_logit_difference": (exact - theirs).abs().max().item(),
        "max_logit": theirs.abs().max().item(),
        "draft_agreement": None,
        "route_recall": None,
        "same_route_sets": None,
    }
    if ours.draft is not None:
        drafted = ours.draft.float().argmax(-1) == exact.argmax(-1)
        row["draft_agreement"] = drafted.double().mean().item()
        row["route_recall"] = ours.named / ours.choices
        row["same_route_sets"] = ours.same_sets / ours.sets
    return row


def verdict(rows: list[dict[str, Any]], dtype: torch.dtype, published: str = WORDS) -> Verdict:
    """published: as what the checkpoint has its weights."""
    tokens = sum(row["tokens"] for row in rows)
    agreement = sum(row["agreement"] * row["tokens"] for row in rows) / tokens
    needed = NEEDED_AGREEMENT[dtype]
    passed = agreement >= needed
    meaning = "" if published == WORDS else f"; of both, {MEANINGS[published]}"
    return Verdict(
        passed,
        f"{'passed' if passed else 'FAILED'}: the exact path and transformers choose the same "
        f"token at {agreement:.2%} of {tokens} positions in {str(dtype).removeprefix('torch.')} "
        f"({needed:.0%} wanted){meaning}",
    )
