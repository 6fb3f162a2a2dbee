"""Compares the exact path with plain transformers, and the draft with both, by teacher forcing.

All models run the same given sequences. No model sees another's output, so one difference does not
cause the next.
"""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speq.config import RunConfig
from speq.devices.named import find_device
from speq.errors import FileError, SpeqError
from speq.experts.packed_store import PackedExpertStore
from speq.files.atomic_file import check_target
from speq.files.checkpoint import EXPERTS_MANIFEST, locate
from speq.files.published_format import DECODED, MEANINGS, WORDS
from speq.generator import Generator
from speq.measure import pack_check
from speq.measure.plain_model import ROUNDED, PlainModel, fits, load_plain
from speq.measure.report import Column, Report, read_prompts
from speq.measure.teacher_forced import forced_passes
from speq.models.opened import open_model
from speq.models.shape import DTYPES
from speq.options.declared import build
from speq.scheduler.lookahead import LookaheadBuffer
from speq.units import Progress, format_bytes, no_progress, track

# Tokens verified at a time: the shape of a verification with four drafted tokens.
VERIFY_ROWS = 5
MAX_TOKENS = 256
# Name of this work in progress reports.
PLAIN = "loading the model with plain transformers"
# In 16 bits the shape of a pass may change a near-tie, of tokens or of experts; in wider dtypes it
# must not. The effect of rounding is measured: the distance of transformers' own logits from those
# that it computes in float32 with the same weights. Ours may not be far more often.
# Far means more than FAR times the USUAL quantile of transformers' distances. If rounding changes
# the choice of an expert, logits are farther off than that.
FAR, USUAL = 2.0, 0.9
# Standard deviations by which ours may be far more often.
DEVIATIONS = 3

