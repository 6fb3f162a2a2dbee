"""A run as pictures want it: `run.json` of `speq profile`."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from speq.errors import FileError
from speq.files.atomic_file import write_whole
from speq.files.json_file import read_json
from speq.stats import Origin

FORMAT = "speq-run-1"


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A generated token. step: which one emitted it; waited_ms: how long the computation of that
    step waited for experts.
    """

    id: int
    text: str
    step: int
    origin: Origin
    waited_ms: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step; its times are milliseconds since the run was asked for, and bytes are bytes.

    number     among all steps of the run, from 0: the prompt is a step
    figures    those fields of `StepStats` that are numbers; times in ms, names ending so
    forecast   what the governor expected of it, times in ms
    positions  of the pending token and of each drafted one: (stood, choices of the exact model
               that the draft's route had named, choices). Both are 0 where the draft recorded no
               route, and where the token did not stand: the exact model never had its context
    transfers  [start_ms, end_ms, moved bytes] in order, joined where they touch or overlap
    stalls     [start_ms, end_ms], likewise
    layers     of each MoE layer: [requests, hits, late, used, wasted, stall_ms]
    """

    number: int
    phase: str
    start_ms: float
    end_ms: float
    figures: dict[str, float]
    ground: str
    reason: str
    forecast: dict[str, float] | None
    positions: list[tuple[bool, int, int]]
    transfers: list[list[float]]
    stalls: list[list[float]]
    layers: list[list[float]]


@dataclass(frozen=True, slots=True)
class Residency:
    """Which experts lay in slots when each step ended, and which it asked for: see `Frames`."""

    steps: list[int]
    slots: list[str]
    used: list[str]
    host: str | None = None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run.

    link        what experts come over: "disk" or "PCIe"
    machine     as every bench's JSON has it
    options     those of the run that are not their defaults; sampling likewise
    memory      the budget item by item, in bytes
    expected    what the plan expected: tpot_ms, moved_bytes_per_token, draft_length and so on;
                None where nothing was weighed
    stats       the figures of docs/statistics.md
    steps       the last ones; left_out: how many came before them
    estimates   of each draft length, as the governor weighed them last: fields of `StepEstimate`
    card        readings of the GPU's driver: time_ms and figures
    """

    model: str
    version: str
    commit: str | None
    machine: dict[str, Any]
    device: str
    link: Literal["disk", "PCIe"]
    options: dict[str, Any]
    sampling: dict[str, Any]
    prompt_tokens: int
    layers: int
    experts: int
    memory: dict[str, int]
    planned: str | None
    expected: dict[str, Any] | None
    stats: dict[str, Any]
    tokens: list[TokenRecord]
    steps: list[StepRecord]
    left_out: int
    residency: Residency
    estimates: list[dict[str, float]]
    card: list[dict[str, float]] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT} | asdict(self))

    def write(self, path: Path) -> None:
        """Whole or not at all. Raises SpeqError where it cannot be written."""
        write_whole(path, (self.to_json() + "\n").encode())


def read_run(path: Path) -> RunRecord:
    """Read a file that `RunRecord.write` wrote. Raises SpeqError for any other."""
    return run_of(read_json(path), str(path))


def run_of(content: Any, source: str) -> RunRecord:
    """The run in the object of such a file. Raises SpeqError, naming `source`, for any other."""
    try:
        given = dict(content)
        if given.pop("format") != FORMAT:
            raise ValueError("another format")
        given["tokens"] = [TokenRecord(**each) for each in given["tokens"]]
        given["steps"] = [StepRecord(**each) for each in given["steps"]]
        given["residency"] = Residency(**given["residency"])
        return RunRecord(**given)
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(
            f"{source} is no run of format {FORMAT} ({error}); write one with `speq profile`"
        ) from error
