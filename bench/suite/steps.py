"""The steps of `speq bench all`: which commands, in which order, and how long each takes."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from speq.bench.settings import AllSettings as Settings
from speq.errors import NoRoom, OptionError
from speq.files.checkpoint import EXPERTS_MANIFEST, Checkpoint, locate
from speq.units import format_bytes, parse_bytes

# A model with less than this is widened: its experts would all lie in any cache.
SMALL_BYTES = 1 << 30
# Caps of processes, as shares of the model's tensors: 2.5 and 3.5 GB of the bundled model widened,
# and one in which everything fits.
CAPS = (0.475, 0.665, 1.2)
# INT4 errs on the widened model then about as often as on the source.
DRAFT_NOISE = "1.1"
WIDENED_BYTES = 5_270_000_000
FEW_SAMPLES = ("--dense", "--samples", "16", "--sequence-length", "256")


@dataclass(frozen=True, slots=True)
class SuiteStep:
    """name: of its files; makes: the folder that it makes, for a step that measures nothing;
    expected_s: on two cores.
    """

    name: str
    command: list[str]
    expected_s: float
    makes: Path | None = None

    def file(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"


def steps_of(model: str, settings: Settings) -> list[SuiteStep]:
    """In the order in which they are run. Raises SpeqError for a model that cannot be opened."""
    folder, out = locate(model), settings.out
    size = tensor_bytes(folder)
    steps = []
    source = str(folder)
    if size < SMALL_BYTES:
        wide = out / "model"
        steps.append(
            SuiteStep(
                "widen",
                ["bench", "widen", source, str(wide), "--draft-noise", DRAFT_NOISE],
                210,
                makes=wide,
            )
        )
        steps.append(
            SuiteStep(
                "quantize",
                ["quantize", source, *FEW_SAMPLES, "--out", str(out / "gptq")],
                30,
                makes=out / "gptq",
            )
        )
        source, size = str(wide), WIDENED_BYTES
    scale = size / WIDENED_BYTES
    packs = {"lossless": out / "lossless"} | (
        {"residual": out / "residual"} if settings.full else {}
    )
    steps += [
        SuiteStep(
            f"pack-{codec}",
            ["pack", source, "--codec", codec, "--out", str(pack)],
            20 * scale,
            makes=pack,
        )
        for codec, pack in packs.items()
    ]
    return steps + measurements(source, packs, budgets_of(settings, size), settings, scale)


def tensor_bytes(folder: Path) -> int:
    """Of all tensors of a published checkpoint. Raises SpeqError for a packed one."""
    if (folder / EXPERTS_MANIFEST).exists():
        raise OptionError(f"{folder} is packed; give the folder as it was published")
    with closing(Checkpoint(folder)) as checkpoint:
        return sum(info.nbytes for _, info in checkpoint.tensors.values())


def budgets_of(settings: Settings, size: int) -> list[str]:
    """Budgets as given, or as three caps leave them. Raises SpeqError for a model too small."""
    if settings.budgets:
        return list(settings.budgets)
    reserve = parse_bytes(settings.reserve)
    budgets = [int(share * size) - reserve for share in CAPS]
    if budgets[0] < size // 8:
        raise NoRoom(
            f"the model has {format_bytes(size)} of tensors, and a cap of {CAPS[0]:.0%} of that "
            "leaves next to nothing beside a process's own memory; give --budgets"
        )
    return [f"{budget >> 20}MiB" for budget in budgets]


def measurements(
    source: str, packs: dict[str, Path], budgets: list[str], settings: Settings, scale: float
) -> list[SuiteStep]:
    """The benches, on the model and on its packs."""
    lossless = str(packs["lossless"])
    stores = [part for codec, pack in packs.items() for part in (f"--{codec}", str(pack))]
    kinds = [part for kind in settings.kinds for part in ("--prompts", kind)]
    systems = settings.systems or (FULL_SYSTEMS if settings.full else SYSTEMS)
    rounds = str(settings.rounds)
    tight = ",".join(budgets[:2])
    processes = len(systems) * len(budgets) * settings.rounds
    contest = ["bench", "tpot", source, "--budgets", ",".join(budgets)]
    contest += ["--systems", ",".join(systems), *stores, *kinds]
    contest += ["--num-prompts", str(settings.num_prompts)]
    contest += ["--max-new-tokens", str(settings.max_new_tokens), "--rounds", rounds]
    contest += ["--reserve", settings.reserve, "--cap", settings.cap]
    variants = [part for each in VARIANTS for part in ("--variants", each)]
    steps = [
        SuiteStep("tpot", contest, 30 * processes * scale),
        SuiteStep(
            "variants",
            [
                *("bench", "tpot", lossless, "--budgets", tight, "--draft-lengths", "0,auto"),
                *(*variants, "--num-prompts", "2", "--rounds", "2"),
            ],
            400 * scale,
        ),
        SuiteStep("transfer", ["bench", "transfer", source, lossless], 60),
        SuiteStep("kernels", ["bench", "kernels", "--shapes", "qwen1.5-moe", "--rows", "1,5"], 120),
    ]
    if settings.full:
        neighbours = [*contest, "--neighbours", "1"]
        steps.append(SuiteStep("neighbours", neighbours, 50 * processes * scale))
    return steps


# What a run is without fetching ahead, and without eviction by what is needed next.
VARIANTS = ("prefetch=three-phase", "prefetch=none", "cache-policy=lru")
SYSTEMS = (
    *("speq", "speq-published", "lru-raw", "moe-speq", "zipmoe"),
    *("transformers", "llama.cpp"),
)
FULL_SYSTEMS = (
    *("speq", "speq draft-length=4", "speq-residual", "speq-published", "lossless"),
    *("lru-raw", "lru-raw-same-cache", "moe-speq", "zipmoe", "transformers", "llama.cpp"),
)
