"""Settings of every bench. Nothing here needs torch: the command line reads it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from speq.config import (
    DEFAULT_READER_THREADS,
    DTYPES,
    MAX_DRAFT_LENGTH,
    MAX_DRAFT_NODES,
    MAX_READER_THREADS,
    Device,
    Draft,
    DraftDense,
    DraftLength,
    Dtype,
    ExpertBudgetOptions,
    ReaderThreads,
    RunConfig,
)
from speq.measure.settings import MaxNewTokens, NumPrompts, Prompts, Rounds
from speq.options.declared import Nested, Option, Options, option_names
from speq.options.kinds import Choice, File, ListOf, Number, OptionType, Size, Switch, Text, Whole

# More is a slip: it is a multiple of what all experts take.
SHARE = Number(16, without_minimum=True)


def numbers(each: OptionType, such_as: str, sort: str = "whole") -> ListOf:
    return ListOf(each, f"{sort} numbers separated by commas, such as {such_as}")


def shares(such_as: str) -> ListOf:
    return numbers(SHARE, such_as, "positive")


Budgets = Annotated[tuple[str, ...], Option("Memory budgets.", ListOf(Size(kept=True)))]
BudgetText = Annotated[
    str, Option("Memory for everything on the device, such as 8GiB.", Size(kept=True))
]
RecordingBudget = Annotated[
    str, Option("Room for all experts and the draft, to record routes in.", Size(kept=True))
]
Fractions = Annotated[
    tuple[float, ...], Option("Shares of the experts' memory.", shares("0.5,0.7"))
]
FixedLength = Annotated[int, Option("Tokens drafted per step.", Whole(1, MAX_DRAFT_LENGTH))]
FixedLengths = Annotated[
    tuple[int, ...], Option("Draft lengths.", numbers(Whole(1, MAX_DRAFT_LENGTH), "2,4"))
]
Neighbours = Annotated[
    int, Option("Busy loops that run beside, each a process of its own.", Whole(0, 256))
]
PromptKinds = Annotated[
    tuple[Path, ...],
    Option(
        "Kinds of prompts, each code, maths, prose, questions, dialogue or a JSON Lines file with "
        "a `prompt` in each row.",
        ListOf(File("a kind or a file of prompts"), "a kind, a file or several", repeated=True),
    ),
]
Routes = Annotated[
    Path,
    Option(
        "Routes that `speq bench hit-rate --routes` recorded.",
        File("a file of routes"),
        argument=True,
    ),
]
ServerUrl = Annotated[
    str,
    Option(
        "Base URL that `speq serve` printed, such as http://127.0.0.1:8000/v1.",
        Text("a URL"),
        argument=True,
    ),
]
PackedLossless = Annotated[
    Path | None, Option("The model packed with codec lossless.", File("a model's folder"))
]
PackedResidual = Annotated[
    Path | None, Option("The model packed with codec residual.", File("a model's folder"))
]
SyntheticAcceptance = Annotated[
    float | None,
    Option(
        "What if: make each drafted token right with this probability, if those before it are, "
        "and else wrong. The output stays exact, and every row says so.",
        Number(1.0),
    ),
]
# Of all runs of a bench that has budgets and draft lengths of its own.
RunOptions = Annotated[
    dict[str, Any],
    Nested(
        RunConfig,
        without=("memory_budget", "draft_length", "draft", "tpot_slo_ms", "latency_slo_ms"),
    ),
]


# Packs hold no plain words of experts.
Published = Annotated[
    str | None,
    Option(
        "Where the model is packed: the same as published, for what runs on plain words.",
        Text("a folder or a hub id", path=True),
    ),
]


@dataclass(frozen=True, slots=True)
class KernelSettings(Options):
    shapes: Annotated[tuple[str, ...], Option("Layers of models, or all.", ListOf(Text()))] = (
        "all",
    )
    rows: Annotated[
        tuple[int, ...], Option("Rows of a call, each in turn.", numbers(Whole(1), "1,4"))
    ] = (1, 2, 4, 8, 16)
    kernels: Annotated[tuple[str, ...], Option("Kernels, or all.", ListOf(Text()))] = ("all",)
    group_size: Annotated[int, Option("INT4 weights to one scale.", Whole(2))] = 128
    dtype: Annotated[
        str, Option("Of the rows.", Choice(tuple(d for d in DTYPES if d[-2:] in ("16", "32"))))
    ] = "bfloat16"
    device: Device = "auto"
    rounds: Rounds = 15
    isa: Annotated[
        str | None,
        Option(
            "Best instructions that CPU kernels may use, such as avx2; default: all there are.",
            Text("a set of instructions"),
        ),
    ] = None
    memory: Annotated[
        str,
        Option(
            "For a layer's experts, exact and INT4 together; of a larger layer fewer are held.",
            Size(kept=True),
        ),
    ] = "6GiB"
    reference: Annotated[
        bool, Option("Time the slow reference where there is no native kernel.", Switch())
    ] = False
    sass: Annotated[
        bool,
        Option(
            "Time nothing: compute from the machine code of CUDA kernels what they take to issue "
            "on named cards, beside their bytes.",
            Switch(),
        ),
    ] = False
    neighbours: Neighbours = 0


@dataclass(frozen=True, slots=True)
class StepSettings(Options):
    memory_budget: BudgetText
    draft_length: DraftLength = None
    draft_kernel: Annotated[
        str,
        Option(
            "How the draft runs; unfused, a call for each expert, is a baseline.",
            Choice(("fused", "unfused")),
        ),
    ] = "fused"
    prompts: Prompts = None
    num_prompts: NumPrompts = 4
    max_new_tokens: MaxNewTokens = 64
    device: Device = "auto"
    dtype: Dtype = "auto"
    neighbours: Neighbours = 0


@dataclass(frozen=True, slots=True)
class TransferSettings(Options):
    readers: Annotated[
        tuple[int, ...], Option("Reads at a time.", numbers(Whole(1, MAX_READER_THREADS), "1,4"))
    ] = (1, 2, 4, 8)
    sizes: Annotated[
        tuple[str, ...],
        Option("Sizes of plain reads; the largest counts.", ListOf(Size(kept=True))),
    ] = ("256KiB", "16MiB")
    volume: Annotated[str, Option("Read for each measurement.", Size(kept=True))] = "256MiB"
    rounds: Rounds = 9


@dataclass(frozen=True, slots=True)
class GpuLinkSettings(Options):
    sizes: Annotated[tuple[str, ...], Option("Sizes of copies.", ListOf(Size(kept=True)))] = (
        *("64KiB", "256KiB"),
        *("1MiB", "4MiB", "16MiB"),
    )
    volume: Annotated[str, Option("Copied for each measurement.", Size(kept=True))] = "256MiB"
    rounds: Rounds = 5


@dataclass(frozen=True, slots=True)
class PrefillSettings(Options):
    budgets: Budgets
    prompt_tokens: Annotated[int, Option("Length of the prompt.", Whole(1))] = 1000
    prompts: Prompts = None
    rounds: Rounds = 3
    dtype: Dtype = "auto"
    reader_threads: ReaderThreads = DEFAULT_READER_THREADS
    neighbours: Neighbours = 0


@dataclass(frozen=True, slots=True)
class CodecSettings(Options):
    draft: Draft = "auto"


@dataclass(frozen=True, slots=True)
class HitRateSettings(Options):
    """beside, beside_budget: another model, whose times are taken for the same routes as well."""

    memory_budget: RecordingBudget
    draft_length: FixedLength = 8
    prompts: Prompts = None
    num_prompts: NumPrompts = 12
    max_new_tokens: MaxNewTokens = 128
    beside: Annotated[
        str | None,
        Option("A model whose times the routes are replayed with as well.", Text("a model")),
    ] = None
    beside_budget: Annotated[
        str | None, Option("Room for all of its experts.", Size(kept=True))
    ] = None
    routes: Annotated[Path | None, Option("Keep the recorded routes here.", File())] = None


@dataclass(frozen=True, slots=True)
class LocalitySettings(Options):
    windows: Annotated[
        tuple[int, ...], Option("Tokens of a verification.", numbers(Whole(1), "1,5"))
    ] = (1, 5, 9)
    slots: Annotated[tuple[int, ...], Option("Slots of a layer.", numbers(Whole(1), "4,8"))] = (
        *(4, 8),
        *(16, 24),
    )


@dataclass(frozen=True, slots=True)
class ScheduleSettings(Options):
    fractions: Fractions = (0.5, 0.7)
    draft_length: Annotated[int, Option("Tokens drafted per step.", Whole(0, MAX_DRAFT_LENGTH))] = 4
    prompts: Prompts = None
    num_prompts: NumPrompts = 3
    max_new_tokens: MaxNewTokens = 48
    rounds: Rounds = 3
    reader_threads: ReaderThreads = DEFAULT_READER_THREADS
    neighbours: Neighbours = 0


@dataclass(frozen=True, slots=True)
class FidelitySettings(Options):
    """draft_length: one more is what passes over texts have."""

    memory_budget: BudgetText
    draft: Draft = "auto"
    draft_dense: DraftDense = "auto"
    draft_length: Annotated[
        int, Option("Tokens the draft runs on freely.", Whole(1, MAX_DRAFT_LENGTH))
    ] = 8
    prompts: Prompts = None
    num_prompts: NumPrompts = 8
    max_tokens: Annotated[int, Option("Tokens of each prompt at most.", Whole(2))] = 256
    device: Device = "auto"
    dtype: Dtype = "auto"
    reader_threads: ReaderThreads = DEFAULT_READER_THREADS


@dataclass(frozen=True, slots=True)
class CoverageSettings(Options):
    """tree_nodes, tree_passes and tree_every are of trees, which need an INT4 copy."""

    memory_budget: RecordingBudget
    prompts: PromptKinds = ()
    num_prompts: Annotated[int, Option("How many of each kind.", Whole(1))] = 4
    max_new_tokens: MaxNewTokens = 200
    chains: Annotated[
        tuple[int, ...],
        Option("Consecutive tokens that experts are counted of.", numbers(Whole(1), "1,5")),
    ] = (1, 2, 3, 5, 9, 17, 33, 64)
    tree_nodes: Annotated[
        tuple[int, ...],
        Option(
            "Tokens of drafted trees at most; a verification has a row more.",
            numbers(Whole(1, MAX_DRAFT_NODES), "8,16"),
        ),
    ] = (4, 8, 16, 32, 63)
    tree_passes: Annotated[
        int | None,
        Option(
            "Passes of the INT4 copy that a tree takes; default: half as many as its tokens.",
            Whole(1, MAX_DRAFT_NODES),
        ),
    ] = None
    tree_every: Annotated[
        int, Option("Tokens of a text from one place with trees to the next.", Whole(1))
    ] = 16
    windows: Annotated[
        tuple[int, ...],
        Option("Consecutive tokens that experts are ranked over.", numbers(Whole(1), "5,9")),
    ] = (1, 5, 9, 17, 64)
    experts: Annotated[
        tuple[int, ...],
        Option(
            "How many of a layer's experts are kept; default: an eighth of them, two, three, four "
            "and six eighths.",
            ListOf(Whole(1), "whole numbers separated by commas, such as 8,16", optional=True),
        ),
    ] = ()
    counts: Annotated[
        Path | None,
        Option("Keep here how often each expert was chosen, for static rankings.", File()),
    ] = None
    draft: Draft = "auto"
    draft_dense: DraftDense = "auto"
    device: Device = "auto"
    dtype: Dtype = "auto"
    reader_threads: ReaderThreads = DEFAULT_READER_THREADS


@dataclass(frozen=True, slots=True)
class TpotSettings(Options):
    """run: what all runs share."""

    budgets: Budgets
    draft_lengths: Annotated[
        tuple[str, ...],
        Option("Draft lengths, auto among them; 0 is without a draft.", ListOf(Text("0 or more"))),
    ] = ("0", "4")
    prompts: PromptKinds = ()
    num_prompts: NumPrompts = 4
    max_new_tokens: MaxNewTokens = 64
    rounds: Rounds = 3
    neighbours: Annotated[
        tuple[int, ...],
        Option("Busy loops that run beside, each number in turn.", numbers(Whole(0, 256), "0,1")),
    ] = (0,)
    variants: Annotated[
        tuple[str, ...],
        Option(
            "Options of a run that are set beside those of all runs, such as 'codec=raw "
            "dense=raw'; each in turn.",
            ListOf(Text("name=value, separated by spaces"), "options", repeated=True),
        ),
    ] = ()
    synthetic_acceptance: SyntheticAcceptance = None
    systems: Annotated[
        tuple[str, ...],
        Option(
            "Measure systems beside each other instead, each in a process of its own with the same "
            "memory; `?` lists them. Those of speq take options, such as 'speq draft-length=4'.",
            ListOf(Text("names"), "names of systems separated by commas", optional=True),
        ),
    ] = ()
    lossless: PackedLossless = None
    residual: PackedResidual = None
    scratch: Annotated[
        Path | None,
        Option(
            "With systems: where other programs' forms of the model lie, which are as large as it "
            "is; default: .speq/rivals in the model's folder.",
            File("a folder"),
        ),
    ] = None
    reserve: Annotated[
        str,
        Option(
            "With systems: memory of a process beside the budget, for its code and libraries.",
            Size(kept=True),
        ),
    ] = "0.45GiB"
    cap: Annotated[
        str,
        Option(
            "With systems: budget and reserve are held to by a control group (cgroup), or not.",
            Choice(("cgroup", "none")),
        ),
    ] = "cgroup"
    text_seconds: Annotated[
        float, Option("With systems: a slow one ends a text after so long.", Number(3600))
    ] = 20.0
    process_seconds: Annotated[
        float, Option("With systems: a process that takes longer has failed.", Number(86_400))
    ] = 900.0
    threads: Annotated[
        int,
        Option("With systems: threads that other programs compute with; 0: all.", Whole(0, 1024)),
    ] = 0
    run: RunOptions = field(default_factory=dict)

    def stores(self) -> dict[str, Path]:
        """The packed models by codec."""
        packed = {"lossless": self.lossless, "residual": self.residual}
        return {name: path for name, path in packed.items() if path is not None}


@dataclass(frozen=True, slots=True)
class SoakSettings(Options):
    """run: how texts are run, a draft length among it."""

    memory_budget: BudgetText
    seconds: Annotated[int, Option("How long, at least.", Whole(1, 86_400))] = 60
    prompts: Prompts = None
    num_prompts: NumPrompts = 4
    max_new_tokens: MaxNewTokens = 64
    run: Annotated[dict[str, Any], Nested(RunConfig, without=("memory_budget",))] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True)
class ServeSettings(Options):
    """Requests to a running server, and for how long."""

    rates: Annotated[
        tuple[float, ...],
        Option(
            "Requests a second on average, each rate in turn.",
            numbers(Number(1e4, without_minimum=True), "0.5,2", "positive"),
        ),
    ] = (1.0,)
    num_requests: Annotated[int, Option("Requests at each rate.", Whole(1, 2000))] = 32
    prompts: PromptKinds = ()
    num_prompts: NumPrompts = 4
    max_new_tokens: MaxNewTokens = 32
    max_seconds: Annotated[
        float,
        Option(
            "At each rate: ask for no more after so long, and wait so long for an answer at most.",
            Number(86_400, without_minimum=True),
        ),
    ] = 600.0
    seed: Annotated[int, Option("Of the times at which requests arrive.", Whole(0))] = 0
    api_key_file: Annotated[
        Path | None,
        Option("File whose first line is the server's key.", File("a file of keys", readable=True)),
    ] = None
    served_model_name: Annotated[
        str | None,
        Option("What the server calls the model; default: the first it names.", Text("a name")),
    ] = None


@dataclass(frozen=True, slots=True)
class ProfileCostSettings(Options):
    """run: how texts are run, a draft length among it."""

    memory_budget: BudgetText
    pairs: Annotated[
        int, Option("Pairs of runs, with recording and without, behind one to try.", Whole(1))
    ] = 20
    prompts: Prompts = None
    num_prompts: NumPrompts = 2
    max_new_tokens: MaxNewTokens = 64
    run: Annotated[dict[str, Any], Nested(RunConfig, without=("memory_budget",))] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True)
class GovernorSettings(Options):
    """run: what all runs share."""

    budgets: Budgets
    draft_lengths: Annotated[
        tuple[int, ...],
        Option("Fixed draft lengths beside auto.", numbers(Whole(0, MAX_DRAFT_LENGTH), "0,4")),
    ] = (0, 1, 2, 4, 6, 8, 12)
    prompts: PromptKinds = ()
    num_prompts: Annotated[int, Option("How many of each kind.", Whole(1))] = 2
    max_new_tokens: MaxNewTokens = 128
    rounds: Rounds = 3
    neighbours: Neighbours = 0
    run: RunOptions = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchSettings(Options):
    """run: what all runs share."""

    memory_budget: BudgetText
    batches: Annotated[
        tuple[int, ...], Option("Texts that run side by side.", numbers(Whole(1, 64), "1,4"))
    ] = (1, 2, 4, 8)
    draft_lengths: FixedLengths = (1, 2, 4, 6)
    prompts: PromptKinds = ()
    num_prompts: Annotated[
        int, Option("How many of each kind, in whole batches of all.", Whole(1))
    ] = 8
    max_new_tokens: MaxNewTokens = 48
    rounds: Rounds = 3
    neighbours: Neighbours = 0
    run: Annotated[
        dict[str, Any],
        Nested(
            RunConfig,
            without=(
                *("memory_budget", "draft_length", "draft_nodes", "draft", "profile", "max_batch"),
                *("tpot_slo_ms", "latency_slo_ms"),
            ),
        ),
    ] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GovernorSimSettings(Options):
    """seed: the other settings' follow."""

    routes: Routes
    settings: Annotated[int, Option("Simulated machines and texts.", Whole(1))] = 300
    tokens: Annotated[int, Option("Tokens of each text.", Whole(1))] = 2000
    layers: Annotated[int, Option("First layers of the routes that are replayed.", Whole(1))] = 4
    seed: Annotated[int, Option("Of the first setting.", Whole(0, 2**63 - 1))] = 0
    processes: Annotated[int, Option("Settings simulated at a time.", Whole(1, 256))] = 2
    verdicts: Annotated[bool, Option("Also keep what each setting came to.", Switch())] = False


