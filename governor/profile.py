"""What was measured of a machine with a model, as data: the offline half of MoE-SpeQ 3.2.2."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from speq.errors import FileError, SpeqError, checked_int, checked_number, checked_text
from speq.governor.roofline import Link, Points

FORMAT = "speq-profile-1"
# Beyond what any machine or model has; within, no figure made of these overflows or vanishes.
MOST_BYTES = 1 << 60
MOST_S = 1e6
RATES = (1.0, 1e15)
# Of each list of points: the largest first number; the smallest and the largest second one.
POINTS = {
    "link": (MOST_BYTES, *RATES),
    "verify": (1 << 20, 1e-9, MOST_S),
    "distinct": (1 << 20, 1.0, 1e9),
    "routes": (1 << 20, 1.0, 1e9),
    "host": (1 << 20, 1e-9, MOST_S),
}


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile holds for, and for nothing else."""

    model: str
    device: str
    budget_bytes: int
    version: str

    def __post_init__(self) -> None:
        """Raises SpeqError for what `speq tune` does not write."""
        for name in ("model", "device", "version"):
            checked_text(f"{name} of a profile's key", getattr(self, name))
        checked_int("budget_bytes of a profile's key", self.budget_bytes, 1, MOST_BYTES)


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
    host               (rows, seconds of an expert that the processor computes for a GPU)
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
    host: Points = ()

    def __post_init__(self) -> None:
        """Raises SpeqError for figures that cannot have been measured."""
        checked_int("expert_bytes", self.expert_bytes, 1, MOST_BYTES)
        for name in ("link", "verify"):
            if not getattr(self, name):
                raise FileError(f"{name} of a profile is empty; it must have at least one point")
        for name, (most, smallest, largest) in POINTS.items():
            points = getattr(self, name)
            sizes = [x for x, _ in points]
            whole = all(1 <= x <= most and x == int(x) for x in sizes)
            if (
                not whole
                or sizes != sorted(set(sizes))
                or not all(smallest <= y <= largest for _, y in points)
            ):
                raise FileError(
                    f"{name} of a profile is {points}; it must be pairs of numbers, the first of "
                    f"each whole, rising and from 1 to {most:g}, the second from {smallest:g} to "
                    f"{largest:g}"
                )
        for name in ("transfer_overhead_s", "first_fetch_s", "draft_base_s", "draft_token_s"):
            checked_number(f"{name} of a profile", getattr(self, name), 0, MOST_S)
        checked_text("codec of a profile", self.codec)
        for name in ("decode_bytes_per_s", "encode_bytes_per_s"):
            speeds = getattr(self, name)
            if not isinstance(speeds, dict):
                raise FileError(f"{name} of a profile is {speeds!r}; it must be an object of rates")
            for codec, speed in speeds.items():
                checked_number(f"{name} of {codec} in a profile", speed, *RATES)
        if self.acceptance is not None:
            checked_number("acceptance of a profile", self.acceptance, 0, 1)

    @property
    def drafted(self) -> bool:
        """True if drafts were measured: there was room for one in the budget."""
        return self.draft_token_s > 0

    @property
    def host_expert_s(self) -> float:
        """Seconds of an expert of one row on the host of a GPU; 0: it was not measured."""
        return self.host[0][1] if self.host else 0.0

    @property
    def slow_tier(self) -> Link:
        """The link at the largest size that was measured: experts are large."""
        return Link(self.link[-1][1], self.transfer_overhead_s, self.first_fetch_s)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n"

    @classmethod
    def from_entries(cls, entries: dict[str, Any], source: str = "the profile") -> "Profile":
        """Read what `to_json` writes. Raises SpeqError, naming `source`, for anything else."""
        try:
            content = dict(entries)
            if content.pop("format") != FORMAT:
                raise ValueError("another format")
            key = ProfileKey(**content.pop("key"))
            for name in POINTS.keys() & content.keys():
                content[name] = points_of(content[name])
            return cls(key=key, **content)
        except SpeqError as error:
            raise FileError(f"{source}: {error}; measure it again with `speq tune`") from error
        except (ValueError, KeyError, TypeError) as error:
            raise FileError(
                f"{source} is no profile of format {FORMAT} ({error}); measure it again "
                "with `speq tune`"
            ) from error


def points_of(pairs: Any) -> Points:
    """Pairs of numbers. Raises ValueError, TypeError or OverflowError for anything else."""
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise ValueError(f"{pairs!r:.80} are no pairs")
    if not all(isinstance(each, int | float) for pair in pairs for each in pair):
        raise ValueError(f"{pairs!r:.80} are no numbers")
    try:
        return tuple((float(x), float(y)) for x, y in pairs)
    except OverflowError as error:
        raise ValueError(f"{pairs!r:.80} are too large") from error
