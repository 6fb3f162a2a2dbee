"""speq: exact inference for Mixture-of-Experts models that are larger than memory.

Shape letters used throughout: B sequences, T tokens, L MoE layers, E experts, K experts per token,
H hidden size, F expert width, V vocabulary, S slots.
"""

from typing import TYPE_CHECKING

from speq.errors import SpeqError
from speq.version import __version__

if TYPE_CHECKING:
    from speq.generator import Generation, Generator, Token

__all__ = ["Generation", "Generator", "SpeqError", "Token", "__version__"]


def __getattr__(name: str) -> object:
    # torch and transformers take seconds to import; `speq --help` should not wait for them.
    if name in ("Generation", "Generator", "Token"):
        from speq import generator

        return getattr(generator, name)
    raise AttributeError(f"module 'speq' has no attribute {name!r}")
