"""Chooses tokens from logits: greedily, or by sampling from a shaped distribution.

The token sampled at a position depends on its distribution, the seed and the position, and on no
earlier sample (the Gumbel-max trick with noise that draft and exact model share: Daliri, Musco and
Suresh, arXiv:2408.07978). So a seed gives the same output for any drafter and draft length, and a
draft close to the exact model mostly samples the same tokens. Acceptance is a little lower than
with rejection sampling: if a share d of the probability differs, up to 2d / (1 + d) of the tokens
are rejected instead of d.

Penalties count the tokens before a position, drafted ones included, and a grammar reads them. So
such an output does not depend on drafts either.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from speq.config import SamplingParams
from speq.engine.request import Request
from speq.errors import CheckpointError, SpeqError

# Lower temperatures choose the same, but would divide logits beyond the range of float32.
MIN_TEMPERATURE = 1e-20
# The unit interval has 2^32 equal parts; below this one, the place within the part is drawn too.
FIRST_PARTS = 2**22
# Shift that leaves the exponent of a float32 and six bits of its fraction.
BIN_SHIFT = 17


def check_finite(logits: Tensor) -> Tensor:
    """Return logits in float32. Raises SpeqError if any is NaN or positive infinity."""
    logits = logits.float()
    highest = logits.amax()  # NaN where there is any
    if highest.isnan() or highest.isposinf():
        raise not_numbers()
    return logits


def not_numbers() -> SpeqError:
    return CheckpointError(
        "the model's logits are not numbers (NaN or infinite): its weights are damaged, or "
        "their dtype overflows; check the checkpoint, or choose another dtype"
    )


def greedy(logits: Tensor) -> list[int]:
    """Return the likeliest token of each row of [N, V]; the first of equals.

    Logits are compared in float32, as in transformers, so that ties are the same.
    """
    return check_finite(logits).argmax(-1).tolist()


def distribution(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Shape [N, V] logits into [N, V] float32 probabilities on the CPU."""
    return shape_probs(check_finite(logits).cpu(), sampling)


def shape_probs(scores: Tensor, sampling: SamplingParams) -> Tensor:
    """Shape [N, V] float32 logits into probabilities on their device.

    The order is transformers': temperature, top-k, top-p, min-p. Tokens as likely as the last kept
    one are kept too.
    """
    probs = torch.softmax(scores / max(float(sampling.temperature), MIN_TEMPERATURE), dim=-1)
    likeliest = None
    if sampling.top_k and sampling.top_k < probs.shape[-1]:
        likeliest = probs.topk(sampling.top_k).values
        probs = probs * (probs >= likeliest[..., -1:])
    if sampling.top_p < 1:
        probs = probs * (probs >= _nucleus_edge(probs, likeliest, float(sampling.top_p)))
    if sampling.min_p:
        probs = probs * (probs >= float(sampling.min_p) * probs.amax(-1, keepdim=True))
    return probs / probs.sum(-1, keepdim=True)


def _nucleus_edge(probs: Tensor, likeliest: Tensor | None, top_p: float) -> Tensor:
    """Return [N, 1]: the least of the fewest largest of [N, V] whose share of the sum is `top_p`.

    likeliest  the largest in order, if all others are 0 or equal the last of these; None: unknown
    """
    if likeliest is None and probs.is_cpu:
        return torch.tensor([[_nucleus_edge_of(row, top_p)] for row in probs.numpy()])
    ordered = probs.sort(-1, descending=True).values if likeliest is None else likeliest
    wide = ordered.double()
    wanted = top_p * probs.sum(-1, keepdim=True, dtype=torch.float64)
    stays = wide.cumsum(-1) - wide < wanted
    return ordered.gather(-1, stays.sum(-1, keepdim=True) - 1)


def _nucleus_edge_of(probs: np.ndarray, top_p: float) -> float:
    """Compute `_nucleus_edge` of one row [V].

    Sorting 200,000 numbers takes a processor 20 ms. So they are counted by the first bits of their
    float32, and only the bin of the edge is sorted.
    """
    bins = probs.view(np.int32) >> BIN_SHIFT
    mass = np.bincount(bins, probs)
    likelier = mass[::-1].cumsum()[::-1] - mass
    wanted = top_p * mass.sum()
    at = int(np.argmax(likelier < wanted))
    ordered = np.sort(probs[bins == at])[::-1]
    wide = ordered.astype(np.float64)
    return float(ordered[np.count_nonzero(likelier[at] + (wide.cumsum() - wide) < wanted) - 1])


