"""Which experts verifications want (MoE-Spec, Figures 2, 4, 7 and 8), on routes of the exact model.

Unique experts of chains and of drafted trees, what share of routing weight the best few experts of
a window hold, and which experts are chosen together. Nothing is left out here: output is exact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from bench.lab import expert_shares
from bench.lab.command import main
from bench.lab.expert_shares import Flags, Floats, Ids
from bench.lab.options import RecordingBudget
from bench.lab.route_sample import (
    DRAFT_LENGTH,
    TextSample,
    TreePlan,
    TreeSample,
    record_routes,
)
from speq.bench.kinds import texts_of
from speq.bench.settings import PromptKinds, numbers
from speq.config import (
    DEFAULT_READER_THREADS,
    MAX_DRAFT_NODES,
    Device,
    Draft,
    DraftDense,
    Dtype,
    ReaderThreads,
)
from speq.errors import OptionError, checked_int
from speq.generator import Generator
from speq.governor.speedup_model import activated_experts
from speq.layers.expert_counts import ExpertCounts
from speq.measure.picture import Axis, Picture, percent
from speq.measure.report import Column, Report
from speq.measure.settings import MaxNewTokens
from speq.options.declared import Option, Options
from speq.options.kinds import File, ListOf, Whole
from speq.units import Progress


@dataclass(frozen=True, slots=True)
class CoverageSettings(Options):
    """tree_nodes, tree_passes and tree_every are of trees, which need an INT4 copy."""

    memory_budget: RecordingBudget
    prompts: PromptKinds = ()
    num_prompts: Annotated[int, Option("How many of each kind.", Whole(1))] = 4
    max_new_tokens: MaxNewTokens = 200
    chains: Annotated[
        tuple[int, ...],
        Option("Consecutive tokens that experts are counted of.", numbers(Whole(1), "1,5")),
    ] = (1, 2, 3, 5, 9, 17, 33, 64)
    tree_nodes: Annotated[
        tuple[int, ...],
        Option(
            "Tokens of drafted trees at most; a verification has a row more.",
            numbers(Whole(1, MAX_DRAFT_NODES), "8,16"),
        ),
    ] = (4, 8, 16, 32, 63)
    tree_passes: Annotated[
        int | None,
        Option(
            "Passes of the INT4 copy that a tree takes; default: half as many as its tokens.",
            Whole(1, MAX_DRAFT_NODES),
        ),
    ] = None
    tree_every: Annotated[
        int, Option("Tokens of a text from one place with trees to the next.", Whole(1))
    ] = 16
    windows: Annotated[
        tuple[int, ...],
        Option("Consecutive tokens that experts are ranked over.", numbers(Whole(1), "5,9")),
    ] = (1, 5, 9, 17, 64)
    experts: Annotated[
        tuple[int, ...],
        Option(
            "How many of a layer's experts are kept; default: an eighth of them, two, three, four "
            "and six eighths.",
            ListOf(Whole(1), "whole numbers separated by commas, such as 8,16", optional=True),
        ),
    ] = ()
    counts: Annotated[
        Path | None,
        Option("Keep here how often each expert was chosen, for static rankings.", File()),
    ] = None
    draft: Draft = "auto"
    draft_dense: DraftDense = "auto"
    device: Device = "auto"
    dtype: Dtype = "auto"
    reader_threads: ReaderThreads = DEFAULT_READER_THREADS


CHAIN, TREE = "chain", "tree"
# Of all kinds of prompts together.
ALL = "all"
EIGHTHS = (1, 2, 3, 4, 6)

COLUMNS: dict[str, Column] = {
    "prompts": ("prompts", "{}"),
    "tokens": ("tokens", "{}"),
    "experts": ("experts", "{}"),
    "probability": ("probability", "{:.1%}"),
    "least layer": ("probability_least", "{:.1%}"),
    "most layer": ("probability_most", "{:.1%}"),
    "served weight": ("served", "{:.1%}"),
    "its least layer": ("served_least", "{:.1%}"),
}
WINDOW = (Axis("tokens", "tokens"), Axis("prompts", "prompts"))
KEPT, ROWS = Axis("experts", "experts that are kept"), Axis("rows", "rows of a verification")
PICTURES = (
    Picture(
        *("unique", "Experts that a verification wants", (ROWS,)),
        (Axis("distinct", "distinct experts of a layer"),),
        (Axis("shape", "draft"),),
        low="distinct_least",
        high="distinct_most",
        mark="lines",
        rows="unique",
    ),
    Picture(
        *("probability", "Routing probability that the best experts hold", (KEPT,)),
        (percent("probability", "routing probability"),),
        WINDOW,
        mark="lines",
    ),
    Picture(
        *("concentration", "How often a layer's strongest pair is chosen together"),
        (Axis("layer", "layer"),),
        (Axis("concentration", "times what uniform choice has"),),
        rows="layers",
    ),
)
UNIQUE_COLUMNS: dict[str, Column] = {
    "draft": ("shape", "{}"),
    "asked": ("asked", "{}"),
    "rows": ("rows", "{:.1f}"),
    "depth": ("depth", "{:.1f}"),
    "samples": ("samples", "{}"),
    "experts": ("distinct", "{:.2f}"),
    "least layer": ("distinct_least", "{:.2f}"),
    "most layer": ("distinct_most", "{:.2f}"),
    "same rows, text": ("of_text", "{:.2f}"),
    "N(t)": ("independent", "{:.2f}"),
}
LAYER_COLUMNS: dict[str, Column] = {
    "layer": ("layer", "{}"),
    "concentration": ("concentration", "{:.1f}"),
    "pair": ("pair", "{}"),
    "tokens with both": ("together", "{}"),
    "expected": ("expected", "{:.1f}"),
}
# Options that name files it writes beside its JSON.
WRITTEN = ("counts",)
FURTHER_TABLES = (
    ("unique experts of a layer, by rows of a verification", "unique", UNIQUE_COLUMNS),
    ("experts chosen together", "layers", LAYER_COLUMNS),
)


@dataclass(slots=True)
class CoverageReport(Report):
    """rows: kind of prompts, tokens of a window, and how many experts are kept.

    unique  chains and trees: rows of a verification, the pending token's among them, and the
            distinct experts that a layer is asked for, on the mean of layers, least and most.
            of_text: for trees, of as many consecutive tokens of the text from the same one
            on. independent: N(t) of MoESD
    layers  how often the two experts were chosen together that were so most often, beside what
            uniform choice would give, and the ratio, which is Eq. 9. choices: of each (Eq. 4)
    """

    unique: list[dict[str, Any]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)


def run(model: str, settings: CoverageSettings, progress: Progress | None = None) -> CoverageReport:
    """Write texts and look at their routes. Raises SpeqError for nonsense settings."""
    check_lengths(settings)
    texts = texts_of(settings.prompts, settings.num_prompts)
    trees = TreePlan(settings.tree_nodes, settings.tree_passes, settings.tree_every)
    drafts = settings.draft != "none"
    generator = Generator.from_pretrained(
        model,
        settings.memory_budget,
        progress=progress,
        draft=settings.draft,
        draft_dense=settings.draft_dense,
        draft_length=DRAFT_LENGTH,
        # Asked for by name, a draft is held wherever it fits.
        drafter="int4" if drafts else "none",
        draft_nodes=max(settings.tree_nodes) if drafts else None,
        # Rows that are given up would have no routes.
        prune_rows="off",
        # A graph's next layer may overwrite the logits of the one before.
        graphs="none",
        profile="none",
        device=settings.device,
        dtype=settings.dtype,
        reader_threads=settings.reader_threads,
    )
    try:
        sizes = sizes_of(settings.experts, generator.runtime.shape.experts.num_experts)
        samples = record_routes(generator, texts, settings.max_new_tokens, trees, progress)
        top_k = generator.runtime.shape.top_k
    finally:
        generator.close()
    report = CoverageReport(
        "coverage",
        model,
        settings.as_json(),
        coverage_rows(samples, settings.windows, sizes),
        unique=unique_rows(samples, settings.chains, settings.tree_nodes, top_k),
        layers=layer_rows(samples, top_k),
    )
    if settings.counts is not None:
        counts_of(samples, model, top_k).write(settings.counts)
    return report


def check_lengths(settings: CoverageSettings) -> None:
    """Raise SpeqError for what no text is long enough for."""
    # The last token of a text is not run. Trees stand beside as many tokens as they have rows.
    tokens = settings.max_new_tokens - 1
    for name, rows in (("chains", 0), ("windows", 0), ("tree_nodes", 1)):
        longest = max(getattr(settings, name))
        if longest + rows > tokens:
            raise OptionError(
                f"{name} has {longest} and max_new_tokens is {settings.max_new_tokens}, of which "
                f"{tokens} are run; give smaller numbers, or more tokens"
            )


def notes(report: CoverageReport) -> list[str]:
    """What readers of the tables need to know besides."""
    found = [
        "share of routing weight that the best experts of a window hold, ranked by the sum of "
        "their probabilities: of all probability, and of the weight that experts were served with"
    ]
    if not any(row["shape"] == TREE for row in report.unique):
        found.append("no trees: no INT4 copy of the experts was held to draft them")
    if report.settings["counts"] is not None:
        found.append(f"{report.settings['counts']}: how often each expert was chosen")
    return found


def sizes_of(asked: Sequence[int], num_experts: int) -> list[int]:
    """How many experts are kept, as asked for or in eighths. Raises SpeqError beyond a layer's."""
    if not asked:
        return sorted({max(num_experts * each // 8, 1) for each in EIGHTHS})
    return [checked_int("experts", each, 1, num_experts) for each in asked]


def coverage_rows(
    samples: list[TextSample], windows: Sequence[int], sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """Shares of kinds of prompts, and of all together where there are several."""
    kinds = [*dict.fromkeys(sample.kind for sample in samples)]
    rows = []
    for kind in [*kinds, ALL] if len(kinds) > 1 else kinds:
        mine = [sample for sample in samples if kind in (sample.kind, ALL)]
        for window in windows:
            count, probability, served = covered_by(mine, window, sizes)
            for at, size in enumerate(sizes):
                rows.append(
                    {"prompts": kind, "tokens": window, "experts": size, "windows": count}
                    | over_layers("probability", probability[:, at])
                    | over_layers("served", served[:, at])
                )
    return rows


def covered_by(
    samples: list[TextSample], window: int, sizes: Sequence[int]
) -> tuple[int, Floats, Floats]:
    """Number of windows, and shares [L, len(sizes)] of probability and of the weight that experts
    were served with, which the best by probability hold; means over windows.
    """
    probability, served = [], []
    for sample in samples:
        tokens = sample.tokens
        for rows in expert_shares.windows(tokens.tokens, window):
            scores = tokens.probabilities[:, rows].sum(1)
            probability.append(expert_shares.covered_shares(scores, scores, sizes))
            weights = tokens.weights[:, rows].sum(1)
            served.append(expert_shares.covered_shares(scores, weights, sizes))
    return len(probability), np.mean(probability, axis=0), np.mean(served, axis=0)


def over_layers(name: str, figures: Floats) -> dict[str, float]:
    """Mean, least and most of figures [L]."""
    return {
        name: float(figures.mean()),
        f"{name}_least": float(figures.min()),
        f"{name}_most": float(figures.max()),
    }


def unique_rows(
    samples: list[TextSample], chains: Sequence[int], trees: Sequence[int], top_k: int
) -> list[dict[str, Any]]:
    """Chains of each length, and trees of each size of which there are any."""
    num_experts = samples[0].tokens.marks.shape[2]

    def independent(rows: int) -> float:
        return activated_experts(num_experts, top_k, rows)

    found = [chain_row(samples, rows, independent) for rows in chains]
    for nodes in trees:
        grown = [
            (sample, tree) for sample in samples for tree in sample.trees if tree.nodes == nodes
        ]
        if grown:
            found.append(tree_row(grown, nodes, independent))
    return found


def chain_row(
    samples: list[TextSample], rows: int, independent: Callable[[int], float]
) -> dict[str, Any]:
    counts = [
        expert_shares.distinct(sample.tokens.marks[:, part])
        for sample in samples
        for part in expert_shares.windows(sample.tokens.tokens, rows)
    ]
    return {
        "shape": CHAIN,
        "asked": rows - 1,
        "rows": float(rows),
        "depth": float(rows - 1),
        "samples": len(counts),
        **over_layers("distinct", np.mean(counts, axis=0)),
        "of_text": None,
        "independent": independent(rows),
    }


def tree_row(
    grown: list[tuple[TextSample, TreeSample]], nodes: int, independent: Callable[[int], float]
) -> dict[str, Any]:
    counts = [expert_shares.distinct(tree.marks) for _, tree in grown]
    rows = [tree.marks.shape[1] for _, tree in grown]
    beside = [expert_shares.distinct(of_text(sample, tree)) for sample, tree in grown]
    return {
        "shape": TREE,
        "asked": nodes,
        "rows": float(np.mean(rows)),
        "depth": float(np.mean([tree.depth for _, tree in grown])),
        "samples": len(counts),
        **over_layers("distinct", np.mean(counts, axis=0)),
        "of_text": float(np.mean(beside)),
        "independent": float(np.mean([independent(each) for each in rows])),
    }


def of_text(sample: TextSample, tree: TreeSample) -> Flags:
    """As many consecutive tokens of the text as the tree has rows, from its pending one on."""
    return sample.tokens.marks[:, tree.start : tree.start + tree.marks.shape[1]]


def layer_rows(samples: list[TextSample], top_k: int) -> list[dict[str, Any]]:
    """Each MoE layer, and the mean of all. Of one expert a token there are no pairs."""
    each = [expert_shares.coactivation(sample.tokens.marks) for sample in samples]
    together: Ids = np.sum(each, axis=0)
    tokens = sum(sample.tokens.tokens for sample in samples)
    num_experts = together.shape[1]
    expected = expert_shares.expected_pair(tokens, top_k, num_experts)
    rows = []
    for layer, matrix in enumerate(together):
        pair = expert_shares.strongest_pair(matrix)
        most = int(matrix[pair])
        rows.append(
            {
                "layer": layer,
                "tokens": tokens,
                "concentration": most / expected if expected else None,
                "pair": list(pair) if expected else None,
                "together": most,
                "expected": expected,
                "choices": matrix.diagonal().tolist(),
            }
        )
    whole = dict.fromkeys(rows[0]) | {"layer": ALL, "tokens": tokens, "expected": expected}
    if expected:
        whole["concentration"] = sum(row["concentration"] for row in rows) / len(rows)
    return [*rows, whole]


def counts_of(samples: list[TextSample], model: str, top_k: int) -> ExpertCounts:
    """Choices of all tokens (Eq. 4)."""
    counts: Ids = np.sum([sample.tokens.marks.sum(1) for sample in samples], axis=0)
    tokens = sum(sample.tokens.tokens for sample in samples)
    return ExpertCounts(model, tokens, top_k, counts.tolist())


if __name__ == "__main__":
    main("coverage")
