"""What a machine does of a model, measured in some tenths of a second where no profile says it."""

from dataclasses import dataclass, field
from typing import Literal


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