@dataclass(frozen=True, slots=True)
class EqualMemorySettings(Options):
    memory_budget: RecordingBudget
    fractions: Fractions = (0.35, 0.4, 0.5, 0.6, 0.75)
    draft_lengths: FixedLengths = (2, 4, 8)
    prompts: Prompts = None
    num_prompts: Annotated[int, Option("How many of them, and one to try on.", Whole(1))] = 4
    max_new_tokens: MaxNewTokens = 128
    rounds: Rounds = 3
    reader_threads: ReaderThreads = DEFAULT_READER_THREADS
    link: Annotated[
        str | None,
        Option(
            "Bytes a second that replays move, such as 1.2GB; default: as measured.",
            Size(kept=True),
        ),
    ] = None
    lossless: PackedLossless = None
    residual: PackedResidual = None
    engine_fractions: Annotated[
        tuple[float, ...] | None,
        Option("Shares to run the engine at, from the packed models.", shares("0.5,0.7")),
    ] = None
    neighbours: Neighbours = 0

    def stores(self, model: str) -> dict[str, str]:
        """The model by codec."""
        packed = {"lossless": self.lossless, "residual": self.residual}
        return {"raw": model} | {name: str(path) for name, path in packed.items() if path}


@dataclass(frozen=True, slots=True)
class PaperSystemsSettings(Options):
    budgets: Budgets = ("16GB", "40GB")


