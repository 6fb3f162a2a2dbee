"""Options of a run and of sampling: each is declared here, once, and checked where it enters."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from speq.control_groups import processors
from speq.errors import OptionError
from speq.host_memory import HOST_SHARE, free_budget
from speq.options.declared import Option, Options, build
from speq.options.kinds import Amount, Choice, File, ListOf, Number, Size, Switch, Text, Whole
from speq.registries import CACHE_POLICIES, CODECS, DRAFTERS, PREFETCHERS

DEVICES = ("auto", "cpu", "cuda")
DENSE_DRAFTS = ("none", "shared", "attention", "all")
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
# Where disks are not surveyed: most give their full speed to a few large reads at a time.
DEFAULT_READER_THREADS = max(2, min(4, processors()))
MAX_READER_THREADS = 64
# With the pending token as many rows as native kernels run alike: those of a chain, of a tree.
MAX_DRAFT_LENGTH = MAX_DRAFT_NODES = 63
# With draft_nodes.
TREE_DRAFTERS = ("auto", "int4", "cached", "head")
# As many sequences as native kernels run rows alike.
MAX_BATCH = 64
COUNTS_ALONE = (
    "draft_counts is given without draft_experts; give both, or leave it out: a draft of all "
    "experts needs no counts"
)
MILLISECONDS = Number(86_400_000, without_minimum=True, unit="milliseconds")

# Options that commands have without the rest of a run's.
Model = Annotated[
    str,
    Option(
        "Model folder, or hub id, with @REVISION behind it for a certain one.",
        Text("a folder or a hub id", path=True),
        argument=True,
    ),
]
MemoryBudget = Annotated[
    int,
    Option(
        "Memory for everything on the device, such as 8GiB; auto: what is free now, less a fifth "
        "and what Python and torch take.",
        Size(auto=free_budget),
    ),
]
# What options hold until they are checked.
AUTO: Any = "auto"
HostBudget = Annotated[
    int | None,
    Option(
        "On a GPU: host memory for exact experts, such as 32GiB; those beyond it stay on disk. "
        f"Default: {HOST_SHARE:.0%} of what is free.",
        Size(),
    ),
]
Device = Annotated[str, Option("Where to compute.", Choice(DEVICES))]
Dtype = Annotated[str, Option("Compute dtype; auto is the checkpoint's.", Choice(DTYPES))]
ContextLength = Annotated[
    int | None,
    Option("Tokens that the KV cache holds. Default: what each request needs.", Whole(1)),
]
MaxBatch = Annotated[
    int,
    Option(
        "Sequences that run as one batch, at most. Each has a KV cache of the whole context.",
        Whole(1, MAX_BATCH),
    ),
]
Draft = Annotated[
    str,
    Option(
        "Source of the INT4 copy of the experts: auto, none, or the folder or hub id of a GPTQ "
        "checkpoint, or of a checkpoint to round.",
        Text("auto, none, a folder or a hub id", path=True),
    ),
]
DraftDense = Annotated[
    str,
    Option(
        "Layers of the draft beside the experts that use INT4 codes as well: none, shared (shared "
        "experts and dense MLPs), attention (these and attention) or all (and the head, in eight "
        "bits). auto is all.",
        Choice(("auto", *DENSE_DRAFTS)),
        by_set=True,
    ),
]
DraftExperts = Annotated[
    int | float | str | None,
    Option(
        "Let the INT4 copy hold only so many experts of each layer, or such a share (50%): those "
        "used most, by draft_counts. Drafts choose among these. auto: all, half or a quarter, by "
        "what is expected. Default: all.",
        Amount(minimum=0, other="auto"),
    ),
]
DraftCounts = Annotated[
    Path | None,
    Option(
        "With draft_experts: counts of how often each expert is used, which `python -m "
        "bench.lab.hit_rate --counts` writes. Default: what `speq tune` kept of the model.",
        File("a file of counts", readable=True),
        by_set=True,
    ),
]
Dense = Annotated[
    str,
    Option(
        "Form of weights outside the experts: raw (uncompressed), lossless (about 11 bits a "
        "bfloat16 weight), residual (about 9 bits, read over a draft's codes of them), or auto: "
        "lossless if it was measured to be no slower, or is expected to gain more by the memory "
        "that it saves.",
        Choice(("auto", "raw", "lossless", "residual")),
    ),
]
DraftLength = Annotated[
    int | None,
    Option(
        "Tokens drafted per step: a number, or auto: chosen by measurement, step by step.",
        Whole(0, MAX_DRAFT_LENGTH, word="auto"),
    ),
]
Head = Annotated[
    str,
    Option(
        "The head of drafter head: auto (.speq/head in the model's folder), mtp (the MTP layer of "
        "the model's own checkpoint), or a folder: what `speq train-head` wrote elsewhere, or a "
        "published EAGLE-3 head in safetensors.",
        Text("auto, mtp, or the folder of a head", path=True),
    ),
]
Profile = Annotated[
    str,
    Option(
        "The profile of `speq tune` to plan by: auto (the one kept for this model, device and "
        "budget), none, or a file.",
        Text("auto, none, or a file that `speq tune` wrote", path=True),
    ),
]
ReaderThreads = Annotated[
    int | None,
    Option(
        "Experts read from disk at a time: a number, or auto: the fewest that are enough, by a "
        "survey of the disk in a second or two, which is kept.",
        Whole(1, MAX_READER_THREADS, word="auto"),
    ),
]
PeerBudget = Annotated[
    tuple[int, ...],
    Option(
        "On a GPU: memory of further GPUs of its kind for exact experts, of each in turn, such as "
        "8GiB,8GiB. They compute those that they hold. Tokens are the same. Default: none.",
        ListOf(Size(), "sizes separated by commas, such as 8GiB,8GiB", optional=True),
        by_set=True,
    ),
]


@dataclass(frozen=True)
class MemoryOptions(Options):
    """Memory for a run, and the requests that it is for."""

    panel = "Memory"
    memory_budget: MemoryBudget = AUTO
    host_budget: HostBudget = None
    context_length: ContextLength = None
    max_batch: MaxBatch = 1
    prefix_reuse: Annotated[
        str,
        Option(
            "What a sequence reuses of the KV cache of an earlier one with the same beginning: "
            "chunks (whole chunks of its prompt, bit for bit what running them anew gives), "
            "tokens (all tokens, the answer's too; in 16 bits the last bits may differ, since "
            "other passes computed them) or none.",
            Choice(("chunks", "tokens", "none")),
        ),
    ] = "chunks"
    prefix_cache: Annotated[
        str,
        Option(
            "Where prompts' chunks are kept that no KV cache holds any more, to be read in place "
            "of running them again: none, auto (files in ~/.cache/speq that end with the run), or "
            "a folder, for later runs as well.",
            Text("auto, none, or a folder", path=True),
        ),
    ] = "none"
    prefix_cache_limit: Annotated[
        int,
        Option(
            "Most bytes of prefix_cache; what was used longest ago goes.",
            Size(),
            by_set=True,
        ),
    ] = 4 << 30

    @property
    def prefix_folder(self) -> Path | None:
        """The folder of chunks for later runs; None: there is none."""
        return None if self.prefix_cache in ("auto", "none") else Path(self.prefix_cache)

    def check_together(self) -> None:
        """Raise SpeqError for a folder of chunks in a run that reuses something else."""
        if self.prefix_folder is not None and self.prefix_reuse != "chunks":
            raise OptionError(
                f"prefix_cache is given and prefix_reuse is {self.prefix_reuse}; the folder holds "
                "whole chunks, so give chunks, or leave prefix_cache out"
            )


@dataclass(frozen=True)
class ComputeOptions(Options):
    """Device, dtype and recording of passes."""

    panel = "Device and precision"
    device: Device = "auto"
    dtype: Dtype = "auto"
    sums: Annotated[
        str,
        Option(
            "Order in which exact products are added up: canonical (one order, that of GPUs, so "
            "that an expert has the same bits wherever it runs), fast (pairs of BF16 first, where "
            "the processor multiplies such), or auto: canonical on a GPU, whose processor may "
            "compute experts for it, and fast on the CPU.",
            Choice(("auto", "canonical", "fast")),
        ),
    ] = "auto"
    graphs: Annotated[
        str,
        Option(
            "Passes that are recorded and run as a whole, as graphs of a GPU and as lists of "
            "ops on the CPU: auto (all but those of prompts) or none.",
            Choice(("auto", "none")),
            by_set=True,
        ),
    ] = "auto"
    profile: Profile = "auto"


@dataclass(frozen=True)
class ExpertOptions(Options):
    """How exact weights are held and read."""

    panel = "Experts"
    codec: Annotated[
        str,
        Option(
            "Form of exact experts in slots. auto is the codec of a packed model, or else what "
            "the budget asks for.",
            Choice(("auto",), CODECS),
        ),
    ] = "auto"
    dense: Dense = "auto"
    packed_copy: Annotated[
        str,
        Option(
            "A packed copy of published experts in ~/.cache/speq/experts: auto or none. auto "
            "writes one during a run with codec auto whose experts are in bfloat16, take 1 GiB or "
            "more and are not all in slots, or are encoded. That run reads what is written so "
            "far, and later ones the complete copy. `speq cache` lists and removes copies.",
            Choice(("auto", "none")),
        ),
    ] = "auto"
    verify_reads: Annotated[
        bool,
        Option(
            "Compare experts with the checksums of a pack or a packed copy at every read, not "
            "only at the first.",
            Switch(),
            by_set=True,
        ),
    ] = False

    @property
    def reads_copies(self) -> bool:
        """True if published experts may be read from a packed copy in the cache folder."""
        return self.packed_copy == "auto" and self.codec == "auto"


@dataclass(frozen=True)
class TransferOptions(Options):
    """Which experts come into slots and leave them, and by how many threads."""

    panel = "Experts"
    cache_policy: Annotated[
        str, Option("Which expert leaves when its slot is needed.", Choice(registry=CACHE_POLICIES))
    ] = "lookahead"
    prefetch: Annotated[
        str, Option("Which experts come before they are needed.", Choice(registry=PREFETCHERS))
    ] = "three-phase"
    reader_threads: ReaderThreads = None
    host_compute: Annotated[
        str,
        Option(
            "On a GPU, whether the processor computes missing experts out of host memory while "
            "others are copied: auto (as many as measured rates say) or none. Tokens are the same.",
            Choice(("auto", "none")),
            by_set=True,
        ),
    ] = "auto"
    peer_budget: PeerBudget = ()


@dataclass(frozen=True)
class ExpertBudgetOptions(Options):
    """Experts that verifications may ask for: with a budget, output is not exact."""

    panel = "Not exact"
    expert_budget: Annotated[
        int | float | None,
        Option(
            "NOT EXACT: the most experts of a layer that a verification of a draft may ask for, "
            "or such a share of them (50%). Experts in slots are free besides.",
            Amount(),
        ),
    ] = None
    expert_floor: Annotated[
        float | None,
        Option(
            "NOT EXACT: a verification of a draft may ask for an expert only if it holds at least "
            "this share of the layer's routing weight. Experts in slots are free.",
            Number(1.0, without_minimum=True),
            by_set=True,
        ),
    ] = None
    expert_policy: Annotated[
        str,
        Option(
            "Under an expert budget, what tokens do without the experts outside it: substitute "
            "(choose again among those inside) or truncate (do with the rest).",
            Choice(("substitute", "truncate")),
            by_set=True,
        ),
    ] = "substitute"
    expert_ranking: Annotated[
        str,
        Option(
            "Under an expert budget, what ranks experts: router (what the tokens want) or static "
            "(expert_counts).",
            Choice(("router", "static")),
            by_set=True,
        ),
    ] = "router"
    expert_counts: Annotated[
        Path | None,
        Option(
            "Counts for the static ranking, which `python -m bench.lab.hit_rate --counts` writes.",
            File("a file of counts", readable=True),
            by_set=True,
        ),
    ] = None
    expert_rows: Annotated[
        str,
        Option(
            "Under an expert budget, how drafted tokens count: reach (by the chance that they are "
            "accepted) or equal.",
            Choice(("reach", "equal")),
            by_set=True,
        ),
    ] = "reach"
    expert_residents: Annotated[
        str,
        Option(
            "Under an expert budget, how experts in slots count: free, or ranked as all others.",
            Choice(("free", "ranked")),
            by_set=True,
        ),
    ] = "free"
    expert_audit: Annotated[
        float,
        Option(
            "Under an expert budget, the share of verifications that run exactly as well, to "
            "measure what it costs. Their exact tokens are kept.",
            Number(1.0),
            by_set=True,
        ),
    ] = 0.05

    @property
    def approximates(self) -> bool:
        """True if verifications run within an expert budget: output is not exact."""
        return self.expert_budget is not None or self.expert_floor is not None

    def check_together(self) -> None:
        """Raise SpeqError for parts of an expert budget without the rest."""
        if not self.approximates:
            for each in fields(ExpertBudgetOptions):
                if getattr(self, each.name) != each.default:
                    raise OptionError(
                        f"{each.name} is given without an expert budget; give expert_budget or "
                        "expert_floor too, with which output is not exact"
                    )
        elif (self.expert_ranking == "static") != (self.expert_counts is not None):
            raise OptionError(
                f"expert_ranking is {self.expert_ranking} and expert_counts is "
                f"{self.expert_counts}; static takes a file of counts, and router none"
            )


@dataclass(frozen=True)
class DraftOptions(Options):
    """Who drafts, out of what, and how far."""

    panel = "Drafts"
    draft: Draft = "auto"
    draft_dense: DraftDense = "auto"
    draft_experts: DraftExperts = None
    draft_counts: DraftCounts = None
    drafter: Annotated[
        str,
        Option(
            "What proposes tokens. auto is the INT4 copy or a head beside the model, by what is "
            "expected, and ngram where a sequence repeats itself and that pays.",
            Choice(("auto", "none"), DRAFTERS),
        ),
    ] = "auto"
    head: Head = "auto"
    draft_length: DraftLength = None
    draft_nodes: Annotated[
        int | None,
        Option(
            "Let int4, cached or head draft trees of at most so many tokens, with as many passes "
            "as tokens are drafted per step. With draft length auto the governor chooses between "
            "trees and chains. Default: chains.",
            Whole(1, MAX_DRAFT_NODES),
            by_set=True,
        ),
    ] = None
    prune_rows: Annotated[
        str,
        Option(
            "Give up drafted tokens during a verification if their experts cost more than they "
            "are worth: on, off, or auto (for trees). The output does not change.",
            Choice(("auto", "on", "off")),
            by_set=True,
        ),
    ] = "auto"
    tpot_slo_ms: Annotated[
        float | None,
        Option("With draft length auto: time per token, at most, in milliseconds.", MILLISECONDS),
    ] = None
    latency_slo_ms: Annotated[
        float | None,
        Option(
            "With draft length auto: time until the first tokens after the prompt's, and between "
            "bursts of tokens, at most, in milliseconds.",
            MILLISECONDS,
        ),
    ] = None

    @property
    def prunes_rows(self) -> bool:
        """True if verifications give up drafted tokens."""
        by_itself = self.prune_rows == "auto" and self.draft_nodes is not None
        return by_itself or self.prune_rows == "on"

    def check_together(self) -> None:
        """Raise SpeqError for a part of an INT4 copy that nobody drafts with, for trees of a
        drafter that makes none, and for objectives where there is nothing to choose by them.
        """
        if self.draft_experts is None and self.draft_counts is not None:
            raise OptionError(COUNTS_ALONE)
        if self.draft_experts is not None:
            for name, excludes in (
                ("draft", self.draft == "none"),
                ("drafter", self.drafter not in ("auto", "int4")),
            ):
                if excludes:
                    raise OptionError(
                        f"draft_experts is given and {name} is {getattr(self, name)}; it is for "
                        "runs that draft with the INT4 copy, so leave one of the two out"
                    )
        if self.draft_nodes is not None and self.drafter not in TREE_DRAFTERS:
            raise OptionError(
                f"draft_nodes is {self.draft_nodes} and drafter is {self.drafter}; trees are "
                "drafted by int4, cached and head, so leave one of the two out"
            )
        if self.head != "auto" and self.drafter != "head":
            raise OptionError(
                f"head is {self.head} and drafter is {self.drafter}; a head drafts with drafter "
                "head, so give that as well, or leave head out"
            )
        for name in ("tpot_slo_ms", "latency_slo_ms"):
            if getattr(self, name) is not None and self.draft_length is not None:
                raise OptionError(
                    f"{name} is given and draft_length is {self.draft_length}; objectives are kept "
                    "to by choosing the draft length, which then must be auto"
                )


# Forms in which models call tools, by the names of `speq.text.call_syntax`.
TOOL_SYNTAXES = (
    *("auto", "deepseek", "deepseek-v3", "gemma", "glm", "hermes", "hunyuan", "kimi", "lfm2"),
    *("minimax", "mistral", "mistral-json", "qwen-coder"),
)


@dataclass(frozen=True)
class TokenizerOptions(Options):
    """What makes token ids of prompts, and reads calls of tools in answers."""

    panel = "Tokenizer"
    tokenizer: Annotated[
        Path | None,
        Option("Folder with the tokenizer to use in place of the model's own.", File("a folder")),
    ] = None
    chat_template: Annotated[
        Path | None,
        Option(
            "Jinja template of chats to use in place of the model's own.",
            File("a file with a chat template", readable=True),
        ),
    ] = None
    tool_syntax: Annotated[
        str,
        Option(
            "Form in which the model calls tools; auto is the one that its chat template shows.",
            Choice(TOOL_SYNTAXES),
            by_set=True,
        ),
    ] = "auto"


Group = TypeVar("Group", bound=Options)


# Fields come in the order from the last base to the first.
@dataclass(frozen=True)
class RunConfig(
    TokenizerOptions,
    DraftOptions,
    ExpertBudgetOptions,
    TransferOptions,
    ExpertOptions,
    ComputeOptions,
    MemoryOptions,
):
    """How a model is held and run. `of` takes what users type, and refuses unknown options, and
    those that exclude each other."""

    @classmethod
    def of(
        cls,
        memory_budget: str | int = "auto",
        draft_length: str | int | None = "auto",
        **options: Any,  # RunOptions, which derive from this class
    ) -> "RunConfig":
        """Options as users give them."""
        given = {"memory_budget": memory_budget, "draft_length": draft_length}
        return build(cls, given | options)

    def group(self, kind: type[Group]) -> Group:
        """Those of the options that one part of a run needs."""
        return kind(**{each.name: getattr(self, each.name) for each in fields(kind)})  # type: ignore[arg-type]

    def check_together(self) -> None:
        """Raise SpeqError for options that exclude each other. An expert budget is for one
        sequence at a time: what is left out of one would depend on the others.
        """
        MemoryOptions.check_together(self)
        ExpertBudgetOptions.check_together(self)
        DraftOptions.check_together(self)
        if not self.approximates:
            return
        if self.draft_length == 0:
            raise OptionError(
                "an expert budget bounds what verifications of drafts ask for, and draft_length is "
                "0; leave one of the two out"
            )
        if self.max_batch > 1:
            raise OptionError(
                f"max_batch is {self.max_batch} and an expert budget is given; expert budgets are "
                "for one sequence at a time, so leave one of the two out"
            )
        if self.prefix_reuse == "tokens":
            raise OptionError(
                "prefix_reuse is tokens and an expert budget is given; the KV cache of answers is "
                "not exact then, so give chunks or none"
            )


@dataclass(frozen=True, slots=True)
class SamplingParams(Options):
    """How tokens are chosen and when generation ends."""

    panel = "Sampling"
    max_new_tokens: Annotated[int, Option("Tokens to generate at most.", Whole(1))] = 128
    temperature: Annotated[
        float, Option("How freely tokens are drawn; 0 is greedy.", Number(1e4))
    ] = 0.0
    top_p: Annotated[
        float,
        Option(
            "Draw from the likeliest tokens up to this mass.", Number(1.0, without_minimum=True)
        ),
    ] = 1.0
    top_k: Annotated[int, Option("Draw from this many likeliest tokens; 0: all.", Whole(0))] = 0
    min_p: Annotated[
        float,
        Option(
            "Draw from tokens at least this likely, as a share of the likeliest; 0: all.",
            Number(1.0),
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Option(
            "Divides positive logits of all earlier tokens, the prompt's too, and multiplies "
            "negative ones (arXiv:1909.05858); 1: off.",
            Number(100.0, minimum=0.01),
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        Option(
            "Taken off the logit of each token that was generated before; 0: off.",
            Number(2.0, minimum=-2.0),
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Option(
            "Taken off for each time that a token was generated before; 0: off.",
            Number(2.0, minimum=-2.0),
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        Option("Makes draws repeatable; default: another one each time.", Whole(0, 2**63 - 1)),
    ] = None
    stop: Annotated[
        tuple[str, ...],
        Option(
            "End before this text.",
            ListOf(Text("non-empty strings"), "non-empty strings", repeated=True),
        ),
    ] = ()
    ignore_eos: Annotated[bool, Option("Go on past an end of text.", Switch())] = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """True if earlier tokens change probabilities beyond what the model makes of them."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return any(penalties)
