"""Options of measurements. Imports no torch, since the command line reads it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from speq.config import (
    AUTO,
    DTYPES,
    ContextLength,
    Dense,
    Device,
    DraftCounts,
    DraftExperts,
    DraftOptions,
    Dtype,
    ExpertBudgetOptions,
    Head,
    HostBudget,
    MaxBatch,
    MemoryBudget,
    PeerBudget,
    Profile,
    RunConfig,
)
from speq.options.declared import Nested, Option, Options, option_names
from speq.options.kinds import Choice, File, Number, Rate, Text, Whole
from speq.planning.cost.locality import CURVES

Prompts = Annotated[
    Path | None,
    Option("JSON Lines with a `prompt` in each row; default: our own.", File("a file of prompts")),
]
NumPrompts = Annotated[int, Option("How many of the prompts.", Whole(1))]
MaxNewTokens = Annotated[int, Option("Tokens to generate for each prompt.", Whole(2))]
# Options that `tune` sets itself: it measures every draft length, and has no profile yet.
CHOSEN = (
    *("memory_budget", "draft_length", "draft_experts", "draft_counts"),
    *("drafter", "head", "profile"),
    *("tpot_slo_ms", "latency_slo_ms"),
)
# Options of a run that `prove` sets itself, or that would keep what another setting reads.
PROVED = (
    *("memory_budget", "dtype", "context_length", "max_batch", "profile", "packed_copy"),
    *("prefix_reuse", "prefix_cache", "prefix_cache_limit"),
    *(name for name in option_names(DraftOptions) if name != "draft"),
    *option_names(ExpertBudgetOptions),
)
Rounds = Annotated[int, Option("Times each setting is measured.", Whole(1))]


@dataclass(frozen=True, slots=True)
class ProveSettings(Options):
    """Options of `prove`: what is compared, for how long, and in which dtype. run: options of a
    run that all settings have
    """

    memory_budget: MemoryBudget = AUTO
    dtype: Annotated[
        str,
        Option(
            "Dtype of activations: in 16 bits near-ties may turn, in any engine.",
            Choice(tuple(name for name in DTYPES if name != AUTO)),
        ),
    ] = "float32"
    prompts: Prompts = None
    num_prompts: NumPrompts = 3
    max_new_tokens: MaxNewTokens = 32
    minutes: Annotated[
        float,
        Option(
            "Begin no setting later than that; 0: only compare with transformers, or a pack with "
            "its checksums.",
            Number(24 * 60.0),
        ),
    ] = 10.0
    page: Annotated[
        Path | None, Option("Write the result as a page in Markdown, to be published.", File())
    ] = None
    run: Annotated[dict[str, Any], Nested(RunConfig, without=PROVED)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TuneSettings(Options):
    """Options of `tune`. run: options of the run that is measured"""

    memory_budget: MemoryBudget = AUTO
    prompts: Prompts = None
    num_prompts: NumPrompts = 2
    max_new_tokens: MaxNewTokens = 192
    out: Annotated[
        Path | None,
        Option("File for the profile; default: kept in the user's cache folder.", File()),
    ] = None
    run: Annotated[dict[str, Any], Nested(RunConfig, without=CHOSEN)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlanSettings(Options):
    """Options of `plan`: the run, the machine and the routes."""

    memory_budget: MemoryBudget = AUTO
    host_budget: HostBudget = None
    peer_budget: PeerBudget = ()
    device: Device = "auto"
    dtype: Dtype = "auto"
    dense: Dense = "auto"
    context_length: ContextLength = None
    max_batch: MaxBatch = 1
    draft_experts: DraftExperts = None
    draft_counts: DraftCounts = None
    head: Head = "auto"
    preset: Annotated[
        str | None, Option("A card or machine by name; `?` lists them.", Text("a preset's name"))
    ] = None
    link: Annotated[
        float | None,
        Option("Bandwidth to load experts (PCIe or a disk), such as 25GB/s.", Rate()),
    ] = None
    memory_bandwidth: Annotated[
        float | None,
        Option("Bandwidth of the memory that holds weights, such as 900GB/s.", Rate()),
    ] = None
    host_bandwidth: Annotated[
        float | None,
        Option(
            "Bandwidth of the host's memory beside a card, such as 70GB/s. The processor then "
            "computes missing experts while others are copied. Default: all are copied.",
            Rate(),
        ),
    ] = None
    profile: Profile = "auto"
    routes: Annotated[
        Path | None,
        Option(
            "Recorded routes (`python -m bench.lab.hit_rate --routes`) to count experts by.",
            File("a file of routes"),
        ),
    ] = None
    locality: Annotated[
        str | None,
        Option(
            "Routes to count experts by; default: those of --routes or of the profile, or else "
            "of a known model with about as many experts.",
            Choice(tuple(CURVES)),
        ),
    ] = None
    acceptance: Annotated[
        float | None,
        Option(
            "Share of drafted tokens that are accepted; default: measured, or 0.9.", Number(1.0)
        ),
    ] = None

    @property
    def of_this_machine(self) -> bool:
        """True unless another machine's rates are given, or a profile is."""
        given = self.preset, self.link, self.memory_bandwidth
        return given == (None, None, None) and self.profile == "auto"
