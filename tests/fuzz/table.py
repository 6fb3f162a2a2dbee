"""The classes of input."""

from tests.fuzz import resumed
from tests.fuzz.case import FuzzClass
from tests.fuzz.checkpoints import (
    KNOWN_CONFIG,
    KNOWN_TOKENIZER,
    config,
    index,
    piped_weights,
    safetensors,
    tokenizer,
)
from tests.fuzz.measured import KNOWN_PROFILES, profiles, routes
from tests.fuzz.packs import KNOWN_DRAFTS, KNOWN_PACKS, drafts, gptq, packs
from tests.fuzz.resumed import resumed_packs, resumed_quantisations
from tests.fuzz.texts import calibration, prompts
from tests.fuzz.values import KNOWN_API, KNOWN_CLI, api, cli

CLASSES = {
    entry.name: entry
    for entry in (
        FuzzClass("safetensors", safetensors, 2, (piped_weights,)),
        FuzzClass("index", index, 2),
        FuzzClass("config", config, 3, KNOWN_CONFIG),
        FuzzClass("tokenizer", tokenizer, 3, KNOWN_TOKENIZER),
        FuzzClass("packs", packs, 3, KNOWN_PACKS),
        FuzzClass("drafts", drafts, 2, KNOWN_DRAFTS),
        FuzzClass("gptq", gptq, 2),
        FuzzClass("profiles", profiles, 3, KNOWN_PROFILES),
        FuzzClass("resumed-packs", resumed_packs, 5, resumed.KNOWN_PACKS),
        FuzzClass("resumed-quantisations", resumed_quantisations, 4, resumed.KNOWN_QUANTISATIONS),
        FuzzClass("calibration", calibration, 1),
        FuzzClass("routes", routes, 2),
        FuzzClass("api", api, 4, KNOWN_API),
        FuzzClass("cli", cli, 7, KNOWN_CLI),
        FuzzClass("prompts", prompts, 3),
    )
}


def shares(inputs: int) -> dict[str, int]:
    """How many of so many inputs each class has, at least one."""
    parts = sum(entry.share for entry in CLASSES.values())
    counts = {name: max(inputs * e.share // parts, 1) for name, e in CLASSES.items()}
    names = sorted(CLASSES, key=lambda name: -CLASSES[name].share)
    for at in range(max(inputs - sum(counts.values()), 0)):
        counts[names[at % len(names)]] += 1
    return counts
