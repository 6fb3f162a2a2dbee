"""speq: exact inference for Mixture-of-Experts models that are larger than memory.

Shape letters used throughout: B sequences, T tokens, L MoE layers, E experts, K experts per token,
H hidden size, F expert width, V vocabulary, S slots.
"""

import importlib
from typing import TYPE_CHECKING

from speq.errors import SpeqError
from speq.version import __version__

if TYPE_CHECKING:
    from speq.async_generator import AsyncGenerator
    from speq.config import RunConfig, SamplingParams
    from speq.generator import Generation, Generator, Token
    from speq.measure.plan import plan
    from speq.measure.tune import tune
    from speq.quantizing.models import pack, quantize
    from speq.training.train_head import train_head

# What users import, by where it lies: torch and transformers take seconds to import, and
# `speq --help` should not wait for them.
HOMES = {
    "AsyncGenerator": "speq.async_generator",
    "Generation": "speq.generator",
    "Generator": "speq.generator",
    "RunConfig": "speq.config",
    "SamplingParams": "speq.config",
    "Token": "speq.generator",
    "pack": "speq.quantizing.models",
    "plan": "speq.measure.plan",
    "quantize": "speq.quantizing.models",
    "train_head": "speq.training.train_head",
    "tune": "speq.measure.tune",
}

__all__ = [
    "AsyncGenerator",
    "Generation",
    "Generator",
    "RunConfig",
    "SamplingParams",
    "SpeqError",
    "Token",
    "__version__",
    "pack",
    "plan",
    "quantize",
    "train_head",
    "tune",
]


def __getattr__(name: str) -> object:
    if name in HOMES:
        return getattr(importlib.import_module(HOMES[name]), name)
    raise AttributeError(f"module 'speq' has no attribute {name!r}")
