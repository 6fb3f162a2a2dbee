"""Does the draft choose the experts that the exact model will (MoE-SpeQ, Figures 5 and 6)?

Real texts are run through both, teacher-forced; from between their passes the draft also runs on
freely, as in a generation, and is verified, which says how far ahead its routes are worth reading.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from bench.lab.command import main
from bench.lab.fidelity_counts import Fidelity, Position
from bench.lab.options import BudgetText
from bench.lab.route_match import RouteMatch, entropy_bits, total
from speq.config import (
    MAX_DRAFT_LENGTH,
    Device,
    Draft,
    DraftDense,
    Dtype,
    ReaderThreads,
)
from speq.errors import NoRoom, OptionError
from speq.generator import Generator
from speq.measure.picture import Axis, Picture, percent
from speq.measure.report import Column, Report, read_prompts
from speq.measure.settings import NumPrompts, Prompts
from speq.measure.teacher_forced import forced_passes
from speq.options.declared import Option, Options
from speq.options.kinds import Whole
from speq.stats import ratio
from speq.units import Progress, format_bytes


@dataclass(frozen=True, slots=True)
class FidelitySettings(Options):
    """draft_length: one more is what passes over texts have."""

    memory_budget: BudgetText
    draft: Draft = "auto"
    draft_dense: DraftDense = "auto"
    draft_length: Annotated[
        int, Option("Tokens the draft runs on freely.", Whole(1, MAX_DRAFT_LENGTH))
    ] = 8
    prompts: Prompts = None
    num_prompts: NumPrompts = 8
    max_tokens: Annotated[int, Option("Tokens of each prompt at most.", Whole(2))] = 256
    device: Device = "auto"
    dtype: Dtype = "auto"
    reader_threads: ReaderThreads = None


COLUMNS: dict[str, Column] = {
    "layer": ("layer", "{}"),
    "hard": ("hard", "{:.1%}"),
    "soft": ("soft", "{:.1%}"),
    "mismatch": ("mismatch", "{:.1%}"),
    "route recall": ("recall", "{:.1%}"),
    "entropy, bits": ("entropy_bits", "{:.2f}"),
    "of log2 E": ("entropy_share", "{:.1%}"),
}
LAYER = (Axis("layer", "layer"),)
CHOICES = (
    percent("hard", "same experts in the same order"),
    percent("soft", "same experts in another order"),
    percent("mismatch", "another expert"),
)
ALONG = (
    percent("forced_recall", "route recall, teacher-forced"),
    percent("recall", "route recall, free"),
    percent("accepted", "token accepted"),
)
PICTURES = (
    Picture(
        *("matches", "Experts that the draft chooses, by tokens", LAYER, CHOICES),
        mark="stack",
        aid="The taller the lowest part, the more tokens draw the same experts in the same order.",
    ),
    Picture("entropy", "How evenly experts are used", LAYER, (Axis("entropy_bits", "bits"),)),
    Picture(
        *("along", "Along a draft", (Axis("position", "position"),), ALONG),
        mark="lines",
        rows="positions",
    ),
)
TEXT_COLUMNS: dict[str, Column] = {
    "tokens": ("tokens", "{}"),
    "same next token": ("agreement", "{:.1%}"),
    "drawn alike": ("drawn_alike", "{:.1%}"),
    "overlap": ("overlap", "{:.1%}"),
    "perplexity, exact": ("exact_perplexity", "{:.3f}"),
    "perplexity, draft": ("draft_perplexity", "{:.3f}"),
    "gap": ("perplexity_gap", "{:+.3f}"),
}
POSITION_COLUMNS: dict[str, Column] = {
    "position": ("position", "{}"),
    "recall, forced": ("forced_recall", "{:.1%}"),
    "recall, free": ("recall", "{:.1%}"),
    "of accepted": ("accepted_recall", "{:.1%}"),
    "drafts": ("drafts", "{}"),
    "accepted": ("accepted", "{:.1%}"),
    "after accepted": ("accepted_after", "{:.1%}"),
}
# Behind the rows: what a table is called, and the field that it shows.
FURTHER_TABLES = (
    ("next token, teacher-forced", "texts", TEXT_COLUMNS),
    ("along a draft", "positions", POSITION_COLUMNS),
)


@dataclass(slots=True)
class FidelityReport(Report):
    """rows: each MoE layer, and all of them.

    texts      one row: what both models make of the texts' next tokens
    positions  one row for each token that a draft runs. The first is the pending token, which is
               certain; at position p a draft runs a token and proposes its p-th. Route recall
               teacher-forced, of free drafts, and of those tokens of them that were accepted;
               of the tokens proposed, those accepted, in all and where those before them were
    """

    texts: list[dict[str, Any]] = field(default_factory=list)
    positions: list[dict[str, Any]] = field(default_factory=list)


def run(
    model: str, settings: FidelitySettings, *, progress: Progress | None = None
) -> FidelityReport:
    """Compare on the first max_tokens tokens of each prompt. Raises SpeqError for nonsense."""
    if settings.draft == "none":
        raise OptionError("draft is none, and there is nothing to compare; give auto or a folder")
    texts = read_prompts(settings.prompts, settings.num_prompts)
    generator = Generator.from_pretrained(
        model,
        settings.memory_budget,
        progress=progress,
        draft=settings.draft,
        draft_dense=settings.draft_dense,
        draft_length=settings.draft_length,
        profile="none",
        device=settings.device,
        dtype=settings.dtype,
        reader_threads=settings.reader_threads,
    )
    try:
        encoded = [generator.encode(text)[: settings.max_tokens] for text in texts]
        found = compare(generator, encoded, settings.draft_length, progress)
    finally:
        generator.close()
    given = settings.as_json()
    report = report_of(model, given, found)
    return report


def compare(
    generator: Generator,
    texts: list[list[int]],
    draft_length: int,
    progress: Progress | None = None,
) -> Fidelity:
    """Both models on texts of token ids, each cut to what the context holds beside a draft."""
    runtime = generator.runtime
    rows = draft_length + 1
    limit = generator.max_context - rows
    if limit < 1:
        raise NoRoom(
            f"draft_length is {draft_length}, and a context of {generator.max_context} tokens has "
            "no room for a text beside such a draft; give a shorter one"
        )
    texts = [token_ids[:limit] for token_ids in texts]
    generator.reserve(max(map(len, texts)) + rows)
    if runtime.draft_backend is None:
        raise NoRoom(
            f"the memory budget {format_bytes(runtime.config.memory_budget)} has no room for the "
            "draft, and there is nothing to compare; give a larger one"
        )
    report = _progress_over(sum(map(len, texts)), progress)
    found = Fidelity.empty(
        runtime.model.num_moe_layers, runtime.shape.experts.num_experts, draft_length
    )
    done = 0
    for token_ids in texts:
        for forced in forced_passes(runtime, token_ids, rows):
            end = forced.start + forced.tokens
            found.add_forced(forced, token_ids[forced.start + 1 : end + 1])
            if end < len(token_ids):
                found.run_freely(runtime, token_ids[: end + 1])
            done += forced.tokens
            report(done)
    return found


def _progress_over(tokens: int, progress: Progress | None) -> Callable[[int], None]:
    if progress is None:
        return lambda done: None
    return lambda done: progress("comparing draft and exact model", done, tokens)


def report_of(model: str, settings: dict[str, Any], found: Fidelity) -> FidelityReport:
    """Counts as shares. A share that nothing was counted for is None."""
    layers = [
        layer_row(layer, match) | spread(counts)
        for layer, (match, counts) in enumerate(zip(found.layers, found.activations, strict=True))
    ]
    bits = sum(row["entropy_bits"] for row in layers) / len(layers)
    whole = layer_row("all", total(found.layers)) | {
        "entropy_bits": bits,
        "entropy_share": ratio(bits, math.log2(len(found.activations[0]))),
        "activations": None,
    }
    positions = [
        position_row(at, before, position)
        for at, (before, position) in enumerate(
            zip([None, *found.positions], found.positions, strict=False), start=1
        )
    ]
    return FidelityReport(
        "fidelity",
        model,
        settings,
        [*layers, whole],
        texts=[found.texts.row()],
        positions=positions,
    )


def layer_row(layer: int | str, match: RouteMatch) -> dict[str, Any]:
    return {
        "layer": layer,
        "pairs": match.pairs,
        "hard": ratio(match.hard, match.pairs),
        "soft": ratio(match.soft, match.pairs),
        "mismatch": ratio(match.mismatch, match.pairs),
        "recall": match.recall,
    }


def spread(counts: list[int]) -> dict[str, Any]:
    """How a layer's choices are spread over its experts (Figure 5)."""
    bits = entropy_bits(counts)
    return {
        "entropy_bits": bits,
        "entropy_share": ratio(bits, math.log2(len(counts))),
        "activations": counts,
    }


def position_row(at: int, before: Position | None, position: Position) -> dict[str, Any]:
    reached = position.proposed if before is None else before.accepted
    return {
        "position": at,
        "forced_recall": position.forced.recall,
        "recall": position.free.recall,
        "accepted_recall": position.kept.recall,
        "drafts": position.proposed,
        "accepted": ratio(position.accepted, position.proposed),
        "accepted_after": ratio(position.accepted, reached),
    }


if __name__ == "__main__":
    main("fidelity")
