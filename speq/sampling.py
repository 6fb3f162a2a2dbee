"""From logits to tokens: greedy, or drawn from the distribution the user shaped."""

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from speq.config import SamplingParams
from speq.errors import SpeqError

# Colder is no different, but would divide logits beyond the range of float32.
MIN_TEMPERATURE = 1e-20


def checked(logits: Tensor) -> Tensor:
    """Logits in float32. Raises SpeqError where damage, or too narrow a dtype, spoilt them."""
    logits = logits.float()
    if logits.isnan().any() or logits.isposinf().any():
        raise SpeqError(
            "the model's logits are not numbers (NaN or infinite): its weights are damaged, or "
            "their dtype overflows; check the checkpoint, or choose another dtype"
        )
    return logits


def greedy(logits: Tensor) -> list[int]:
    """The likeliest token of each row of [N, V]; the first of equals.

    Compared in float32, as transformers does, so that equals in that dtype are equals here.
    """
    return checked(logits).argmax(-1).tolist()


def distribution(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """[N, V] logits to [N, V] float32 probabilities on the CPU: temperature, top-k, then top-p."""
    temperature = max(float(sampling.temperature), MIN_TEMPERATURE)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(float(sampling.top_p)))
    no_history = torch.empty(len(logits), 0, dtype=torch.long)
    return torch.softmax(warpers(no_history, checked(logits).cpu()), dim=-1)


def draw(probs: Tensor, rng: torch.Generator) -> int:
    """A token from one distribution [V]."""
    return int(torch.multinomial(probs, 1, generator=rng))