@dataclass(frozen=True, slots=True)
class AllSettings(Options):
    """budgets, systems: those of `speq bench tpot --systems`; empty: as the suite chooses."""

    out: Annotated[
        Path, Option("Folder for models, results and the report.", File("a folder to write"))
    ]
    full: Annotated[
        bool,
        Option("All systems, beside a busy neighbour as well: it takes hours.", Switch()),
    ] = False
    budgets: Annotated[
        tuple[str, ...],
        Option(
            "Memory budgets; default: what caps of 0.475, 0.665 and 1.2 of the model leave.",
            ListOf(Size(kept=True), optional=True),
        ),
    ] = ()
    systems: Annotated[
        tuple[str, ...],
        Option(
            "Systems; default: seven of them.",
            ListOf(Text("names"), "names of systems separated by commas", optional=True),
        ),
    ] = ()
    kinds: Annotated[
        tuple[str, ...],
        Option("Kinds of prompts, or files of them.", ListOf(Text("kinds"), "kinds of prompts")),
    ] = ("code", "prose")
    num_prompts: Annotated[int, Option("How many of each kind.", Whole(1))] = 1
    max_new_tokens: MaxNewTokens = 32
    rounds: Rounds = 3
    reserve: Annotated[str, Option("Memory of a process beside the budget.", Size(kept=True))] = (
        "0.45GiB"
    )
    cap: Annotated[
        str,
        Option(
            "Whether control groups hold processes to their memory.", Choice(("cgroup", "none"))
        ),
    ] = "cgroup"


