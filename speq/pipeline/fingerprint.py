"""What stages have to agree on before any of them loads a weight."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from functools import partial

import torch
import transformers

from speq.config import RunConfig
from speq.errors import SpeqError, checked_choice
from speq.files.contents import content_digest
from speq.files.json_file import parse_json
from speq.models.layer_range import LayerRange, layer_ranges
from speq.models.opened import Opened
from speq.options.declared import declared_options
from speq.pipeline.settings import DRAFTERS_WITHOUT_PASSES, counts_of
from speq.units import Progress
from speq.version import __version__

# Of messages; rises when they change.
PROTOCOL = 2


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """What is the same on all machines.

    model     digest of config.json, and of all that the shards hold
    versions  of what computes
    counts    layers of each stage
    """

    model: str
    versions: dict[str, str]
    counts: list[int]

    @classmethod
    def of(
        cls, opened: Opened, counts: list[int], progress: Progress | None = None
    ) -> "ModelFingerprint":
        """progress: told while a model is read whose digest is not known"""
        return cls(digest_of(opened, progress), versions(), counts)

    def check(self, theirs: "ModelFingerprint", who: str) -> None:
        """Raise SpeqError, in one sentence, where a stage's differ. who: that stage"""
        if self.versions != theirs.versions:
            raise SpeqError(
                f"{who} runs {spelled(theirs.versions)} and this one {spelled(self.versions)}; "
                "install the same on all machines"
            )
        if self.model != theirs.model:
            raise SpeqError(
                f"{who} has another checkpoint (digest {theirs.model[:12]}, here "
                f"{self.model[:12]}); give all stages the same model"
            )
        if self.counts != theirs.counts:
            raise SpeqError(
                f"{who} divides the layers into {joined(theirs.counts)} and this one into "
                f"{joined(self.counts)}; give all stages the same --stages"
            )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: bytes, who: str) -> "ModelFingerprint":
        """Raises SpeqError for what another program, or version, has put there."""
        try:
            entries = parse_json(text)
            model, numbers, counts = (entries[field.name] for field in fields(cls))
            known = (
                isinstance(model, str) and isinstance(numbers, dict) and isinstance(counts, list)
            )
            if not known or not all(type(count) is int for count in counts):
                raise ValueError("other types")
        except (KeyError, TypeError, ValueError) as error:
            raise SpeqError(
                f"{who} says nothing that this version understands; run the same version of speq "
                "on all machines"
            ) from error
        return cls(model, {str(name): str(each) for name, each in numbers.items()}, counts)


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Options that the first stage decides for all."""

    dtype: str
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
    def of_json(cls, text: bytes) -> "RunSettings":
        """Raises SpeqError for what another program, or version, has put there."""
        names = [field.name for field in fields(cls)]
        taken = {each.name: each for each in declared_options(RunConfig)}
        try:
            entries = parse_json(text)
            if not isinstance(entries, dict) or set(entries) != set(names):
                raise ValueError("other options")
            checked_choice("drafter", entries["drafter"], DRAFTERS_WITHOUT_PASSES)
            return cls(**{name: taken[name].check(entries[name]) for name in names})
        except ValueError as error:  # a SpeqError is one
            raise SpeqError(
                f"the first stage says nothing that this version understands ({error}); run the "
                "same version of speq on all machines"
            ) from error


def versions() -> dict[str, str]:
    """Of what messages and arithmetic depend on."""
    return {
        "speq": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "protocol": str(PROTOCOL),
    }


def digest_of(opened: Opened, progress: Progress | None = None) -> str:
    """Of a checkpoint: its config, and the bytes of its shards.

    No stage can tell from its own layers alone that another has those of the same model, and
    machines have nothing in common but bytes. So each reads the model once, and keeps the digest.
    """
    config = json.dumps(opened.checkpoint.config, sort_keys=True)
    told = None if progress is None else partial(progress, "reading the model for its digest")
    return hashlib.sha256((config + content_digest(opened.checkpoint, told)).encode()).hexdigest()


def part_for(stages: str, layers: int, number: int) -> tuple[list[int], LayerRange]:
    """Layers of all stages, and the part of one of them. Raises SpeqError for a number too high."""
    counts = counts_of(stages, layers)
    if number > len(counts):
        raise SpeqError(f"stage is {number} and there are {len(counts)} stages; give one of them")
    return counts, layer_ranges(counts)[number - 1]


def spelled(numbers: dict[str, str]) -> str:
    return ", ".join(f"{name} {each}" for name, each in numbers.items())


def joined(counts: list[int]) -> str:
    return ",".join(map(str, counts))
