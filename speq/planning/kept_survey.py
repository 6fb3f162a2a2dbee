"""What was surveyed of this machine with a model: kept, and corrected by what runs then measure.

A survey sees some tenths of a second of a machine whose disk and memory change from one minute to
the next. A run sees its own reads and kernels for as long as it lasts, in the very way that the
next one will.
"""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from speq.governor.roofline import StepEstimate
from speq.planning import kept_file
from speq.planning.cost.estimate import Estimate
from speq.planning.cost.residency_plan import ResidencyPlan
from speq.planning.cost.survey import Survey
from speq.planning.device_trial import DeviceTrial
from speq.planning.forecasts import LEAST_TOKENS, SteadyTime
from speq.planning.processor_trial import ProcessorTrial

# Standard deviation of the logarithm of what a survey says, at least.
SURVEY_SPREAD = 0.2
# A run that moves less says nothing of the link.
LEAST_MOVED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class KeptSurvey:
    """A survey, and what runs since then measured.

    link     bytes a second
    compute  times as long as surveyed that computing takes
    """

    survey: Survey
    link: Estimate
    compute: Estimate

    @classmethod
    def new(cls, survey: Survey) -> "KeptSurvey":
        spread = max(survey.spread, SURVEY_SPREAD)
        survey = replace(survey, measured_at=time.time())
        return cls(survey, Estimate(survey.link_bytes_per_s, spread), Estimate(1.0, spread))

    @property
    def now(self) -> Survey:
        spread = max(self.link.spread, self.compute.spread)
        return self.survey.at(self.link.value, self.compute.value, spread)

    def with_run(self, link_bytes_per_s: float | None, times: float | None) -> "KeptSurvey":
        """After a run measured those: its link, and how many times as long as surveyed it
        computed. None: it does not tell. Either was beside the other.
        """
        link, compute, survey = self.link, self.compute, self.survey
        if link_bytes_per_s:
            link, survey = link.with_run(link_bytes_per_s), replace(survey, link_slows=1.0)
        if times:
            compute, survey = compute.with_run(times), replace(survey, compute_slows=1.0)
        return replace(self, survey=survey, link=link, compute=compute)

    def keep(self, key: str) -> None:
        kept_file.keep(key, asdict(self), self.survey.measured_at)

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "KeptSurvey":
        """Raises AttributeError, KeyError, OverflowError, TypeError or ValueError for what was not
        kept here.
        """
        link, compute = estimate_of(entry["link"]), estimate_of(entry["compute"])
        return cls(Survey.of(entry["survey"]), link, compute)


@dataclass(slots=True)
class MachineSurvey:
    """The survey that a load or a plan goes by: the one that is kept, or a new one.

    key   it is kept under; None: it is not, as of a small model, which is surveyed in no time
    kept  once it was asked for
    """

    trial: ProcessorTrial | DeviceTrial
    key: str | None
    kept: KeptSurvey | None = None

    def survey(self, codecs: Iterable[str]) -> Survey:
        """Speeds with codecs of these names at least."""
        wanted = dict.fromkeys(codecs)
        if self.key is None:
            return self.trial.survey(wanted)
        kept = self.kept or kept_file.read(self.key, KeptSurvey.of)
        if kept is None or not kept.survey.expert_s.keys() >= wanted.keys():
            earlier = {} if kept is None else kept.survey.expert_s
            new = KeptSurvey.new(self.trial.survey([*(wanted | dict.fromkeys(earlier))]))
            # Runs have seen more of the link than a survey does.
            kept = new if kept is None else replace(new, link=kept.link)
            kept.keep(self.key)
        self.kept = kept
        return kept.now

    def learn(self, plan: ResidencyPlan, steady: SteadyTime) -> StepEstimate:
        """Keep the speeds of a run of that plan. The plan's step, had they been known.

        What computing takes is known of plain steps alone: drafts have any length. What encodes as
        it reads tells neither: threads that read do a part of the computing.
        """
        step, kept = plan.step, self.kept
        if self.key is None or kept is None or plan.encoded or steady.tokens < LEAST_TOKENS:
            return step
        link = times = None
        if steady.moved_bytes >= LEAST_MOVED_BYTES and steady.link_s > 0:
            link = steady.moved_bytes / steady.link_s
            step = step._replace(new_s=step.moved_bytes / link, link_slows=1.0)
        if step.draft_length == 0 and not steady.drafted:
            longer = steady.compute_s / steady.tokens / step.compute_s
            times = longer * kept.compute.value
            step = step._replace(verify_s=longer * step.verify_s, compute_slows=1.0)
        kept_now = kept_file.read(self.key, KeptSurvey.of)
        measured_at = kept.survey.measured_at
        if kept_now is not None and kept_now.survey.measured_at == measured_at:  # not another's
            kept_now.with_run(link, times).keep(self.key)
        return step


def estimate_of(entry: dict[str, Any]) -> Estimate:
    return Estimate(kept_file.positive(entry["value"]), kept_file.positive(entry["spread"]))
