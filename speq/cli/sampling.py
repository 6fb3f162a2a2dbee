"""Options of sampling on the command line: what is not given is as the model's makers have it."""

import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from speq.cli.from_dataclass import Exclude
from speq.config import SamplingParams
from speq.options.declared import Nested, Options, build

if TYPE_CHECKING:
    from speq.generator import Generator

# Of seeds that are drawn here, which people type again.
SEED_BITS = 31
UNSET = tuple(
    (name, None) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
)
AS_THE_MODEL = Exclude(defaults=UNSET)


@dataclass(frozen=True)
class AskedSampling(Options):
    """asked: the options that were given"""

    asked: Annotated[dict[str, Any], Nested(SamplingParams)] = field(default_factory=dict)

    @property
    def max_new_tokens(self) -> int:
        return int(self.asked["max_new_tokens"])

    def params(self, generator: "Generator") -> SamplingParams:
        """The options, with the model's own, and with a seed where tokens are sampled."""
        from speq.engine.generation_config import sampling_defaults

        own = sampling_defaults(generator.runtime.opened.checkpoint.path)
        params = build(SamplingParams, own | self.asked)
        if params.greedy or params.seed is not None:
            return params
        return replace(params, seed=secrets.randbits(SEED_BITS))


def sampling_line(params: SamplingParams) -> str:
    """How tokens are chosen, in a line."""
    if params.greedy:
        return "greedy"
    parts = [f"temperature {params.temperature:g}"]
    if params.top_p < 1:
        parts.append(f"top-p {params.top_p:g}")
    if params.top_k:
        parts.append(f"top-k {params.top_k}")
    if params.min_p:
        parts.append(f"min-p {params.min_p:g}")
    return f"sampled at {', '.join(parts)}, seed {params.seed}; --temperature 0 is greedy"
