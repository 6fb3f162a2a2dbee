"""Settings of the installed benches. Nothing here needs torch: the command line reads it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from speq.config import (
    DTYPES,
    MAX_READER_THREADS,
    Device,
    RunConfig,
)
from speq.measure.settings import MaxNewTokens, NumPrompts, Rounds
from speq.options.declared import Nested, Option, Options
from speq.options.kinds import Choice, File, ListOf, Number, OptionType, Size, Switch, Text, Whole


def numbers(each: OptionType, such_as: str, sort: str = "whole") -> ListOf:
    return ListOf(each, f"{sort} numbers separated by commas, such as {such_as}")


Budgets = Annotated[tuple[str, ...], Option("Memory budgets.", ListOf(Size(kept=True)))]
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
ServerUrl = Annotated[
    str,
    Option(
        "Base URL that `speq serve` printed, such as http://127.0.0.1:8000/v1.",
        Text("a URL"),
        argument=True,
    ),
]
Shapes = Annotated[
    str,
    Option(
        "A published model's name, of which a wrong one lists all, or a folder with a config.json.",
        Text("a name or a folder", path=True),
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
class TpotSettings(Options):
    """run: what all runs share."""

    budgets: Annotated[
        tuple[str, ...],
        Option(
            "Memory budgets; they must be given, but for a protocol.",
            ListOf(Size(kept=True), optional=True),
        ),
    ] = ()
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
    protocol: Annotated[
        str | None,
        Option(
            "Measure published cells instead. specter: those of MoE-SpeQ's own code, of "
            "DeepSeek-V2-Lite, Qwen1.5-MoE-A2.7B or Phi-3.5-MoE; it sets budgets and lengths.",
            Choice(("specter",)),
        ),
    ] = None
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
class ShapesSettings(Options):
    """run: what all runs share."""

    budgets: Budgets
    contexts: Annotated[
        tuple[int, ...],
        Option("Tokens of a prompt, each number in turn.", numbers(Whole(1), "64,2048")),
    ] = (64, 2048, 8192)
    layers: Annotated[
        int | None,
        Option("Write the first layers only, where a disk has no room for all.", Whole(1)),
    ] = None
    weights: Annotated[
        str | None,
        Option(
            "What weights are in; default: the first form that the model is published in.",
            Choice(("bf16", "fp8", "mxfp4", "int4", "nvfp4")),
        ),
    ] = None
    folder: Annotated[
        Path | None,
        Option("Where the checkpoint is kept; default: in the cache folder.", File("a folder")),
    ] = None
    llama_cpp: Annotated[
        bool,
        Option("Have llama.cpp run the same weights, in a file as large again.", Switch()),
    ] = False
    max_new_tokens: MaxNewTokens = 32
    rounds: Rounds = 3
    seed: Annotated[int, Option("Of weights, prompts and sampling.", Whole(0, 2**31))] = 0
    run: RunOptions = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServeBenchSettings(Options):
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
