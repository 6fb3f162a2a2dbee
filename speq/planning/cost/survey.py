"""What a machine does of a model, measured in some tenths of a second where no profile says it."""

from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Survey:
    """Speeds of one machine with one model, measured as the model is loaded.

    link_bytes_per_s   of experts on their way into slots, by all threads that read
    memory_bytes_per_s  at which a pass reads weights
    pass_s, layer_s    of a pass and of each of its layers, besides reading weights and the experts'
                       arithmetic
    row_s              of each further row of a pass, besides the same
    miss_s             of the processor for each expert that is moved, encoding it apart
    expert_s           by codec: arithmetic of each distinct expert of a pass
    draft_expert_s     the same of each INT4 expert of a drafted token
    draft_layer_s      of each layer of a drafted token's pass, as `layer_s`; None: as much
    encode_bytes_per_s  by codec: bytes of words, by the thread that a run waits for
    link_slows, compute_slows  times as long as alone that reads, and computing, take beside the
                       other
    spread             standard deviation of the logarithm of what a speed turns out to be
    measured_at        seconds since 1970; 0: just now
    """

    device: Literal["cpu", "cuda"]
    link_bytes_per_s: float
    memory_bytes_per_s: float
    pass_s: float
    layer_s: float
    row_s: float = 0.0
    miss_s: float = 0.0
    expert_s: dict[str, float] = field(default_factory=dict)
    draft_expert_s: float = 0.0
    draft_layer_s: float | None = None
    encode_bytes_per_s: dict[str, float] = field(default_factory=dict)
    link_slows: float = 1.0
    compute_slows: float = 1.0
    spread: float = 0.0
    measured_at: float = 0.0

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "Survey":
        """A processor's survey as `asdict` wrote it. Raises AttributeError, KeyError,
        OverflowError, TypeError or ValueError for anything else.
        """
        found: dict[str, Any] = {
            name: {codec: _checked(name, value) for codec, value in entry[name].items()}
            for name in ("expert_s", "encode_bytes_per_s")
        }
        others = entry.keys() - {"device", *found}
        return cls(device="cpu", **found | {name: _checked(name, entry[name]) for name in others})

    def at(self, link_bytes_per_s: float, times: float, spread: float) -> "Survey":
        """The same machine with another link, and computing so many times as long."""

        def longer(by_codec: dict[str, float], factor: float) -> dict[str, float]:
            return {codec: factor * value for codec, value in by_codec.items()}

        drafted_s = self.draft_layer_s
        return replace(
            self,
            link_bytes_per_s=link_bytes_per_s,
            memory_bytes_per_s=self.memory_bytes_per_s / times,
            pass_s=self.pass_s * times,
            layer_s=self.layer_s * times,
            row_s=self.row_s * times,
            miss_s=self.miss_s * times,
            expert_s=longer(self.expert_s, times),
            draft_expert_s=self.draft_expert_s * times,
            draft_layer_s=None if drafted_s is None else drafted_s * times,
            encode_bytes_per_s=longer(self.encode_bytes_per_s, 1 / times),
            spread=spread,
        )


def _checked(name: str, value: Any) -> float:
    """A field's number: rates and slows are 1 at least, and others not negative. Raises
    OverflowError, TypeError or ValueError for anything else.
    """
    number, least = float(value), name.endswith(("_bytes_per_s", "_slows"))
    if not least <= number < inf:
        raise ValueError(f"{name} cannot be {value}")
    return number
