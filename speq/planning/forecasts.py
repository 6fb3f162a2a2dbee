"""What was expected of runs of this machine, and what came."""

import json
import logging
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from speq.errors import SpeqError, checked_number
from speq.files.atomic_file import make_folder, write_whole
from speq.files.cache_folder import cache_folder
from speq.files.json_file import read_json
from speq.governor.roofline import StepEstimate
from speq.planning.cost.estimate import Estimate
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.stats import RunStats

logger = logging.getLogger("speq")

NAME, FORMAT, OLDER_FORMATS = "forecasts.json", 2, (1,)
# Runs that are kept; those of fewer tokens say little.
MOST_RUNS, LEAST_TOKENS = 100, 16
# Attention to a longer context would count as slower computing.
MOST_CONTEXT = 4096
# Budgets of which one is at most so many times the other are near.
NEAR = 1.25
# Standard deviation of the logarithm of measured over planned, before any run.
SPREAD = 0.3
# Of a figure, beyond any machine or model.
MOST_S, MOST_COUNT = 1e6, 1e15


@dataclass(frozen=True, slots=True)
class ForecastRun:
    """One run of a model: time per token, expected and measured.

    way                  it held its experts (`way_of`)
    expected_s           what was said, corrected by earlier runs
    planned_s            what a plan says without them, at the speeds that this run saw
    hidden_s, exposed_s  the range of what was said (`StepEstimate.range_s`)
    measured_s           in the second halves of its texts, when slots were filled
    tokens               that were measured
    ended_at             seconds since 1970
    """

    model: str
    way: str
    budget_bytes: int
    expected_s: float
    planned_s: float
    hidden_s: float
    exposed_s: float
    measured_s: float
    tokens: int
    ended_at: int

    @property
    def off(self) -> float:
        """Measured over expected, less 1."""
        return self.measured_s / self.expected_s - 1

    @property
    def in_range(self) -> bool:
        return self.hidden_s <= self.measured_s <= self.exposed_s

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "ForecastRun":
        """Raises SpeqError, ValueError, KeyError or TypeError for what `asdict` did not write."""

        def time_s(name: str) -> float:
            return checked_number(name, entry[name], 1e-9, MOST_S)

        def count(name: str) -> int:
            return int(checked_number(name, entry[name], 0, MOST_COUNT))

        return cls(
            str(entry["model"]),
            str(entry["way"]),
            max(count("budget_bytes"), 1),
            time_s("expected_s"),
            time_s("planned_s"),
            time_s("hidden_s"),
            time_s("exposed_s"),
            time_s("measured_s"),
            count("tokens"),
            count("ended_at"),
        )


@dataclass(slots=True)
class SteadyTime:
    """Time per token of texts, each in the second half of its steps.

    compute_s   of `seconds`, without waiting for experts that were under way
    link_s      with any transfer; moved_bytes: in that time
    drafted     tokens
    """

    seconds: float = 0.0
    tokens: int = 0
    compute_s: float = 0.0
    link_s: float = 0.0
    moved_bytes: int = 0
    drafted: int = 0

    def add(self, run: RunStats) -> None:
        """Count a run's steps of single sequences."""
        steps = run.decode
        for step in steps[len(steps) // 2 :]:
            if step.sequences == 1:
                self.seconds += step.duration_s
                self.tokens += step.emitted
                self.compute_s += step.duration_s - step.exposed_s
                self.link_s += step.link_s
                self.moved_bytes += step.moved_bytes
                self.drafted += step.draft_length


def keep(
    model: str,
    way: str,
    budget_bytes: int,
    step: StepEstimate,
    seen: StepEstimate,
    steady: SteadyTime,
) -> None:
    """Keep what was expected of a run beside what came, if that is enough to tell.

    seen  the step that would have been expected at the speeds that the run saw
    """
    path = _path()
    if path is None or steady.tokens < LEAST_TOKENS:
        return
    ratio = correction(model, way, budget_bytes)
    least_s, most_s = step.range_s
    run = ForecastRun(
        name_of(model),
        way,
        budget_bytes,
        ratio * step.token_s,
        seen.token_s,
        ratio * least_s,
        ratio * most_s,
        steady.seconds / steady.tokens,
        steady.tokens,
        round(time.time()),
    )
    runs = [asdict(each) for each in (*kept(), run)][-MOST_RUNS:]
    with suppress(SpeqError):  # then it is not kept
        make_folder(path.parent)
        write_whole(path, (json.dumps({"format": FORMAT, "runs": runs}, indent=1) + "\n").encode())


def correction(model: str, way: str, budget_bytes: int) -> float:
    """What to multiply an expected time by: measured over planned in the runs of the same model and
    way with budgets near this one, of which the nearest and last say most; 1 where none is near.
    """
    near = [
        (max(run.budget_bytes / budget_bytes, budget_bytes / run.budget_bytes), -at, run)
        for at, run in enumerate(kept())
        if (run.model, run.way) == (name_of(model), way)
    ]
    ratio = Estimate(1.0, SPREAD)
    for distance, _, run in sorted(near, reverse=True):
        if distance <= NEAR:
            ratio = ratio.with_run(run.measured_s / run.planned_s)
    return ratio.value


def way_of(plan: ResidencyPlan, on_cpu: bool, tuned: bool) -> str:
    """The way to hold experts that a forecast is of. tuned: it is by a profile"""
    drafter = f"drafter {plan.drafter}" if plan.drafts else ""
    copied = "copied" if plan.copied_share else ""
    further = drafter, copied, "" if on_cpu else "on a GPU", "tuned" if tuned else ""
    return ", ".join((plan.name, *filter(None, further)))


def name_of(model: str) -> str:
    """A model by its folder's name, or by that of its repository."""
    return Path(model).name


def kept() -> list[ForecastRun]:
    """The runs that are kept, the last one last; none where the file is damaged."""
    path = _path()
    if path is None or not path.exists():
        return []
    try:
        content = read_json(path, "remove it")
        if content.get("format") in OLDER_FORMATS:
            logger.debug("%s is of an older version and is written anew", path)
            return []
        if content.get("format") != FORMAT:
            raise ValueError("another format")
        return [ForecastRun.of(entry) for entry in content["runs"]]
    except (SpeqError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is not read, and is written anew: %s", path, error)
        return []


def _path() -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / NAME
