"""What was measured of a machine with a model, as data: the offline half of MoE-SpeQ 3.2.2."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from speq.errors import SpeqError, checked_int
from speq.governor.roofline import Costs, Link, Points

FORMAT = "speq-profile-1"


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile holds for, and for nothing else."""

    model: str
    device: str
    budget_bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class Profile:
    """Times and rates of one model on one machine under one budget.

    link               (bytes of a read, bytes per second) in rising order of size
    transfer_overhead_s  of a batch of transfers; first_fetch_s: until the first expert came
    expert_bytes       moved for one expert
    draft_base_s, draft_token_s  T_draft(k) = base + k * token
    verify             (rows, seconds) of verifications with all experts in slots, in rising order
    distinct           (rows, distinct experts of all layers that a pass of so many rows asks for)
    routes             (tokens, distinct experts of a layer that so many consecutive tokens choose)
    decode_bytes_per_s  of each codec of exact experts, by name: bytes of their words a second
    encode_bytes_per_s  the same of encoding them, by all threads that read; of codecs that this
                       model's published experts can be encoded by as they are read
    codec              of the exact experts that were verified with
    acceptance         that a drafted token stands, given that those before it did; None: not known
    """

    key: ProfileKey
    link: Points
    transfer_overhead_s: float
    first_fetch_s: float
    expert_bytes: int
    draft_base_s: float
    draft_token_s: float
    verify: Points
    distinct: Points = ()
    routes: Points = ()
    decode_bytes_per_s: dict[str, float] = field(default_factory=dict)
    encode_bytes_per_s: dict[str, float] = field(default_factory=dict)
    codec: str = "raw"
    acceptance: float | None = None

    def __post_init__(self) -> None:
        """Raises SpeqError for figures that cannot have been measured."""
        checked_int("expert_bytes", self.expert_bytes, 1)
        for name in ("link", "verify"):
            if not getattr(self, name):
                raise SpeqError(f"{name} of a profile is empty; it must have at least one point")
        for name in ("link", "verify", "distinct", "routes"):
            points = getattr(self, name)
            sizes = [x for x, _ in points]
            if sizes != sorted(set(sizes)) or not all(x > 0 and y > 0 for x, y in points):
                raise SpeqError(
                    f"{name} of a profile is {points}; it must be pairs of positive numbers, the "
                    "first of each rising"
                )
        for name in ("transfer_overhead_s", "first_fetch_s", "draft_base_s", "draft_token_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise SpeqError(f"{name} of a profile is {getattr(self, name)}; it must be a time")
        for name in ("decode_bytes_per_s", "encode_bytes_per_s"):
            speeds = getattr(self, name)
            if not all(0 < speed < float("inf") for speed in speeds.values()):
                raise SpeqError(f"{name} of a profile is {speeds}; speeds are positive")
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise SpeqError(f"acceptance of a profile is {self.acceptance}; it is from 0 to 1")

    @property
    def drafted(self) -> bool:
        """Whether drafts were measured: there was room for one in the budget."""
        return self.draft_token_s > 0

    @property
    def costs(self) -> Costs:
        return Costs(self.draft_base_s, self.draft_token_s, self.verify)

    @property
    def slow_tier(self) -> Link:
        """The link at the largest size that was measured: experts are large."""
        return Link(self.link[-1][1], self.transfer_overhead_s, self.first_fetch_s)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "the profile") -> "Profile":
        """Raises SpeqError, naming `source`, for anything but what `to_json` writes."""
        try:
            content = json.loads(text)
            if content.pop("format") != FORMAT:
                raise ValueError("another format")
            key = ProfileKey(**content.pop("key"))
            for name in ("link", "verify", "distinct", "routes"):
                content[name] = _points(content[name])
            return cls(key=key, **content)
        except SpeqError as error:
            raise SpeqError(f"{source}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SpeqError(
                f"{source} is no profile of format {FORMAT} ({error}); measure it again "
                "with `speq tune`"
            ) from error


def _points(pairs: Any) -> Points:
    return tuple((float(x), float(y)) for x, y in pairs)