@dataclass(frozen=True, slots=True)
class MemorySettings(Options):
    context: Annotated[int, Option("Tokens of KV cache.", Whole(1))] = 12288
    experts: Annotated[
        tuple[str, ...],
        Option(
            "How experts are counted: token (of one token, in draft and target), resident (all in "
            "the draft) or all (in both).",
            ListOf(Choice(("token", "resident", "all"))),
        ),
    ] = ("token", "resident", "all")


@dataclass(frozen=True, slots=True)
class BreakdownSettings(Options):
    """run: of `auto`, and as far as they say nothing of slots and drafts, of the other as well."""

    budgets: Budgets
    published: Published = None
    prompts: Prompts = None
    num_prompts: NumPrompts = 4
    max_new_tokens: MaxNewTokens = 64
    rounds: Rounds = 3
    neighbours: Neighbours = 0
    run: RunOptions = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AblationSettings(Options):
    """run: what all runs share."""

    memory_budget: BudgetText
    published: Published = None
    draft_length: DraftLength = None
    fixed_length: Annotated[
        int, Option("Tokens drafted per step without the governor.", Whole(0, MAX_DRAFT_LENGTH))
    ] = 4
    prompts: Prompts = None
    num_prompts: NumPrompts = 4
    max_new_tokens: MaxNewTokens = 64
    rounds: Rounds = 3
    neighbours: Neighbours = 0
    run: Annotated[
        dict[str, Any],
        Nested(
            RunConfig,
            without=(
                *("memory_budget", "draft_length", "draft", "tpot_slo_ms", "latency_slo_ms"),
                *("cache_policy", "prefetch"),
            ),
        ),
    ] = field(default_factory=dict)


