"""`speq prove`: tokens of a model in many settings on this machine, compared with one another, and
its agreement with transformers, or a pack's with its checksums.

The tokens of plain decoding under the budget are those that all other settings must give: under
other budgets, with drafts, as a batch, out of other codecs, on other devices.
"""

import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from speq.config import RunConfig
from speq.errors import NoRoom, SpeqError, present
from speq.experts.codec import codecs_for
from speq.generator import Generator
from speq.measure import agreement
from speq.measure.agreement import MAX_TOKENS, Agreement
from speq.measure.report import Column, Report, cell_text, read_prompts
from speq.measure.settings import ProveSettings
from speq.models.opened import open_model
from speq.options.declared import build
from speq.planning.memory import BudgetTooSmall
from speq.units import Clock, Progress, format_bytes, no_progress, track

# What no setting that is compared may keep from another, or write.
ALONE = {"profile": "none", "packed_copy": "none"}
SEED = 1
# Tokens of the longest draft, and the one behind it.
MOST_DRAFTED = 8
COLUMNS: dict[str, Column] = {
    "setting": ("setting", "{}"),
    "tokens": ("tokens", "{}"),
    "same": ("same", "{}"),
    "first other": ("first_difference", "{}"),
    "TPOT": ("tpot_ms", "{:.1f} ms"),
    "moved a token": ("moved_bytes_per_token", format_bytes),
    "acceptance": ("acceptance_rate", "{:.0%}"),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to run. options: of the run, with a memory budget"""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SettingOutcome:
    """Token ids that a setting generated, and figures of its runs."""

    texts: list[list[int]]
    figures: list[dict[str, Any]]

    def mean(self, name: str) -> float | None:
        """Mean of a figure over the runs that have it."""
        values = [each[name] for each in self.figures if each[name] is not None]
        return sum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found.

    report    a row of figures for each setting
    agreement with transformers or checksums; None: it was not compared
    sentence  the verdict
    weights   names the files that were read
    """

    report: Report
    agreement: Agreement | None
    passed: bool
    sentence: str
    notes: tuple[str, ...]
    weights: str

    @property
    def tables(self) -> list[tuple[dict[str, Column], list[dict[str, Any]]]]:
        """Columns and rows of settings and of the agreement, of those that were compared."""
        found = [(COLUMNS, self.report.rows)] if self.report.rows else []
        return found + ([(self.agreement.columns, self.agreement.rows)] if self.agreement else [])


def prove(
    model: str,
    settings: ProveSettings,
    progress: Progress = no_progress,
    clock: Clock = time.perf_counter,
) -> Proof:
    """Compare settings until the time is up, and then the exact path with transformers, or a pack
    with its checksums.

    Raises SpeqError if not even plain decoding fits the budget, if a pack is not what was packed,
    and if nothing can be compared.
    """
    prompts = read_prompts(settings.prompts, settings.num_prompts)
    plain = plain_options(model, settings)
    rows, notes, sentences, passed = list[dict[str, Any]](), list[str](), list[str](), True
    if settings.minutes:
        rows, notes = rows_of(model, plain, prompts, settings, progress, clock)
        others = rows[1:]
        tokens, same = (sum(row[name] for row in others) for name in ("tokens", "same"))
        passed = tokens == same and bool(others)
        sentences.append(
            f"{same} of {tokens} tokens in {len(others)} settings are those of plain decoding in "
            f"{settings.dtype}"
        )
    found = None
    try:
        found = agreement.run(model, prompts, progress, **plain)
        passed = passed and found.passed
        sentences.append(found.sentence)
    except NoRoom as error:
        if not rows:
            raise
        notes.append(f"transformers: not compared ({error})")
    kept = {
        **{"dtype": settings.dtype, "max_new_tokens": settings.max_new_tokens, "seed": SEED},
        "run": {name: str(value) for name, value in settings.run.items()},
    }
    report = Report("prove", model, kept, rows, notes=notes)
    return Proof(report, found, passed, "; ".join(sentences), tuple(notes), digest_of(model))


def rows_of(
    model: str,
    plain: dict[str, Any],
    prompts: list[str],
    settings: ProveSettings,
    progress: Progress,
    clock: Clock,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Compare settings until the time is up: rows of those that ran, and notes of the others."""
    begun_s = clock()
    first, *compared = settings_of(model, plain, settings)
    wanted = outcome_of(model, first, prompts, settings)
    rows, notes = [row_of(first, wanted, wanted)], list[str]()
    for setting in track("comparing settings", compared, len(compared), progress):
        if clock() - begun_s > 60 * settings.minutes:
            notes.append(f"{setting.name}: not compared, {settings.minutes:g} minutes were over")
            continue
        try:
            found = outcome_of(model, setting, prompts, settings)
        except SpeqError as error:
            notes.append(f"{setting.name}: cannot run ({error})")
            continue
        if "drafter" in setting.options and found.mean("acceptance_rate") is None:
            notes.append(f"{setting.name}: nothing was drafted")
            continue
        rows.append(row_of(setting, found, wanted))
    return rows, notes


def plain_options(model: str, settings: ProveSettings) -> dict[str, Any]:
    """Options of plain decoding under the budget."""
    with closing(open_model(model)) as opened:
        wanted = MAX_TOKENS + settings.max_new_tokens + MOST_DRAFTED
        context_length = min(wanted, opened.shape.max_context)
    own = {"memory_budget": settings.memory_budget, "dtype": settings.dtype, "draft_length": 0}
    return settings.run | ALONE | own | {"context_length": context_length}


def settings_of(model: str, plain: dict[str, Any], settings: ProveSettings) -> list[Setting]:
    """List settings: plain decoding under the budget, and then those that differ most from it."""
    with closing(open_model(model)) as opened:
        codecs = [name for name in codecs_for(opened.store.codec.shape) if name != "residual"]
    least = least_bytes(model, plain)
    # Room for some experts more.
    scarce = {"memory_budget": int(1.25 * least)}
    ngram = {"drafter": "ngram", "draft_length": 4}
    made = [
        Setting("plain", plain),
        Setting("least budget", plain | {"memory_budget": least}),
        Setting("ngram, k = 4", plain | ngram),
        Setting("INT4 draft, k = 3", plain | {"drafter": "int4", "draft_length": 3}),
        Setting("as a batch", plain | {"max_batch": settings.num_prompts}),
        Setting(
            "scarce, drafts from slots, k = 3",
            plain | scarce | {"drafter": "cached", "draft_length": 3},
        ),
        Setting(
            "scarce, ngram, k = 7, policy lfu",
            plain | scarce | ngram | {"draft_length": 7, "cache_policy": "lfu"},
        ),
    ]
    made += [Setting(f"codec {each}", plain | {"codec": each}) for each in codecs[1:] and codecs]
    if torch.cuda.is_available() and plain.get("device", "auto") == "auto":
        made.append(Setting("on the CPU", plain | {"device": "cpu"}))
    return made


def least_bytes(model: str, options: dict[str, Any]) -> int:
    """The smallest budget that plain decoding runs in."""
    config = build(RunConfig, options | {"memory_budget": 1})
    try:
        Generator.load(model, config).close()
    except BudgetTooSmall as error:
        return error.needed_bytes
    return 1


def outcome_of(
    model: str, setting: Setting, prompts: list[str], settings: ProveSettings
) -> SettingOutcome:
    """Generate from each prompt, greedily and drawn with one seed."""
    texts, figures = list[list[int]](), list[dict[str, Any]]()
    with closing(Generator.load(model, build(RunConfig, setting.options))) as generator:
        longest = setting.options["context_length"] - settings.max_new_tokens - MOST_DRAFTED
        encoded = [generator.encode(prompt)[:longest] for prompt in prompts]
        for temperature in (0.0, 1.0):
            made = generator.generate_batch(
                [*encoded],
                max_new_tokens=settings.max_new_tokens,
                ignore_eos=True,
                temperature=temperature,
                seed=SEED,
            )
            texts += [each.token_ids for each in made]
            figures.append(present(generator.last_run, "a run has no record").summary())
    return SettingOutcome(texts, figures)


def row_of(setting: Setting, found: SettingOutcome, wanted: SettingOutcome) -> dict[str, Any]:
    """Compare generations with those of plain decoding, token by token."""
    tokens, same, first = 0, 0, None
    for at, (ours, theirs) in enumerate(zip(found.texts, wanted.texts, strict=True)):
        pairs = list(zip(ours, theirs, strict=True))
        tokens += len(pairs)
        other = next((n for n, (one, another) in enumerate(pairs) if one != another), None)
        same += len(pairs) if other is None else other
        if other is not None and first is None:
            first = f"text {at + 1}, token {other + 1}"
    figures = ("tpot_ms", "moved_bytes_per_token", "acceptance_rate")
    return {
        **{"setting": setting.name, "tokens": tokens, "same": same, "first_difference": first},
        **{name: found.mean(name) for name in figures},
    }


def page_of(proof: Proof) -> str:
    """The proof in Markdown, to be published beside a model."""
    report = proof.report
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items() if value)
    lines = [
        f"# {Path(report.model).name}: {'exact' if proof.passed else 'NOT exact'}",
        *("", f"{proof.sentence}."),
    ]
    for columns, rows in proof.tables:
        lines += ["", *markdown(columns, rows)]
    if report.rows:
        lines += [
            "",
            f"Each setting generates {report.settings['max_new_tokens']} tokens from each prompt, "
            f"greedily and drawn with the seed {SEED} at temperature 1. A text counts up to its "
            "first other token.",
        ]
    lines += ["", *(f"- {note}" for note in proof.notes)] if proof.notes else []
    lines += ["", f"speq {report.version}, commit {report.commit}; {machine}."]
    lines += [f"Weights: {proof.weights}.", ""]
    return "\n".join(lines)


def markdown(columns: dict[str, Column], rows: Iterable[dict[str, Any]]) -> list[str]:
    """A table in Markdown."""
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(
            f"| {' | '.join(cell_text(row[name], show) for name, show in columns.values())} |"
            for row in rows
        ),
    ]


def digest_of(model: str) -> str:
    """Names the files that were read: a digest of all headers and samples of weights."""
    with closing(open_model(model)) as opened:
        files = opened.checkpoint.files
        nbytes = sum(file.size for file in files.values())
        digest = opened.checkpoint.fingerprint()
    return f"{len(files)} files, {format_bytes(nbytes)}, fingerprint {digest}"