COLUMNS: dict[str, Column] = {
    "tokens": ("tokens", "{}"),
    "same token": ("agreement", "{:.2%}"),
    "far from float32: ours": ("far", "{}"),
    "transformers'": ("plain_far", "{}"),
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
class CheckResult:
    passed: bool
    sentence: str


@dataclass(frozen=True, slots=True)
class Trace:
    """Our models' logits [T, V] for a sequence, and how the draft's routes compare."""

    exact: Tensor
    draft: Tensor | None
    named: int
    same_sets: int
    choices: int
    sets: int


@dataclass(frozen=True, slots=True)
class SequenceComparison:
    """One sequence's figures, and its logits' distances from those in float32.

    Distances are a share of the logits' spread, [T]; empty if the run computes in float32.
    """

    figures: dict[str, Any]
    errors: Tensor
    plain_errors: Tensor


def run(
    model: str,
    memory_budget: str | int,
    *,
    prompts: Path | None,
    num_prompts: int,
    json_file: Path | None,
    force: bool,
    progress: Progress = no_progress,
    **options: Any,
) -> tuple[Report, CheckResult]:
    """Compare on the first MAX_TOKENS tokens of each prompt, or a pack with its checksums."""
    check_target(json_file, force)
    texts = read_prompts(prompts, num_prompts)
    if os.path.exists(locate(model) / EXPERTS_MANIFEST):
        report, result = run_on_pack(model, progress)
        if json_file is not None:
            report.write(json_file)
        return report, result
    # The draft is compared too, even if it would not pay.
    drafter = {} if options.get("draft") == "none" else {"drafter": "int4"}
    config = build(RunConfig, {"memory_budget": memory_budget, **drafter, **options})
    opened = open_model(model, config.verify_reads)
    if config.context_length is None:  # memory is planned for this context and a draft together
        context = min(MAX_TOKENS + VERIFY_ROWS, opened.shape.max_context)
        config = replace(config, context_length=context)
    dtype = DTYPES.get(config.dtype, opened.store.codec.shape.dtype)
    device = find_device(config.device).torch
    try:
        fits(opened, dtype, device)
    except SpeqError:
        opened.close()
        raise
    generator = Generator.of_opened(opened, config, progress=progress)
    try:
        limit = min(MAX_TOKENS, generator.max_context)
        encoded = [generator.encode(text)[:limit] for text in texts]
        generator.reserve(min(max(map(len, encoded)) + VERIFY_ROWS, generator.max_context))
        turns = track("running prompts", encoded, len(encoded), progress)
        traces = [trace(generator, ids) for ids in turns]
    finally:
        generator.close()
    del generator

    progress(PLAIN, 0, 1)
    with closing(open_model(model)) as opened:
        plain, coded = load_plain(opened, dtype, device), opened.checkpoint.coded
        progress(PLAIN, 1, 1)
        pairs = list(zip(encoded, traces, strict=True))
        chunks = [pairs[at : at + plain.together] for at in range(0, len(pairs), plain.together)]
        done = track("comparing prompts", chunks, len(chunks), progress)
        compared = [each for chunk in done for each in compare(plain, chunk)]
    rows = [each.figures for each in compared]
    if dtype in ROUNDED:
        far = FAR * torch.cat([each.plain_errors for each in compared]).quantile(USUAL)
        for each in compared:
            each.figures["far"] = int((each.errors > far).sum())
            each.figures["plain_far"] = int((each.plain_errors > far).sum())
    report = Report("check", model, {"dtype": str(dtype), **options}, rows)
    if json_file is not None:
        report.write(json_file)
    return report, verdict(rows, dtype, coded.format, coded.format != coded.held)


def run_on_pack(model: str, progress: Progress) -> tuple[Report, CheckResult]:
    """Compare all of a pack with its checksums, since plain transformers cannot read packs.

    Raises SpeqError for the first difference.
    """
    opened = open_model(model)
    try:
        if not isinstance(opened.store, PackedExpertStore):
            raise FileError(f"{model} is not a pack; give a folder that `speq pack` wrote")
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
    return Report("check", model, {}, [row]), CheckResult(True, sentence)


def columns_of(report: Report) -> dict[str, Column]:
    """Return the columns for a report of `run`."""
    if "experts" in report.rows[0]:
        return PACK_COLUMNS
    known = [title for title, (name, _) in COLUMNS.items() if report.rows[0][name] is not None]
    return {title: COLUMNS[title] for title in known}


def trace(generator: Generator, ids: list[int]) -> Trace:
    """Run a sequence as verification would, and token by token as the draft would."""
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
    """Count (equal, all) layers and tokens: equal if the draft named exactly the used experts."""
    pairs = [
        (set(lookahead.expert_ids(token, layer)), set(route.ids[token]))
        for layer, route in lookahead.used.items()
        for token in range(tokens)
        if (token, layer) in lookahead.predicted
    ]
    return sum(predicted == used for predicted, used in pairs), len(pairs)


@contextmanager
def in_float32(plain: Any) -> Iterator[None]:
    """Let a model of transformers compute in float32 inside the block, with its own weights.

    A layer's weights are widened while it runs, so this needs memory for one more layer.
    """
    layers = list(plain.get_decoder().layers)
    within = {id(tensor) for layer in layers for tensor in weights_of(layer)}
    narrow: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def widen(module: nn.Module, tensors: list[Tensor]) -> None:
        narrow[id(module)] = [(tensor, tensor.data) for tensor in tensors]
        for tensor in tensors:
            tensor.data = tensor.data.float()

    def restore(module: nn.Module) -> None:
        for tensor, data in narrow.pop(id(module), ()):
            tensor.data = data

    hooks = [
        hook
        for layer in layers
        for hook in (
            layer.register_forward_pre_hook(lambda layer, _: widen(layer, weights_of(layer))),
            layer.register_forward_hook(lambda layer, *_: restore(layer), always_call=True),
        )
    ]
    try:
        widen(plain, [tensor for tensor in weights_of(plain) if id(tensor) not in within])
        yield
    finally:
        restore(plain)
        for hook in hooks:
            hook.remove()


def weights_of(module: nn.Module) -> list[Tensor]:
    """List the parameters and buffers in 16 bits."""
    tensors = (*module.parameters(), *module.buffers())
    return [tensor for tensor in tensors if tensor.dtype in ROUNDED]


def compare(plain: PlainModel, chunk: list[tuple[list[int], Trace]]) -> list[SequenceComparison]:
    """Compare our logits of sequences with transformers'."""
    sequences, ours = [ids for ids, _ in chunk], [trace for _, trace in chunk]
    theirs = plain.logits(sequences)
    wide: list[Tensor | None] = [None] * len(chunk)
    if ours[0].exact.dtype in ROUNDED:
        with in_float32(plain.hf_model):
            wide = [*plain.logits(sequences)]
    return list(map(compare_sequence, sequences, ours, theirs, wide))


def compare_sequence(
    ids: list[int], ours: Trace, theirs: Tensor, wide: Tensor | None
) -> SequenceComparison:
    """Compare our logits of a sequence. wide: transformers' own in float32, of a run in 16 bits"""
    exact = ours.exact.float()
    errors = plain_errors = torch.empty(0)
    if wide is not None:
        errors, plain_errors = (
            (logits - wide).square().mean(-1).sqrt() / wide.std(-1) for logits in (exact, theirs)
        )
    row: dict[str, Any] = {
        "tokens": len(ids),
        "agreement": (exact.argmax(-1) == theirs.argmax(-1)).double().mean().item(),
        "far": None,
        "plain_far": None,
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
    return SequenceComparison(row, errors, plain_errors)


def verdict(
    rows: list[dict[str, Any]], dtype: torch.dtype, published: str = WORDS, decoded: bool = False
) -> CheckResult:
    """Judge the rows.

    published  format of the checkpoint's weights
    decoded    whether these are codes that no kernel multiplies
    """
    tokens = sum(row["tokens"] for row in rows)
    agreement = sum(row["agreement"] * row["tokens"] for row in rows) / tokens
    name = str(dtype).removeprefix("torch.")
    if dtype in ROUNDED:
        ours, plain = (sum(row[each] for row in rows) for each in ("far", "plain_far"))
        passed = ours - plain <= DEVIATIONS * (ours + plain) ** 0.5
        wanted = (
            f"; at {ours} ours and at {plain} transformers' logits are far from float32's, so "
            f"rounding {'explains' if passed else 'does not explain'} what differs"
        )
    else:
        passed, wanted = agreement == 1, " (100% required)"
    meaning = "" if published == WORDS else f"; of both, {MEANINGS[published]}"
    meaning += f"; {DECODED}" if decoded else ""
    return CheckResult(
        passed,
        f"{'passed' if passed else 'FAILED'}: the exact path and transformers choose the same "
        f"token at {agreement:.2%} of {tokens} positions in {name}{wanted}{meaning}",
    )
