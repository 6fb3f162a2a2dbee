"""What a run's governor learned, which the next run of the same kind begins with."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from speq.errors import FileError, SpeqError, checked_number
from speq.governor.adaptive import AdaptiveDraftLength
from speq.governor.draft_length import Governor
from speq.governor.prior import Prior
from speq.governor.profile import ProfileKey, points_of
from speq.governor.roofline import Points
from speq.governor.step_model import StepModel

FORMAT = "speq-governor-1"
# What was learned weighs as much as so many steps, or tokens, of the run: the machine may be busy
# with other things by now, and prompts are others.
STEPS, TOKENS = 8.0, 32.0
# Fewer steps teach too little to be kept.
LEAST_STEPS = 16.0
# Rows of verifications that a prior has points of.
ROWS = (1.0, 2.0, 4.0, 8.0)
# Bounds of all figures, beyond those of any machine or model.
LEAST, MOST = 1e-12, 1e15


@dataclass(frozen=True, slots=True)
class LearnedSteps:
    """Terms and times of a run's steps.

    key     as a profile has it
    run     what else decides the time of a step: how experts are held, and who drafts
    prior   of the next run's steps
    step_s  (draft length, seconds) of measured steps, plain ones and chains
    """

    key: ProfileKey
    run: str
    prior: Prior
    step_s: Points

    @classmethod
    def of(cls, key: ProfileKey, run: str, governor: Governor) -> "LearnedSteps | None":
        """What a governor learned; None: too little, or it does not learn."""
        if not isinstance(governor, AdaptiveDraftLength):
            return None
        if governor.model.compute.weight < LEAST_STEPS or not governor.model.single:
            return None
        prior = prior_of(governor.model, governor.acceptance.overall)
        return cls(key, run, prior, tuple(governor.measured.times()))

    def teach(self, governor: Governor) -> None:
        """Have a governor that was made with the prior begin with the measured steps."""
        if isinstance(governor, AdaptiveDraftLength):
            for length, step_s in self.step_s:
                governor.measured.believe(int(length), step_s, STEPS)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n"

    @classmethod
    def from_entries(cls, entries: dict[str, Any], source: str) -> "LearnedSteps":
        """Read what `to_json` writes. Raises SpeqError, naming `source`, for anything else."""
        try:
            if entries["format"] != FORMAT:
                raise ValueError("another format")
            terms = dict(entries["prior"])
            for name in ("verify", "distinct"):
                terms[name] = points_of(terms[name])
            for name in {"missed", "exposed", "hosted"} & terms.keys():
                plain, drafting = terms[name]
                terms[name] = plain, drafting
            made = cls(
                ProfileKey(**entries["key"]),
                str(entries["run"]),
                Prior(**terms),
                points_of(entries["step_s"]),
            )
            made.check()
        except (SpeqError, ValueError, KeyError, TypeError) as error:
            raise FileError(f"{source} is no file of format {FORMAT} ({error})") from error
        return made

    def check(self) -> None:
        """Raise SpeqError for figures that cannot have been measured."""
        prior = self.prior
        points = (*prior.verify, *prior.distinct, *self.step_s)
        shares = (*(prior.missed or ()), *prior.exposed, *prior.hosted, prior.acceptance)
        terms = (
            *(prior.draft_base_s, prior.draft_token_s, prior.transfer_s, prior.expert_bytes),
            prior.host_s,
        )
        for value in [value for _, value in points]:
            checked_number("a measured figure", value, LEAST, MOST)
        for value in [*[at for at, _ in points], *terms, prior.drafts, prior.tokens]:
            checked_number("a term of a step", value, 0, MOST)
        for value in shares:
            checked_number("a share", value, 0, 1)
        if [rows for rows, _ in prior.verify] != [*ROWS] or len(prior.distinct) != len(ROWS):
            raise FileError(f"it has other points than of {ROWS} rows")


def prior_of(model: StepModel, acceptance: float) -> Prior:
    """The terms of a model that has observed steps, as a prior."""
    traffic = [model.plain, model.drafting if model.drafting.missed.known else model.plain]
    missed = [min(each.missed.value, 1.0) for each in traffic]
    exposed = [
        min(max(each.exposed.value, 0.0), 1.0) if each.exposed.known else 1.0 for each in traffic
    ]
    distinct = tuple((rows, model.distinct(rows)) for rows in ROWS)
    return Prior(
        verify=tuple((rows, model.verify_s(experts)) for rows, experts in distinct),
        distinct=distinct,
        draft_base_s=model.draft_base_s,
        draft_token_s=model.draft_token.value,
        drafts=STEPS,
        transfer_s=model.link.value,
        expert_bytes=model.expert_bytes.value,
        missed=(missed[0], missed[1]),
        exposed=(exposed[0], exposed[1]),
        acceptance=acceptance,
        tokens=TOKENS,
        host_s=model.host.value,
        hosted=(min(traffic[0].hosted.value, 1.0), min(traffic[1].hosted.value, 1.0)),
    )
