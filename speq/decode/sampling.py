"""From logits to tokens: greedy, or drawn from the distribution the user shaped.

What is drawn at a position of the text depends on its distribution, the seed and the position, and
on nothing that was drawn before (the Gumbel-max trick with noise that draft and exact model share:
Daliri, Musco and Suresh, arXiv:2408.07978). So a seed gives the same text however many tokens are
drafted, by whatever drafter, and a draft that is close to the exact model mostly draws the same.
Tokens stand a little less often than with rejection sampling: if a share d of the probability
differs, up to 2d / (1 + d) of them fall in place of d.
"""

import numpy as np
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


def noise(seed: int, position: int, size: int) -> Tensor:
    """[size] float32: independent draws of the exponential distribution, the same ones for the same
    seed and position of the text. None of them is 0.
    """
    counter = [0, 0, position, 0]  # positions lie 2^128 draws apart
    rng = np.random.Generator(np.random.Philox(key=seed, counter=counter))
    draws = rng.standard_exponential(size, dtype=np.float32)
    return torch.from_numpy(np.maximum(draws, np.finfo(np.float32).tiny))


def draw(probs: Tensor, seed: int, position: int) -> int:
    """A token from one distribution [V], on the CPU: whose exponential clock, ticking at the rate
    of its probability, strikes first.
    """
    return int((probs / noise(seed, position, len(probs))).argmax())


def chosen(logits: Tensor, sampling: SamplingParams, seed: int, position: int) -> int:
    """The token behind one row of logits [V], at a position of the generated text."""
    if sampling.greedy:
        return greedy(logits[None])[0]
    return draw(distribution(logits[None], sampling)[0], seed, position)
