"""The classes of input."""

from tests.fuzz.case import FuzzClass
from tests.fuzz.checkpoints import config, index, safetensors, tokenizer
from tests.fuzz.measured import profiles, routes
from tests.fuzz.packs import drafts, gptq, packs
from tests.fuzz.resumed import resumed_packs, resumed_quantisations
from tests.fuzz.texts import calibration, prompts
from tests.fuzz.values import api, cli

CLASSES = {
    entry.name: entry
    for entry in (
        FuzzClass("safetensors", safetensors, 2),
        FuzzClass("index", index, 2),
        FuzzClass("config", config, 3),
        FuzzClass("tokenizer", tokenizer, 3),
        FuzzClass("packs", packs, 3),
        FuzzClass("drafts", drafts, 2),
        FuzzClass("gptq", gptq, 2),
        FuzzClass("profiles", profiles, 3),
        FuzzClass("resumed-packs", resumed_packs, 5),
        FuzzClass("resumed-quantisations", resumed_quantisations, 4),
        FuzzClass("calibration", calibration, 1),
        FuzzClass("routes", routes, 2),
        FuzzClass("api", api, 4),
        FuzzClass("cli", cli, 7),
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
