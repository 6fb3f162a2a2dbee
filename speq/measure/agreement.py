"""Compares the exact path with plain transformers by teacher forcing, or a pack with its checksums.

Both models run the same given sequences. Neither sees the other's output, so one difference does
not cause the next.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speq.config import RunConfig
from speq.devices.named import find_device
from speq.experts.packed_store import PackedExpertStore
from speq.files.published_format import DECODED, MEANINGS, WORDS
from speq.generator import Generator
from speq.measure import pack_check
from speq.measure.plain_model import ROUNDED, PlainModel, fits, load_plain
from speq.measure.report import Column
from speq.measure.teacher_forced import forced_passes
from speq.models.opened import Opened, open_model
from speq.models.shape import DTYPES
from speq.options.declared import build
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
class Agreement:
    """What was found. rows: one for each sequence, or one for a pack"""

    rows: list[dict[str, Any]]
    passed: bool
    sentence: str

    @property
    def columns(self) -> dict[str, Column]:
        if "experts" in self.rows[0]:
            return PACK_COLUMNS
        return {
            title: column
            for title, column in COLUMNS.items()
            if self.rows[0][column[0]] is not None
        }


@dataclass(frozen=True, slots=True)
class SequenceComparison:
    """One sequence's figures, and its logits' distances from those in float32.

    Distances are a share of the logits' spread, [T]; empty if the run computes in float32.
    """

    figures: dict[str, Any]
    errors: Tensor
    plain_errors: Tensor


def run(
    model: str, texts: list[str], progress: Progress = no_progress, **options: Any
) -> Agreement:
    """Compare on the first MAX_TOKENS tokens of each text, or all of a pack with its checksums.

    options: of a run, with a memory budget. Raises SpeqError for the first difference of a pack,
    and NoRoom where not even one layer of transformers' experts fits in memory.
    """
    config = build(RunConfig, options)
    device = find_device(config.device).torch
    with closing(open_model(model)) as opened:
        if isinstance(opened.store, PackedExpertStore):
            return of_pack(opened, opened.store, progress)
        dtype = DTYPES.get(config.dtype, opened.store.codec.shape.dtype)
        fits(opened, dtype, device)
    with closing(Generator.load(model, config, progress=progress)) as generator:
        limit = min(MAX_TOKENS, generator.max_context)
        encoded = [generator.encode(text)[:limit] for text in texts]
        generator.reserve(min(max(map(len, encoded)) + VERIFY_ROWS, generator.max_context))
        turns = track("running prompts", encoded, len(encoded), progress)
        ours = [logits_of(generator, ids) for ids in turns]
    del generator

    progress(PLAIN, 0, 1)
    with closing(open_model(model)) as opened:
        plain, coded = load_plain(opened, dtype, device), opened.checkpoint.coded
        progress(PLAIN, 1, 1)
        pairs = list(zip(encoded, ours, strict=True))
        chunks = [pairs[at : at + plain.together] for at in range(0, len(pairs), plain.together)]
        done = track("comparing prompts", chunks, len(chunks), progress)
        compared = [each for chunk in done for each in compare(plain, chunk)]
    if dtype in ROUNDED:
        far = FAR * torch.cat([each.plain_errors for each in compared]).quantile(USUAL)
        for each in compared:
            each.figures["far"] = int((each.errors > far).sum())
            each.figures["plain_far"] = int((each.plain_errors > far).sum())
    rows = [each.figures for each in compared]
    return verdict(rows, dtype, coded.format, coded.format != coded.held)


def of_pack(opened: Opened, store: PackedExpertStore, progress: Progress) -> Agreement:
    """Compare all of a pack with its checksums, since plain transformers cannot read packs.

    Raises SpeqError for the first difference.
    """
    row = pack_check.compare(opened, store, progress)
    dense = f"{row['dense']} dense records, " if row["dense"] else ""
    others = f"{dense}{row['tensors']} other tensors and {row['files']} files"
    if not row["tensors"]:
        others = "nothing else, which this pack has no checksums of: pack the model again"
    sentence = (
        f"{row['experts']} experts are what was packed, and {others}; to compare with "
        "transformers, give the model that it was packed from"
    )
    return Agreement([row], True, sentence)


def logits_of(generator: Generator, ids: list[int]) -> Tensor:
    """Run a sequence as verification would; return its logits, [T, V] on the CPU."""
    passes = forced_passes(generator.runtime, ids, VERIFY_ROWS)
    return torch.cat([forced.exact.cpu() for forced in passes])


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


def compare(plain: PlainModel, chunk: list[tuple[list[int], Tensor]]) -> list[SequenceComparison]:
    """Compare our logits of sequences with transformers'."""
    sequences, ours = [ids for ids, _ in chunk], [logits for _, logits in chunk]
    theirs = plain.logits(sequences)
    wide: list[Tensor | None] = [None] * len(chunk)
    if ours[0].dtype in ROUNDED:
        with in_float32(plain.hf_model):
            wide = [*plain.logits(sequences)]
    return list(map(compare_sequence, sequences, ours, theirs, wide))


def compare_sequence(
    ids: list[int], ours: Tensor, theirs: Tensor, wide: Tensor | None
) -> SequenceComparison:
    """Compare our logits of a sequence. wide: transformers' own in float32, of a run in 16 bits"""
    exact = ours.float()
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
    }
    return SequenceComparison(row, errors, plain_errors)


def verdict(
    rows: list[dict[str, Any]], dtype: torch.dtype, published: str = WORDS, decoded: bool = False
) -> Agreement:
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
    return Agreement(
        rows,
        passed,
        "the exact path and transformers choose the same token at "
        f"{agreement:.2%} of {tokens} positions in {name}{wanted}{meaning}",
    )
