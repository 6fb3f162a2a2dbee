"""Systems at equal device memory: everything outside the experts, the KV cache, and a share f of
the experts' bytes in plain words, out of which each system pays for its draft and its slots.

Two parts with rows alike. `replay`: recorded routes and drafts through the real scheduler, on a
simulated clock with this machine's times. `engine`: the real engine on packed models from disk. Of
a system with several draft lengths the best is its row; `auto` may be any candidate of any system,
chosen by a short trial on text that no row counts.
"""

from dataclasses import dataclass, field
from pathlib import Path

from speq.bench.neighbours import disturbed
from speq.bench.paper import codec_costs
from speq.bench.paper.candidates import candidates_of
from speq.bench.paper.equal_memory_engine import EngineRuns
from speq.bench.paper.equal_memory_table import AIM_COLUMNS, COLUMNS, Row, aims_of, rows_of
from speq.bench.paper.recording import Recording
from speq.bench.settings import EqualMemorySettings as Settings
from speq.errors import SpeqError
from speq.files.atomic_file import check_target
from speq.measure.report import Report, print_table, read_prompts
from speq.units import Progress, parse_bytes

NOTE = (
    "Systems with a draft are shown at their best draft length: in the replay as known afterwards, "
    "in the engine by a trial. auto is chosen by a short trial of every candidate, on text that no "
    "row counts; nothing is predicted yet."
)


@dataclass(slots=True)
class EqualMemoryReport(Report):
    """rows: systems by part and f; codecs: what an expert takes with each; aims: what was aimed at,
    and found.
    """

    codecs: list[Row] = field(default_factory=list)
    aims: list[Row] = field(default_factory=list)

    def print_all(self) -> None:
        """Three tables on stdout."""
        print_table("an expert", codec_costs.COLUMNS, self.codecs)
        self.print(COLUMNS)
        print_table("aims", AIM_COLUMNS, self.aims)


def show(report: EqualMemoryReport) -> None:
    report.print_all()


def notes(report: EqualMemoryReport) -> list[str]:
    return [NOTE]


@disturbed
def run(
    model: str,
    settings: Settings,
    *,
    json_file: Path | None,
    force: bool,
    progress: Progress | None = None,
) -> EqualMemoryReport:
    """Measure both parts. Raises SpeqError for nonsense settings."""
    check_target(json_file, force)
    fractions = settings.fractions
    engine_fractions = _engine_fractions(settings)
    lengths = list(settings.draft_lengths)
    link_bytes_per_s = None if settings.link is None else parse_bytes(settings.link)
    # The last one is what the engine's candidates are tried on.
    *texts, trial = read_prompts(settings.prompts, settings.num_prompts + 1)

    systems, stores = candidates_of(lengths), settings.stores(model)
    costs = codec_costs.measure(stores, progress)
    tokens = settings.max_new_tokens
    recording = Recording.of(
        model, settings.memory_budget, [0, *lengths], texts, tokens, link_bytes_per_s, progress
    )
    engine = EngineRuns(stores, texts, trial, tokens, settings.rounds, settings.reader_threads)
    rows, aims = [], []
    for part, fraction in [
        *(("replay", fraction) for fraction in fractions),
        *(("engine", fraction) for fraction in engine_fractions),
    ]:
        if part == "replay":
            standings = recording.compete(systems, costs, fraction, progress)
        else:
            standings = engine.compete(systems, fraction, progress)
        found = rows_of(part, fraction, standings)
        rows += found
        aims += aims_of(found)
    report = EqualMemoryReport(
        "equal-memory",
        model,
        settings.as_json() | recording.as_json() | {"note": NOTE},
        rows,
        codecs=[cost.row() for cost in costs.values()],
        aims=aims,
    )
    if json_file is not None:
        report.write(json_file)
    return report


def _engine_fractions(settings: Settings) -> tuple[float, ...]:
    if settings.engine_fractions is None:
        return ()
    if settings.lossless is None or settings.residual is None:
        raise SpeqError(
            "engine_fractions is given, and the engine reads packed models; give the folders that "
            "`speq pack --codec lossless` and `speq pack --codec residual` wrote as well"
        )
    return settings.engine_fractions
