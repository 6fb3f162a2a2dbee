"""Options of runs over several machines, and which other options such runs take."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from speq.config import RunConfig
from speq.errors import SpeqError
from speq.options.declared import Option, Options
from speq.options.kinds import Number, Text, Whole
from speq.registries import CODECS

MOST_STAGES = 64
# Those that make no pass of the model.
DRAFTERS_WITHOUT_PASSES = ("none", "ngram", "head")

COUNTS = Option(
    "Machines that run the model's layers one behind another: how many, or layers of each from "
    "the first on, such as 10,14. The same on all of them.",
    Text("a number, or numbers of layers with commas between"),
)
RENDEZVOUS = Option(
    "Where stages meet: HOST:PORT, or [HOST]:PORT of IPv6, an address of the first machine, the "
    "only one it listens on. Whoever reaches it can join: give one of a network that you trust.",
    Text("HOST:PORT"),
)
StageWait = Annotated[
    float,
    Option(
        "Seconds that stages wait for each other to come, and the first one for a pass of the "
        "others; a process that ends is noticed at once.",
        Number(86400.0, minimum=1.0),
    ),
]


@dataclass(frozen=True, slots=True)
class StagesSettings(Options):
    """Whether a command's model runs on several machines, of which this is the first."""

    stages: Annotated[str | None, COUNTS] = None
    rendezvous: Annotated[str | None, RENDEZVOUS] = None
    stage_wait_s: StageWait = 600.0

    def check_together(self) -> None:
        """Raise SpeqError for a rendezvous of nobody."""
        if self.stages is None and self.rendezvous is not None:
            raise SpeqError("rendezvous is given and stages is not; stages take both")
        if self.rendezvous is not None:
            address_of(self.rendezvous)

    @property
    def wanted(self) -> bool:
        return self.stages is not None


@dataclass(frozen=True, slots=True)
class StageSettings(Options):
    """Which stage a machine is to run, behind the first."""

    stage: Annotated[
        int, Option("This machine's number; the first one, which writes, is 1.", Whole(2))
    ]
    stages: Annotated[str, COUNTS]
    rendezvous: Annotated[str, RENDEZVOUS]
    stage_wait_s: StageWait = 600.0

    def check_together(self) -> None:
        """Raise SpeqError for a rendezvous that is no address."""
        address_of(self.rendezvous)


def address_of(rendezvous: str) -> tuple[str, int]:
    """The host, without the brackets around one of IPv6, and the port. Raises SpeqError for what is
    not HOST:PORT or [HOST]:PORT, and for all addresses of a machine at once.
    """
    host, _, port = rendezvous.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    named = bool(host) and bracketed == (":" in host)
    if not named or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise SpeqError(
            f"rendezvous is {rendezvous!r:.80}; it must be HOST:PORT, or [HOST]:PORT of IPv6"
        )
    if host in ("0.0.0.0", "*", "::"):
        raise SpeqError(
            f"rendezvous is {rendezvous!r}, which is every address of the machine; give the one "
            "that the other machines reach it by"
        )
    return host, int(port)


def numbers_of(stages: str) -> list[int]:
    """What the option says: how many stages, or layers of each. Raises SpeqError for no numbers."""
    given = [each.strip() for each in stages.split(",")]
    if not all(each.isdecimal() and len(each) < 6 for each in given):
        raise SpeqError(f"stages is {stages!r:.80}; it must be a number, or numbers of layers")
    return [int(each) for each in given]


def stage_count(stages: str) -> int:
    """How many stages the option asks for. Raises SpeqError for more than there may be."""
    numbers = numbers_of(stages)
    count = numbers[0] if len(numbers) == 1 else len(numbers)
    if not 2 <= count <= MOST_STAGES:
        raise SpeqError(f"stages is {stages!r:.80}; give from 2 to {MOST_STAGES}")
    return count


def counts_of(stages: str, layers: int) -> list[int]:
    """Layers of each stage, of a model of so many. Raises SpeqError for what does not add up."""
    numbers = numbers_of(stages)
    if len(numbers) == 1:
        return even_counts(layers, numbers[0])
    if len(numbers) > MOST_STAGES or min(numbers) < 1 or sum(numbers) != layers:
        raise SpeqError(
            f"stages is {stages!r:.80}, which is {sum(numbers)} layers, and the model has "
            f"{layers}; give 2 to {MOST_STAGES} numbers from 1 on that add up to it"
        )
    return numbers


def even_counts(layers: int, stages: int) -> list[int]:
    """As many layers of each stage, the first ones one more where that does not divide."""
    most = min(layers, MOST_STAGES)
    if not 2 <= stages <= most:
        raise SpeqError(
            f"stages is {stages} and the model has {layers} layers; give from 2 to {most}"
        )
    each, more = divmod(layers, stages)
    return [each + (at < more) for at in range(stages)]


def with_stages(config: RunConfig) -> RunConfig:
    """The options as every stage has them. Raises SpeqError for those that stages do not take: what
    drafts by passes of the model, what is for one machine's whole model, and GPUs.
    """
    refused: Sequence[tuple[str, Sequence[object]]] = (
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
    )
    for name, taken in refused:
        given = getattr(config, name)
        if given not in taken:
            *others, last = [str(each) for each in taken]
            choices = f"{', '.join(others)} or {last}" if others else last
            raise SpeqError(f"{name} is {given} and the model runs in stages, which take {choices}")
    drafter = "none" if config.drafter == "auto" else config.drafter
    return replace(
        config, device="cpu", drafter=drafter, draft="none", profile="none", packed_copy="none"
    )
