"""Options of pipeline-parallel runs, and the other options that they accept."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from speq.config import RunConfig
from speq.errors import OptionError
from speq.options.declared import Option, Options
from speq.options.kinds import File, Number, Text, Whole
from speq.registries import CODECS

MOST_STAGES = 64
# Drafters that run no pass of the model.
DRAFTERS_WITHOUT_PASSES = ("none", "ngram", "head")

COUNTS = Option(
    "Pipeline parallelism: number of stages (machines that each run a part of the layers), or "
    "layers of each stage from the first on, such as 10,14. The same on all stages.",
    Text("a number, or numbers of layers with commas between"),
)
RENDEZVOUS = Option(
    "Address at which the first stage waits for the others: HOST:PORT, or [HOST]:PORT for IPv6. It "
    "listens on no other address. Anyone who reaches it can join: use a network that you trust.",
    Text("HOST:PORT"),
)
StageWait = Annotated[
    float,
    Option(
        "Seconds that stages wait for each other to join, and that the first one waits for a pass "
        "of the others; a process that ends is noticed at once.",
        Number(86400.0, minimum=1.0),
    ),
]
StageKeyFile = Annotated[
    Path | None,
    Option(
        "File with a key, the same on all stages, that signs what they tell each other.",
        File("a file with a key", readable=True),
        by_set=True,
    ),
]


@dataclass(frozen=True, slots=True)
class StagesSettings(Options):
    """Pipeline parallelism of a command, which runs rank 0."""

    panel = "Several machines"
    stages: Annotated[str | None, COUNTS] = None
    rendezvous: Annotated[str | None, RENDEZVOUS] = None
    stage_wait_s: StageWait = 600.0
    stage_key_file: StageKeyFile = None

    def check_together(self) -> None:
        """Raise SpeqError for a rendezvous without stages."""
        if self.stages is None and self.rendezvous is not None:
            raise OptionError(
                "rendezvous is given and stages is not; pipeline parallelism needs both"
            )
        if self.rendezvous is not None:
            address_of(self.rendezvous)

    @property
    def wanted(self) -> bool:
        return self.stages is not None


@dataclass(frozen=True, slots=True)
class StageSettings(Options):
    """A later pipeline stage that a machine runs."""

    stage: Annotated[
        int, Option("This machine's number; the first one, which writes, is 1.", Whole(2))
    ]
    stages: Annotated[str, COUNTS]
    rendezvous: Annotated[str, RENDEZVOUS]
    stage_wait_s: StageWait = 600.0
    stage_key_file: StageKeyFile = None

    def check_together(self) -> None:
        """Raise SpeqError for an invalid rendezvous."""
        address_of(self.rendezvous)


def address_of(rendezvous: str) -> tuple[str, int]:
    """Parse HOST:PORT, or [HOST]:PORT for IPv6, into host and port.

    Raises SpeqError for anything else, and for an address that stands for all of a machine's.
    """
    host, _, port = rendezvous.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    named = bool(host) and bracketed == (":" in host)
    if not named or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise OptionError(
            f"rendezvous is {rendezvous!r:.80}; it must be HOST:PORT, or [HOST]:PORT of IPv6"
        )
    if host in ("0.0.0.0", "*", "::"):
        raise OptionError(
            f"rendezvous is {rendezvous!r}, which is every address of the machine; give the one "
            "that the other machines reach it by"
        )
    return host, int(port)


def numbers_of(stages: str) -> list[int]:
    """Parse the option: a number of stages, or layers of each. Raises SpeqError otherwise."""
    given = [each.strip() for each in stages.split(",")]
    if not all(each.isdecimal() and len(each) < 6 for each in given):
        raise OptionError(f"stages is {stages!r:.80}; it must be a number, or numbers of layers")
    return [int(each) for each in given]


def stage_count(stages: str) -> int:
    """Return the number of stages. Raises SpeqError outside 2 to MOST_STAGES."""
    numbers = numbers_of(stages)
    count = numbers[0] if len(numbers) == 1 else len(numbers)
    if not 2 <= count <= MOST_STAGES:
        raise OptionError(f"stages is {stages!r:.80}; give from 2 to {MOST_STAGES}")
    return count


def counts_of(stages: str, layers: int) -> list[int]:
    """Return the layers of each stage. Raises SpeqError unless they add up to the model's."""
    numbers = numbers_of(stages)
    if len(numbers) == 1:
        return even_counts(layers, numbers[0])
    if len(numbers) > MOST_STAGES or min(numbers) < 1 or sum(numbers) != layers:
        raise OptionError(
            f"stages is {stages!r:.80}, which is {sum(numbers)} layers, and the model has "
            f"{layers}; give 2 to {MOST_STAGES} numbers from 1 on that add up to it"
        )
    return numbers


def even_counts(layers: int, stages: int) -> list[int]:
    """Divide layers evenly; the first stages take the remainder."""
    most = min(layers, MOST_STAGES)
    if not 2 <= stages <= most:
        raise OptionError(
            f"stages is {stages} and the model has {layers} layers; give from 2 to {most}"
        )
    each, more = divmod(layers, stages)
    return [each + (at < more) for at in range(stages)]


def with_stages(config: RunConfig) -> RunConfig:
    """Adapt the options to a pipeline stage.

    Raises SpeqError for options that stages do not accept: drafters that run passes of the model,
    options for a whole model on one machine, and GPUs.
    """
    accepted: Sequence[tuple[str, Sequence[object]]] = (
        ("device", ("auto", "cpu")),
        ("drafter", ("auto", *DRAFTERS_WITHOUT_PASSES)),
        ("draft", ("auto", "none")),
        ("prune_rows", ("auto", "off")),
        ("draft_nodes", (None,)),
        ("codec", ("auto", *(name for name in CODECS.names if not CODECS[name].needs_draft))),
        ("dense", ("auto", "raw", "lossless")),
        ("profile", ("auto", "none")),
        ("packed_copy", ("auto", "none")),
        ("expert_budget", (None,)),
        ("expert_floor", (None,)),
        ("prefix_cache", ("none", "auto")),
    )
    for name, choices in accepted:
        given = getattr(config, name)
        if given not in choices:
            *first, last = [str(each) for each in choices]
            wanted = f"{', '.join(first)} or {last}" if first else last
            raise OptionError(
                f"{name} is {given} and the model runs in pipeline stages, which accept {wanted}"
            )
    drafter = "none" if config.drafter == "auto" else config.drafter
    return replace(
        config, device="cpu", drafter=drafter, draft="none", profile="none", packed_copy="none"
    )