# Of a budget's own options there are as many as a bench compares.
BUDGET_OPTIONS = option_names(ExpertBudgetOptions)


# As `speq.bench.formats.files` writes them.
PUBLISHED_FORMATS = ("bf16", "fp8", "mxfp4")


@dataclass(frozen=True, slots=True)
class FormatSettings(Options):
    """layers to prompt_tokens: of random weights, and their texts."""

    source: Annotated[
        str | None,
        Option(
            "A model published in 16 bits, whose experts are rounded to each format; "
            "default: random weights.",
            Text("a folder or a hub id", path=True),
        ),
    ] = None
    work: Annotated[
        Path | None,
        Option(
            "Folder that the checkpoints are written to and stay in; default: a temporary one.",
            File("a folder"),
        ),
    ] = None
    formats: Annotated[
        tuple[str, ...], Option("Which formats.", ListOf(Choice(PUBLISHED_FORMATS)))
    ] = PUBLISHED_FORMATS
    budgets: Annotated[
        tuple[str, ...],
        Option(
            "Memory budgets; default: 0.4 of what the model takes in BF16, and room for all of it.",
            ListOf(Size(kept=True), optional=True),
        ),
    ] = ()
    layers: Annotated[int, Option("Layers.", Whole(1, 1000))] = 8
    hidden_size: Annotated[int, Option("Hidden size.", Whole(64))] = 1024
    expert_width: Annotated[int, Option("Width of an expert.", Whole(32))] = 768
    experts: Annotated[int, Option("Experts of a layer.", Whole(1, 4096))] = 32
    top_k: Annotated[int, Option("Experts that a token chooses.", Whole(1, 64))] = 4
    vocab_size: Annotated[int, Option("Tokens of the vocabulary.", Whole(16))] = 8192
    prompt_tokens: Annotated[int, Option("Length of the random prompts.", Whole(1, 2048))] = 64
    seed: Annotated[int, Option("Of weights and prompts.", Whole(0, 2**31 - 1))] = 0
    prompts: PromptKinds = ()
    num_prompts: NumPrompts = 2
    max_new_tokens: Annotated[int, Option("Tokens of each text.", Whole(2, 2000))] = 32
    rounds: Rounds = 3
    neighbours: Neighbours = 0
    device: Device = "auto"
    dtype: Dtype = "auto"
    reader_threads: ReaderThreads = DEFAULT_READER_THREADS


