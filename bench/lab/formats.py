"""Time per output token with experts in BF16, in FP8 and in MXFP4.

The checkpoints have the same shapes, and in BF16 and FP8 they are one model
(`bench.lab.format_files`): these two must compute the same tokens in float32. Words are run as
words, codes out of their codes; nobody drafts. Each run has a process of its own.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.lab.command import main
from bench.lab.format_files import BF16, Folder, write
from bench.lab.format_source import CheckpointModel, FormatSettings, RandomModel, WeightSource
from speq.bench.kinds import texts_of
from speq.bench.rivals import standings
from speq.bench.rivals.contest import Contest, ContestCell, Terms
from speq.bench.rivals.systems import SystemEntry, system
from speq.errors import OptionError
from speq.files.published_format import FP8, MXFP4
from speq.measure.picture import BUDGET, LOWER_IS_FASTER, MOVED, TPOT, Axis, Picture
from speq.measure.report import Column, Report
from speq.text.tokenizer import load_tokenizer, tokens_of
from speq.units import Progress, format_bytes, parse_bytes

# Of what the model takes in BF16: a budget that experts do not fit, and one with room for all.
SHARES = (0.4, 1.25)
# Formats that hold the same words.
ONE_MODEL = (BF16, FP8)
CODECS = {BF16: "raw", FP8: "fp8", MXFP4: "mxfp4"}
# One way to hold each format, which no survey of the machine changes.
HELD = {"dense": "raw", "draft": "none", "draft_length": "0", "packed_copy": "none"}
WARM_UP_TOKENS = 8
# A process that takes longer has failed.
LIMIT_S = 900.0
RANDOM = "random"

COLUMNS: dict[str, Column] = {
    "budget": ("budget", "{}"),
    "experts in": ("format", "{}"),
    "codec": ("codec", "{}"),
    "computes in": ("dtype", "{}"),
    "TPOT ms": ("tpot_ms", "{:.1f}"),
    "p90 ms": ("tpot_p90_ms", "{:.1f}"),
    "spread": ("tpot_spread", "{:.0%}"),
    "of BF16": ("of_bf16", "{:.2f}"),
    "TTFT ms": ("ttft_ms", "{:.0f}"),
    "experts": ("experts_bytes", format_bytes),
    "in slots": ("slots_share", "{:.0%}"),
    "used/token": ("used_bytes_per_token", format_bytes),
    "moved/token": ("moved_bytes_per_token", format_bytes),
    "hits": ("hit_rate", "{:.1%}"),
    "stolen": ("stolen_share", "{:.0%}"),
}
FORMAT = (Axis("format", "experts published in"),)
PICTURES = (
    Picture("tpot", "Time per output token", (BUDGET,), (TPOT,), FORMAT, aid=LOWER_IS_FASTER),
    Picture("moved", "Bytes moved per token", (BUDGET,), (MOVED,), FORMAT),
)


@dataclass(slots=True)
class FormatsReport(Report):
    """compared_tokens: which BF16 and FP8 gave, computing in float32, before any time was taken;
    none where one of them was not measured.

    shape  of the model, as its config.json has it
    """

    shape: dict[str, Any] = field(default_factory=dict)
    compared_tokens: list[int] = field(default_factory=list)


def run(settings: FormatSettings, progress: Progress | None = None) -> FormatsReport:
    """Write the checkpoints, compare their tokens, and measure.

    Raises SpeqError for nonsense settings, where the disk has no room, and where two formats differ
    in a token.
    """
    check_settings(settings)
    source: WeightSource
    source = RandomModel(settings) if settings.source is None else CheckpointModel(settings.source)
    with closing(source), working(settings.work) as work:
        folders = write(source, work, settings.formats, progress)
        contest = Contest(terms_of(settings, work, folders))
        cells = cells_of(settings, folders, budgets_of(settings, source))
        one_model = [cell for cell in cells if cell.entry.label in ONE_MODEL]
        both = set(ONE_MODEL) <= set(settings.formats)
        tokens = contest.compare(one_model, progress) if both else []
        contest.measure(cells, settings.rounds, progress)
        rows = rows_of(cells, contest.terms, folders, source)
        shape = {name: source.config.get(name) for name in SHAPE if name in source.config}
    report = FormatsReport(
        "formats", settings.source or RANDOM, settings.as_json(), rows, shape=shape
    )
    report.compared_tokens = tokens
    return report


SHAPE = (
    *("model_type", "num_hidden_layers", "hidden_size", "moe_intermediate_size", "num_experts"),
    *("n_routed_experts", "num_experts_per_tok", "vocab_size"),
)


def check_settings(settings: FormatSettings) -> None:
    """Raise SpeqError for shapes that no model has, and for texts without a tokenizer."""
    if len(set(settings.formats)) < len(settings.formats):
        raise OptionError("formats name one twice; name each once")
    if settings.top_k > settings.experts:
        raise OptionError(
            f"top_k is {settings.top_k} and a layer has {settings.experts} experts; give fewer"
        )
    if settings.hidden_size % 64:
        raise OptionError(
            f"hidden_size is {settings.hidden_size}; give a multiple of 64, which a head has"
        )
    if settings.source is None and settings.prompts:
        raise OptionError(
            "prompts are given, and random weights have no tokenizer; give a --source, or leave "
            "them out"
        )


@contextmanager
def working(folder: Path | None) -> Iterator[Path]:
    """The folder for checkpoints: the one that is given, or one that goes with the block."""
    if folder is not None:
        yield folder
        return
    with TemporaryDirectory(prefix="speq-formats-") as made:
        yield Path(made)


def budgets_of(settings: FormatSettings, source: WeightSource) -> list[tuple[str, int]]:
    """Budgets as texts and in bytes."""
    if settings.budgets:
        return [(text, parse_bytes(text)) for text in settings.budgets]
    whole = source.experts_weights * torch.bfloat16.itemsize + source.rest_bytes
    texts = [f"{max(1, int(share * whole) >> 20)}MiB" for share in SHARES]
    return [(text, parse_bytes(text)) for text in texts]


def terms_of(settings: FormatSettings, work: Path, folders: dict[str, Folder]) -> Terms:
    """What is the same for every format."""
    stores = {name: folder.path for name, folder in folders.items()}
    prompts = prompts_of(settings, next(iter(stores.values())))
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return Terms(
        model=next(iter(stores.values())),
        stores=stores,
        scratch=work,
        prompts=[tokens for _, tokens in prompts],
        kinds=[kind for kind, _ in prompts],
        max_new_tokens=settings.max_new_tokens,
        warm_up_tokens=WARM_UP_TOKENS,
        text_s=float("inf"),
        reserve_bytes=0,
        capped=False,
        device=device,
        dtype=settings.dtype,
        threads=0,
        neighbours=settings.neighbours,
        limit_s=LIMIT_S,
    )


def prompts_of(settings: FormatSettings, folder: Path) -> list[tuple[str, list[int]]]:
    """Kinds and tokens: random ones of random weights."""
    if settings.source is not None:
        tokenizer = load_tokenizer(folder)
        texts = texts_of(settings.prompts, settings.num_prompts)
        return [(kind, list(tokens_of(tokenizer, text))) for kind, text in texts]
    draws = torch.Generator().manual_seed(settings.seed)
    size = (settings.num_prompts, settings.prompt_tokens)
    drawn = torch.randint(settings.vocab_size, size, generator=draws)
    return [(RANDOM, tokens) for tokens in drawn.tolist()]


def cells_of(
    settings: FormatSettings, folders: dict[str, Folder], budgets: list[tuple[str, int]]
) -> list[ContestCell]:
    """Each format under each budget: speq itself, on another checkpoint."""
    shared = {"reader_threads": settings.reader_threads, "profile": "none"}
    return [
        ContestCell(
            SystemEntry(
                name, replace(system("speq"), store=name), HELD | shared | {"codec": codec}
            ),
            text,
            budget_bytes,
        )
        for text, budget_bytes in budgets
        for name in folders
        for codec in [CODECS[name]]
    ]


def rows_of(
    cells: list[ContestCell], terms: Terms, folders: dict[str, Folder], source: WeightSource
) -> list[dict[str, Any]]:
    """A row for each cell. `of_bf16` is the time of a token as a multiple of that with words in
    BF16 under the same budget; `used_bytes_per_token` what a token's experts take.
    """
    rows = []
    for cell in cells:
        row = standings.row_of(cell, terms)
        name = cell.entry.label
        held, settled = folders[name].experts_bytes, row["settled"]
        slots = settled.get("slots")
        row |= {
            "format": name,
            "codec": settled.get("codec"),
            "dtype": settled.get("dtype"),
            "experts_bytes": held,
            "slots_share": None if slots is None else slots / source.num_experts,
            "used_bytes_per_token": held * source.chosen_share,
        }
        rows.append(row)
    words = {row["budget"]: row["tpot_ms"] for row in rows if row["format"] == BF16}
    for row in rows:
        base = words.get(row["budget"])
        known = row["tpot_ms"] is not None and base is not None
        row["of_bf16"] = row["tpot_ms"] / base if known else None
    return rows


def notes(report: FormatsReport) -> list[str]:
    """What the formats have in common, and what went wrong."""
    count = len(report.compared_tokens)
    said = [f"BF16 and FP8 gave the same {count} tokens in float32"] if count else []
    return [*said, *standings.notes_of(report.rows)]


if __name__ == "__main__":
    main("formats")
