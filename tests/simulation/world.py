"""What schedules play with: a model, the ways it is run, and what plain transformers writes."""

import random
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from speq import pack
from speq.config import SamplingParams
from tests.helpers.tiny_models import drawn_tokens, greedy_tokens, load_plain, write_model
from tests.simulation.other_weights import bytes_of_copy, with_other_experts
from tests.simulation.repacked import add_foreign

TOKENS = 24
# How a prompt is continued: greedily, or drawn with this seed.
MODES: tuple[int | None, ...] = (None, 3)
PROMPTS = 10
BUDGET = "8MiB"
# Tokens that a request of a long draft asks for, so that a draft of the longest length fits.
LONG = 80
# Events of a server, by how often they come.
CLIENTS = {"ask": 8, "read": 6, "leave": 3, "half": 2, "wrong": 1, "health": 2, "wait": 3}
Prompts = tuple[tuple[int, ...], ...]
Tokens = dict[tuple[int, int | None], list[int]]


@cache
def prompts() -> Prompts:
    """Short ones and long ones, many of which begin alike."""
    rng = random.Random(5)
    first = [rng.randrange(5, 250) for _ in range(150)]
    made = [tuple(first[: rng.choice([1, 7, 40, 130])]) for _ in range(PROMPTS)]
    return tuple(
        (*each, *(rng.randrange(5, 250) for _ in range(rng.choice([0, 1, 3, 60])))) for each in made
    )


def periodic_prompts() -> Prompts:
    """Prompts that drafts find long continuations of."""
    rng = random.Random(6)
    made = [tuple(rng.randrange(5, 250) for _ in range(rng.choice([2, 5, 9]))) for _ in range(4)]
    return tuple(each * (90 // len(each)) for each in made)


def sampling(mode: int | None, tokens: int) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": tokens, "ignore_eos": True}
    return options if mode is None else options | {"temperature": 0.8, "seed": mode}


@dataclass
class World:
    """A model and the options of its runs.

    root        of its files
    folder      runs open it
    prompts     that requests have
    tokens      that a request asks for at most
    wanted      tokens by prompt and mode
    budget      runs begin with it
    draft_lengths  that steps have; None: that of the options. A governor's would depend on how fast
                this machine is just now
    events      that happen here beside those of all worlds, by how often they come
    verified    reads are compared with checksums, so that other bytes are noticed
    stages      layers of each pipeline stage; empty: one machine runs all
    served      clients ask a server, and nothing else happens
    keyed       stages sign their messages
    other       this world with other weights
    copy_bytes  of a packed copy of the experts; 0: none is made
    """

    name: str
    root: Path
    folder: Path
    options: dict[str, Any]
    prompts: Prompts
    tokens: int
    wanted: Tokens
    budget: str = BUDGET
    draft_lengths: tuple[int | None, ...] = (0, 1, 3, 3, 7)
    events: dict[str, int] = field(default_factory=dict)
    verified: bool = False
    stages: tuple[int, ...] = ()
    served: bool = False
    keyed: bool = False
    other: "World | None" = None
    copy_bytes: int = 0


def tokens_of(folder: Path, prompts: Prompts, tokens: int) -> Tokens:
    plain = load_plain(folder)
    made: Tokens = {}
    for at, prompt in enumerate(prompts):
        for mode in MODES:
            if mode is None:
                made[at, mode] = greedy_tokens(plain, list(prompt), tokens)
            else:
                params = SamplingParams(**sampling(mode, tokens))
                made[at, mode] = drawn_tokens(plain, list(prompt), tokens, params)
    return made


# Family and options of each world; "pack" is one with a mirror, "copy" one that runs copy experts
# of, "stages" and "signed" are divided between machines.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("olmoe", {"draft": "none"}),
    "batch": ("olmoe", {"draft": "none", "max_batch": 3, "prefix_reuse": "tokens"}),
    "int4": ("olmoe", {"draft_length": 3}),
    "tree": ("olmoe", {"draft": "none", "drafter": "cached", "draft_nodes": 7, "draft_length": 3}),
    "states": ("qwen3_next", {"draft": "none", "drafter": "ngram", "max_batch": 2}),
    "latents": ("deepseek_v3", {"draft": "none", "context_length": 256}),
    "pack": ("olmoe", {"draft": "none", "verify_reads": True, "max_batch": 2}),
    "long": (
        "qwen3_next",
        {"draft": "none", "drafter": "ngram", "draft_length": 63, "context_length": 256},
    ),
    "copy": ("qwen2_moe", {"draft": "none", "context_length": 256}),
    "stages": ("olmoe", {"draft": "none", "drafter": "ngram", "max_batch": 2}),
    "served": ("olmoe", {"draft": "none", "max_batch": 2, "context_length": 256}),
    "signed": ("qwen3_next", {"draft": "none", "drafter": "ngram", "context_length": 256}),
}


def world_of(name: str, root: Path) -> World:
    """Write a world's files, and have plain transformers say what is right."""
    family, options = KINDS[name]
    copied, long = name == "copy", name == "long"
    # A copy is of 16-bit experts, of which samples see a part.
    dtype, sizes = (torch.bfloat16, {"num_experts": 24}) if copied else (torch.float32, {})
    model = write_model(root / name / "model", family, dtype, **sizes)
    base = {"dtype": "float32", "profile": "none"} | ({} if copied else {"packed_copy": "none"})
    chosen, tokens = (periodic_prompts(), LONG) if long else (prompts(), TOKENS)
    world = World(
        name, root / name, model, base | options, chosen, tokens, tokens_of(model, chosen, tokens)
    )
    if name == "pack":
        world.folder, world.verified = root / name / "packed", True
        pack(model, world.folder, mirror=root / name / "mirror")
        pack(model, root / name / "repacked")
        add_foreign(model)
        world.events = {"repack": 1}
    elif name == "tree":
        world.draft_lengths = (0, None, None)
    elif long:
        world.draft_lengths = (0, 5, 63, 63)
    elif copied:
        folder = with_other_experts(model, root / name / "other")
        world.copy_bytes = bytes_of_copy(model, root / name / "sized")
        world.budget, world.events = "1500KiB", {"rot": 4, "weights": 1}
        wanted = tokens_of(folder, chosen, tokens)
        world.other = replace(world, folder=folder, wanted=wanted, other=world)
    elif name == "served":
        world.served, world.events = True, CLIENTS
    elif name in ("stages", "signed"):
        world.keyed = name == "signed"
        world.stages = (1, 1, 1) if world.keyed else (2, 1)
        world.events = {"disturb": 4}
    return world
