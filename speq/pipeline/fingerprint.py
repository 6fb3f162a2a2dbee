"""Checks that all pipeline stages have the same model and versions before they load weights."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import partial

import torch
import transformers

from speq.config import RunConfig
from speq.errors import OptionError, PeerError, checked_choice
from speq.files.contents import content_digest
from speq.files.json_file import parse_json
from speq.models.layer_range import LayerRange, layer_ranges
from speq.models.opened import Opened
from speq.options.declared import declared_options
from speq.pipeline.settings import DRAFTERS_WITHOUT_PASSES, counts_of
from speq.units import Progress
from speq.version import __version__

# Version of the messages.
PROTOCOL = 2


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """Values that must be the same on all pipeline stages.

    model     digest of config.json and of the shards' contents
    versions  of the software that computes
    counts    layers of each stage
    """

    model: str
    versions: dict[str, str]
    counts: list[int]

    @classmethod
    def of(
        cls, opened: Opened, counts: list[int], progress: Progress | None = None
    ) -> "ModelFingerprint":
        """progress: called while a model without a known digest is read"""
        return cls(model_digest(opened, progress), current_versions(), counts)

    def check(self, theirs: "ModelFingerprint", who: str) -> None:
        """Raise SpeqError if another stage's fingerprint differs. who: that stage"""
        if self.versions != theirs.versions:
            raise PeerError(
                f"{who} runs {format_versions(theirs.versions)} and this one "
                f"{format_versions(self.versions)}; install the same on all machines"
            )
        if self.model != theirs.model:
            raise PeerError(
                f"{who} has another checkpoint (digest {theirs.model[:12]}, here "
                f"{self.model[:12]}); give all stages the same model"
            )
        if self.counts != theirs.counts:
            raise PeerError(
                f"{who} divides the layers into {format_counts(theirs.counts)} and this one into "
                f"{format_counts(self.counts)}; give all stages the same --stages"
            )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str | bytes, who: str) -> "ModelFingerprint":
        """Parse another stage's fingerprint. Raises SpeqError for that of another version."""
        try:
            content = parse_json(text)
            model, versions, counts = (content[field.name] for field in fields(cls))
            known = (
                isinstance(model, str) and isinstance(versions, dict) and isinstance(counts, list)
            )
            if not known or not all(type(count) is int for count in counts):
                raise ValueError("other types")
        except (KeyError, TypeError, ValueError) as error:
            raise PeerError(
                f"{who} sent a fingerprint that this version does not understand; run the same "
                "version of speq on all machines"
            ) from error
        return cls(model, {str(name): str(each) for name, each in versions.items()}, counts)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Options that rank 0 decides for all pipeline stages."""

    dtype: str
    sums: str
    drafter: str
    draft_length: int | None
    context_length: int | None
    max_batch: int

    @classmethod
    def of(cls, config: RunConfig) -> "RunSettings":
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str | bytes) -> "RunSettings":
        """Parse the settings of rank 0. Raises SpeqError for those of another version."""
        names = [field.name for field in fields(cls)]
        options = {each.name: each for each in declared_options(RunConfig)}
        try:
            content = parse_json(text)
            if not isinstance(content, dict) or set(content) != set(names):
                raise ValueError("other options")
            checked_choice("drafter", content["drafter"], DRAFTERS_WITHOUT_PASSES)
            return cls(**{name: options[name].check(content[name]) for name in names})
        except ValueError as error:  # a SpeqError is one
            raise PeerError(
                f"the first stage sent settings that this version does not understand ({error}); "
                "run the same version of speq on all machines"
            ) from error


def current_versions() -> dict[str, str]:
    """Return the versions that messages and arithmetic depend on."""
    return {
        "speq": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "protocol": str(PROTOCOL),
    }


def model_digest(opened: Opened, progress: Progress | None = None) -> str:
    """Digest of a checkpoint: its config and the bytes of its shards.

    A stage's own layers do not tell whether another stage has the same model. So each stage reads
    the whole model once and keeps the digest.
    """
    config = json.dumps(opened.checkpoint.config, sort_keys=True)
    done = None if progress is None else partial(progress, "reading the model for its digest")
    return hashlib.sha256((config + content_digest(opened.checkpoint, done)).encode()).hexdigest()


def part_for(stages: str, layers: int, number: int) -> tuple[list[int], LayerRange]:
    """Return the layers of all stages, and the range of stage `number`.

    Raises SpeqError for a number too high.
    """
    counts = counts_of(stages, layers)
    if number > len(counts):
        raise OptionError(f"stage is {number} and there are {len(counts)} stages; give one of them")
    return counts, layer_ranges(counts)[number - 1]


def format_versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {each}" for name, each in versions.items())


def format_counts(counts: list[int]) -> str:
    return ",".join(map(str, counts))
