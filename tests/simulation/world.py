"""What schedules play with: a model, the ways it is run, and what plain transformers writes."""

import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from speq import pack
from speq.config import SamplingParams
from tests.helpers.tiny_models import drawn_tokens, greedy_tokens, load_plain, write_model

TOKENS = 24
# How a prompt is continued: greedily, or drawn with this seed.
MODES: tuple[int | None, ...] = (None, 3)
PROMPTS = 10
Tokens = dict[tuple[int, int | None], list[int]]


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Short ones and long ones, many of which begin alike."""
    rng = random.Random(5)
    first = [rng.randrange(5, 250) for _ in range(150)]
    made = [tuple(first[: rng.choice([1, 7, 40, 130])]) for _ in range(PROMPTS)]
    return tuple(
        (*each, *(rng.randrange(5, 250) for _ in range(rng.choice([0, 1, 3, 60])))) for each in made
    )


def sampling(mode: int | None, tokens: int) -> dict[str, Any]:
    options: dict[str, Any] = {"max_new_tokens": tokens, "ignore_eos": True}
    return options if mode is None else options | {"temperature": 0.8, "seed": mode}


@dataclass
class World:
    """A model and the options of its runs.

    root       of its files
    folder     runs open it
    verified   reads are compared with checksums, so that other bytes are noticed
    wanted     tokens by prompt and mode
    """

    name: str
    root: Path
    folder: Path
    options: dict[str, Any]
    verified: bool = False
    wanted: Tokens = field(default_factory=dict)


def tokens_of(folder: Path) -> Tokens:
    plain = load_plain(folder)
    made: Tokens = {}
    for at, prompt in enumerate(prompts()):
        for mode in MODES:
            if mode is None:
                made[at, mode] = greedy_tokens(plain, list(prompt), TOKENS)
            else:
                params = SamplingParams(**sampling(mode, TOKENS))
                made[at, mode] = drawn_tokens(plain, list(prompt), TOKENS, params)
    return made


# Family and options of each world; "pack" is one with a mirror.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("olmoe", {"draft": "none"}),
    "batch": ("olmoe", {"draft": "none", "max_batch": 3, "prefix_reuse": "tokens"}),
    "int4": ("olmoe", {"draft_length": 3}),
    "tree": ("olmoe", {"draft": "none", "drafter": "cached", "draft_nodes": 7}),
    "states": ("qwen3_next", {"draft": "none", "drafter": "ngram", "max_batch": 2}),
    "latents": ("deepseek_v3", {"draft": "none", "context_length": 256}),
    "pack": ("olmoe", {"draft": "none", "verify_reads": True, "max_batch": 2}),
}


def world_of(name: str, root: Path) -> World:
    """Write a world's files, and have plain transformers say what is right."""
    family, options = KINDS[name]
    model = write_model(root / name / "model", family, torch.float32)
    base = {"dtype": "float32", "profile": "none", "packed_copy": "none"}
    world = World(name, root / name, model, base | options, wanted=tokens_of(model))
    if name == "pack":
        world.folder, world.verified = root / name / "packed", True
        pack(model, world.folder, mirror=root / name / "mirror")
    return world