def noise(seed: int, position: int, size: int) -> Tensor:
    """Draw [size] float32 from the exponential distribution, by seed and position; none is 0.

    A vocabulary of 200,000 has draws of 5e-6 at every position, and a token with the least one is
    chosen however unlikely it is. So small draws have 85 random bits, others 32: all are as exact
    as float32. (numpy's own draws in float32 are 0 once in 2^23.)
    """
    words = _raw(seed, position, 0, (size + 1) // 2).view(np.uint32)
    draws = words[:size].astype(np.float64)
    first = np.flatnonzero(draws < FIRST_PARTS)
    within = (_raw(seed, position, 1, len(first)) >> np.uint64(11)) + 0.5  # 53 bits, never 0
    draws += 0.5
    draws[first] += within * 2.0**-53 - 0.5
    draws *= -(2.0**-32)
    # In place: new memory for so many numbers takes longer than to compute them.
    np.log1p(draws, out=draws)
    narrow = np.empty(size, np.float32)
    np.negative(draws, out=narrow, casting="same_kind")
    return torch.from_numpy(narrow)


def _raw(seed: int, position: int, stream: int, size: int) -> np.ndarray:
    """Draw [size] random uint64. Streams are 2^64 blocks of four apart, positions 2^128."""
    return np.random.Philox(key=seed, counter=[0, stream, position, 0]).random_raw(size)


def draw(probs: Tensor, seed: int, position: int) -> int:
    """Sample a token from one distribution [V] on the CPU.

    It is the token whose exponential clock, with its probability as the rate, strikes first.
    """
    return first_largest(ticks(probs, seed, position))


def ticks(probs: Tensor, seed: int, position: int) -> Tensor:
    """Return 1 / time at which each token's clock strikes, [V] on the CPU, for a distribution."""
    return probs / noise(seed, position, len(probs))


def first_largest(standing: Tensor) -> int:
    """Return the index of the largest of [V] on the CPU, the first of equals.

    numpy's argmax is ten times as fast as torch's.
    """
    return int(standing.numpy().argmax())


def penalise(logits: Tensor, request: Request, ahead: list[int]) -> Tensor:
    """Penalise [V] logits of earlier tokens; return [V] float32 logits on the CPU.

    ahead  drafted tokens between those of the sequence and the chosen one
    """
    scores = check_finite(logits).cpu()
    token_ids = Before.of(request, ahead, len(scores))
    return token_ids.penalise(scores, request.sampling)


@dataclass(frozen=True, slots=True)
class Before:
    """The tokens before a position, as penalties count them.

    token_ids  [M] int64, with the prompt; times: [V] int64, how often each was generated
    """

    token_ids: Tensor
    times: Tensor

    @classmethod
    def of(cls, request: Request, ahead: list[int], vocab_size: int) -> "Before":
        """Count the tokens before a position, in host memory."""
        generated = torch.tensor([*request.output_token_ids, *ahead], dtype=torch.long)
        token_ids = torch.cat([torch.tensor(request.prompt_token_ids, dtype=torch.long), generated])
        return cls(token_ids, torch.bincount(generated, minlength=vocab_size))

    def penalise(self, scores: Tensor, sampling: SamplingParams) -> Tensor:
        """Penalise [V] float32 logits on the device of these tensors."""
        if sampling.repetition_penalty != 1:
            factor = float(sampling.repetition_penalty)
            repeated = scores[self.token_ids]
            less_likely = torch.where(repeated < 0, repeated * factor, repeated / factor)
            scores = scores.index_put((self.token_ids,), less_likely)
        times = self.times
        return scores - sampling.frequency_penalty * times - sampling.presence_penalty * (times > 0)


def choose(logits: Tensor, request: Request, ahead: list[int]) -> int:
    """Choose a token from logits [V] that follow the sequence and the drafted tokens `ahead`."""
    return first_largest(standings(logits, request, ahead))


def standings(logits: Tensor, request: Request, ahead: list[int]) -> Tensor:
    """Compute [V] float32 of which `choose` takes the largest.

    They are logits, or for sampled tokens 1 / time at which their clocks strike.
    """
    scores = logits
    if request.bias is not None:
        ids, biases = request.bias.at(request.position + len(ahead))
        scores = check_finite(scores).cpu().index_add(0, ids, biases)
    if request.sampling.penalises:
        scores = penalise(scores, request, ahead)
    allowed = request.allowed(ahead)
    if allowed is not None:
        scores = check_finite(scores).cpu().masked_fill(~allowed[: len(scores)], -torch.inf)
    if request.sampling.greedy:
        return check_finite(scores)
    probs = distribution(scores[None], request.sampling)[0]
    return ticks(probs, request.seed, request.position + len(ahead))


def runners_up(standing: Tensor, sampling: SamplingParams, count: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of [V] after the chosen one: ids [N] int64, N at most `count`, and margins.

    A margin is the difference in logits from the chosen token; the first one is the chosen token's
    own logit margin. A clock's time is its noise over exp(logit / temperature), so a ratio of times
    is a difference of logits. A token that cannot be sampled has an infinite margin.
    """
    values, ids = standing.topk(min(count + 1, len(standing)))
    if sampling.greedy:
        return ids[1:], values[0] - values[1:]
    ratios = values[0].log() - values[1:].log()
    return ids[1:], ratios * max(float(sampling.temperature), MIN_TEMPERATURE)