@dataclass(frozen=True, slots=True)
class BudgetSettings(Options):
    """run: what all runs share."""

    memory_budget: BudgetText
    experts: Annotated[
        tuple[int, ...], Option("Experts of a layer, at most.", numbers(Whole(1), "8,12"))
    ] = (4, 6, 8, 12, 16, 24)
    floors: Annotated[
        tuple[float, ...],
        Option(
            "Least shares of a layer's routing weight, compared with the router's ranking.",
            ListOf(
                Number(1.0, without_minimum=True),
                "shares separated by commas, such as 0.01,0.03",
                optional=True,
            ),
        ),
    ] = (0.01, 0.03)
    rankings: Annotated[
        tuple[str, ...],
        Option("Router, static or oracle.", ListOf(Choice(("router", "static", "oracle")))),
    ] = ("router",)
    policies: Annotated[
        tuple[str, ...],
        Option("Substitute or truncate.", ListOf(Choice(("substitute", "truncate")))),
    ] = ("substitute",)
    residents: Annotated[
        tuple[str, ...],
        Option(
            "Whether experts in slots are free, or ranked like all others.",
            ListOf(Choice(("free", "ranked"))),
        ),
    ] = ("free", "ranked")
    counts: Annotated[
        Path | None,
        Option(
            "Counts for the static ranking, which `speq bench coverage --counts` writes.",
            File("a file of counts", readable=True),
        ),
    ] = None
    draft_length: FixedLength = 8
    prompts: PromptKinds = ()
    num_prompts: Annotated[int, Option("How many of each kind.", Whole(1))] = 4
    max_tokens: Annotated[int, Option("Tokens of each text that are read.", Whole(2))] = 128
    max_new_tokens: Annotated[
        int, Option("Tokens of each text that is gone on with; 0: none is.", Whole(0))
    ] = 64
    reconstruction: Annotated[
        bool, Option("Also measure how far each layer's output is off, which is slow.", Switch())
    ] = False
    run: Annotated[
        dict[str, Any],
        Nested(
            RunConfig,
            without=(
                *("memory_budget", "draft_length", "tpot_slo_ms", "latency_slo_ms"),
                *BUDGET_OPTIONS,
            ),
        ),
    ] = field(default_factory=dict)


