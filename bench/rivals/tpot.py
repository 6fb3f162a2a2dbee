"""`speq bench tpot --systems`: from settings to a table of systems beside each other."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from speq.bench.kinds import texts_of
from speq.bench.rivals.contest import Contest, ContestCell, Terms
from speq.bench.rivals.memory_cap import how_capped
from speq.bench.rivals.standings import COLUMNS, PICTURES, by_kind, kind_columns, notes_of, rows_of
from speq.bench.rivals.systems import SYSTEMS, entry
from speq.bench.settings import TpotSettings as Settings
from speq.errors import OptionError
from speq.files.checkpoint import locate
from speq.measure.console import console
from speq.measure.report import Report, print_table
from speq.text.tokenizer import load_tokenizer, tokens_of
from speq.units import Progress, format_bytes, parse_bytes

# Tokens that warm the caches of a process before its texts are measured.
WARM_UP_TOKENS = 8


@dataclass(slots=True)
class NamedSystems(Report):
    """The systems that there are. Nothing was measured."""

    def print_all(self) -> None:
        table = Table("system", "what it is", title=self.bench)
        for row in self.rows:
            table.add_row(row["system"], row["summary"])
        console().print(table)

    def remarks(self) -> list[str]:
        return []


@dataclass(slots=True)
class SystemsReport(Report):
    """capped_by: what held processes to their memory; compared_tokens: on which systems of ours
    agreed, computing in float32, before any time was taken.
    """

    capped_by: str = ""
    compared_tokens: list[int] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        """Kinds of prompts, where there are several."""
        found = list(dict.fromkeys(kind for row in self.rows for kind in row["by_kind"]))
        return found if len(found) > 1 else []

    def print_all(self) -> None:
        print_table(f"systems: {self.model}", COLUMNS, self.rows)
        if kinds := self.kinds:
            print_table("TPOT in ms by kind of prompt", kind_columns(kinds), by_kind(self.rows))

    def remarks(self) -> list[str]:
        """The terms of the contest, and what went wrong."""
        reserve = format_bytes(parse_bytes(self.settings["reserve"]))
        lines = [
            f"each process had its budget and {reserve} beside, {self.capped_by}; files were cold",
            f"systems of speq gave the same {len(self.compared_tokens)} tokens in float32",
        ]
        return lines + notes_of(self.rows)


def run(
    model: str, settings: Settings, progress: Progress | None = None
) -> SystemsReport | NamedSystems:
    """Compare, measure, and ask other programs for their agreement; or list the systems.

    Raises SpeqError for nonsense settings, where no cap can be had, and where two systems of ours
    differ.
    """
    if settings.systems == ("?",):
        known = [{"system": each.name, "summary": each.summary} for each in SYSTEMS.values()]
        return NamedSystems("systems", model, {}, known)
    contest, cells = arrange(model, settings)
    contest.prepare(cells, progress)
    tokens = contest.compare(cells, progress)
    contest.measure(cells, settings.rounds, progress)
    contest.agree(cells, tokens, progress)
    terms = contest.terms
    return SystemsReport(
        "tpot-systems",
        model,
        settings.as_json(),
        rows_of(cells, terms),
        pictures=PICTURES,
        capped_by=f"held to by {how_capped()}" if terms.capped else "which nothing held it to",
        compared_tokens=tokens,
    )


def arrange(model: str, settings: Settings) -> tuple[Contest, list[ContestCell]]:
    """What is run, all of it checked. Raises SpeqError for what cannot be."""
    if settings.variants:
        raise OptionError(
            "variants and systems are given; give options with a system, such as "
            "'speq draft-length=4'"
        )
    if settings.synthetic_acceptance is not None:
        raise OptionError(
            "synthetic_acceptance and systems are given; systems run as they are: leave one out"
        )
    if len(settings.neighbours) > 1:
        raise OptionError("neighbours are several numbers; with systems give one")
    shared: dict[str, Any] = dict(settings.run)
    device = shared.pop("device", "cpu")
    device = "cpu" if device == "auto" else device
    dtype = shared.pop("dtype", "auto")
    budgets = [(text, parse_bytes(text)) for text in settings.budgets]
    cells = [
        ContestCell(entry(label, shared, budget_bytes), text, budget_bytes)
        for text, budget_bytes in budgets
        for label in settings.systems
    ]
    labels = [cell.entry.label for cell in cells if cell.budget == settings.budgets[0]]
    if len(set(labels)) < len(labels):
        raise OptionError("systems name one twice; name each once")
    stores = settings.stores()
    for cell in cells:
        wanted = cell.entry.system.store
        if wanted is not None and wanted not in stores:
            raise OptionError(
                f"system {cell.entry.label!r} reads the model packed as {wanted}; give --{wanted} "
                f"FOLDER, as `speq pack --codec {wanted}` wrote it"
            )
    folder = locate(model)
    stores = {codec: locate(str(path)) for codec, path in stores.items()}
    tokenizer = load_tokenizer(folder)
    texts = texts_of(settings.prompts, settings.num_prompts)
    capped = settings.cap == "cgroup" and device == "cpu"
    if capped:
        how_capped()  # refuses before anything takes minutes
    terms = Terms(
        folder,
        stores,
        settings.scratch or Path(folder) / ".speq" / "rivals",
        [list(tokens_of(tokenizer, text)) for _, text in texts],
        [kind for kind, _ in texts],
        settings.max_new_tokens,
        WARM_UP_TOKENS,
        settings.text_seconds,
        parse_bytes(settings.reserve),
        capped,
        device,
        dtype,
        settings.threads,
        settings.neighbours[0],
        settings.process_seconds,
    )
    return Contest(terms), cells
