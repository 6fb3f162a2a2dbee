"""From logits to tokens: greedy, or drawn from the distribution the user shaped.

What is drawn at a position of the text depends on its distribution, the seed and the position, and
on nothing that was drawn before (the Gumbel-max trick with noise that draft and exact model share:
Daliri, Musco and Suresh, arXiv:2408.07978). So a seed gives the same text however many tokens are
drafted, by whatever drafter, and a draft that is close to the exact model mostly draws the same.
Tokens stand a little less often than with rejection sampling: if a share d of the probability
differs, up to 2d / (1 + d) of them fall in place of d.

Penalties look at the tokens before a position. Drafted tokens count among them, so a penalised
text does not depend on drafts either.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from speq.config import SamplingParams
from speq.decode.sequence import Sequence
from speq.errors import SpeqError

# Colder is no different, but would divide logits beyond the range of float32.
MIN_TEMPERATURE = 1e-20


def checked(logits: Tensor) -> Tensor:
    """Logits in float32. Raises SpeqError where damage, or too narrow a dtype, spoilt them."""
    logits = logits.float()
    if logits.isnan().any() or logits.isposinf().any():
        raise not_numbers()
    return logits


def not_numbers() -> SpeqError:
    return SpeqError(
        "the model's logits are not numbers (NaN or infinite): its weights are damaged, or "
        "their dtype overflows; check the checkpoint, or choose another dtype"
    )


def greedy(logits: Tensor) -> list[int]:
    """The likeliest token of each row of [N, V]; the first of equals.

    Compared in float32, as transformers does, so that equals in that dtype are equals here.
    """
    return checked(logits).argmax(-1).tolist()


def distribution(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """[N, V] logits to [N, V] float32 probabilities on the CPU, as `shaped` makes them."""
    return shaped(checked(logits).cpu(), sampling)


def shaped(scores: Tensor, sampling: SamplingParams) -> Tensor:
    """[N, V] float32 logits to probabilities where they lie: temperature, top-k, top-p, then min-p,
    which is transformers' order.
    """
    temperature = max(float(sampling.temperature), MIN_TEMPERATURE)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(float(sampling.top_p)))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(float(sampling.min_p)))
    no_history = torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)
    return torch.softmax(warpers(no_history, scores), dim=-1)


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
    return int(ticks(probs, seed, position).argmax())


def ticks(probs: Tensor, seed: int, position: int) -> Tensor:
    """One over the time when each token's clock strikes: [V] on the CPU, of a distribution [V]."""
    return probs / noise(seed, position, len(probs))


def penalised(logits: Tensor, sequence: Sequence, ahead: list[int]) -> Tensor:
    """[V] logits to [V] float32 logits on the CPU, less likely where tokens came before.

    ahead  drafted tokens between those of the sequence and the one that is chosen
    """
    scores = checked(logits).cpu()
    text = Before.of(sequence, ahead, len(scores))
    return text.penalise(scores, sequence.sampling)


@dataclass(frozen=True, slots=True)
class Before:
    """The tokens before a position, as penalties count them.

    text   [M] int64, prompt and all; times: [V] int64, how often each was generated
    """

    text: Tensor
    times: Tensor

    @classmethod
    def of(cls, sequence: Sequence, ahead: list[int], vocab_size: int) -> "Before":
        """In host memory."""
        generated = torch.tensor([*sequence.generated_ids, *ahead], dtype=torch.long)
        text = torch.cat([torch.tensor(sequence.prompt_ids, dtype=torch.long), generated])
        return cls(text, torch.bincount(generated, minlength=vocab_size))

    def penalise(self, scores: Tensor, sampling: SamplingParams) -> Tensor:
        """[V] float32 logits to less likely ones, all on the device of these tensors."""
        if sampling.repetition_penalty != 1:
            penalty = RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))
            scores = penalty(self.text[None], scores[None])[0]
        times = self.times
        return scores - sampling.frequency_penalty * times - sampling.presence_penalty * (times > 0)


def chosen(logits: Tensor, sequence: Sequence, ahead: list[int]) -> int:
    """The token behind one row of logits [V], after the sequence and `ahead`, drafted tokens."""
    return int(standings(logits, sequence, ahead).argmax())


def standings(logits: Tensor, sequence: Sequence, ahead: list[int]) -> Tensor:
    """[V] logits to [V] float32, by which `chosen` takes the largest: logits, or for drawn tokens
    one over the time when their clocks strike.
    """
    scores = penalised(logits, sequence, ahead) if sequence.sampling.penalises else logits
    if sequence.sampling.greedy:
        return checked(scores)
    probs = distribution(scores[None], sequence.sampling)[0]
    return ticks(probs, sequence.seed, sequence.position + len(ahead))


def runners_up(standing: Tensor, sampling: SamplingParams, count: int) -> tuple[Tensor, Tensor]:
    """The tokens of [V] that come next behind the one that is chosen: ids [N] int64, N at most
    `count`, and by how much, in logits, each of them is behind it. The first of these is the lead
    of the chosen one.

    A clock's time is its noise over exp(logit / temperature), so a ratio of times is a difference
    of logits. What cannot be drawn is infinitely far behind.
    """
    values, ids = standing.topk(min(count + 1, len(standing)))
    if sampling.greedy:
        return ids[1:], values[0] - values[1:]
    ratios = values[0].log() - values[1:].log()
    return ids[1:], ratios * max(float(sampling.temperature), MIN_TEMPERATURE)