# Those with `tree` draft trees of tree_nodes tokens, and the one with `half` holds half of the
# experts. `auto` is a run as the product chooses it: the plan's drafter, the governor's lengths.
COMPARED_DRAFTERS = (
    *("none", "ngram", "int4", "int4-half", "int4-tree", "cached", "cached-tree"),
    *("head", "head-tree", "head-no-contrast", "auto"),
)


@dataclass(frozen=True, slots=True)
class DraftersSettings(Options):
    """run: what all runs share."""

    budgets: Budgets
    drafters: Annotated[
        tuple[str, ...],
        Option(
            "Which drafters; default: all that the model, its head and the budget allow.",
            ListOf(Choice(COMPARED_DRAFTERS), "names separated by commas", optional=True),
        ),
    ] = ()
    heads: Annotated[
        tuple[Path, ...],
        Option(
            "Heads that `speq train-head` wrote, each compared with the others, such as one "
            "without contrast and one of a single branch; default: the one beside the model.",
            ListOf(File("a folder"), "a folder or several", repeated=True),
        ),
    ] = ()
    temperatures: Annotated[
        tuple[float, ...],
        Option(
            "How freely tokens are drawn; 0 is greedy.",
            ListOf(Number(1e4), "numbers separated by commas, such as 0,1"),
        ),
    ] = (0.0, 1.0)
    draft_length: FixedLength = 4
    tree_nodes: Annotated[int, Option("Tokens of a tree, at most.", Whole(1, MAX_DRAFT_NODES))] = 8
    prompts: PromptKinds = ()
    num_prompts: NumPrompts = 4
    max_new_tokens: MaxNewTokens = 64
    rounds: Rounds = 3
    run: Annotated[
        dict[str, Any],
        Nested(
            RunConfig,
            without=(
                *("memory_budget", "draft_length", "draft_nodes", "drafter", "head", "max_batch"),
                *("draft_experts", "draft_counts", "tpot_slo_ms", "latency_slo_ms"),
                *BUDGET_OPTIONS,
            ),
        ),
    ] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WidenSettings(Options):
    """hidden_size and expert_width are multiples of the source's."""

    hidden_size: Annotated[int, Option("Hidden size.", Whole(1))] = 2048
    expert_width: Annotated[int, Option("Width of an expert.", Whole(1))] = 1408
    noise: Annotated[
        float,
        Option(
            "Between the copies of a weight, as a share of the matrix' root mean square; 0: none.",
            Number(1e6),
        ),
    ] = 1.0
    heads: Annotated[
        str,
        Option(
            "Whether attention grows with the hidden size (copy), or stays as it was (keep).",
            Choice(("copy", "keep")),
        ),
    ] = "copy"
    seed: Annotated[int, Option("Of the noise.", Whole(0, 2**63 - 1))] = 0
    draft_noise: Annotated[
        float,
        Option(
            "Write an INT4 draft too, whose codes err by this share of what the source's rounded "
            "codes err by; 0: none, and a rounded draft of the wide model hardly errs.",
            Number(16),
        ),
    ] = 0.0
