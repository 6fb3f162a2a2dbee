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

from speq.config import SamplingParams
from speq.engine.request import Request
from speq.errors import SpeqError

# Colder is no different, but would divide logits beyond the range of float32.
MIN_TEMPERATURE = 1e-20
# Of 2^32 equal parts of the unit interval: in one below this, the place within it is drawn too.
FIRST_PARTS = 2**22
# Leaves the exponent of a float32 and six bits of its fraction.
BIN_SHIFT = 17


def checked(logits: Tensor) -> Tensor:
    """Logits in float32. Raises SpeqError where damage, or too narrow a dtype, spoilt them."""
    logits = logits.float()
    highest = logits.amax()  # NaN where there is any
    if highest.isnan() or highest.isposinf():
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
    which is transformers' order. Tokens as likely as the last one that stays are kept as well.
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
    """[N, 1] the least of [N, V] among the fewest largest whose share of the sum is `top_p`.

    likeliest  the largest in order where others are 0 or equal the last of these; None: unknown
    """
    if likeliest is None and probs.is_cpu:
        return torch.tensor([[_nucleus_edge_of(row, top_p)] for row in probs.numpy()])
    ordered = probs.sort(-1, descending=True).values if likeliest is None else likeliest
    wide = ordered.double()
    wanted = top_p * probs.sum(-1, keepdim=True, dtype=torch.float64)
    stays = wide.cumsum(-1) - wide < wanted
    return ordered.gather(-1, stays.sum(-1, keepdim=True) - 1)


def _nucleus_edge_of(probs: np.ndarray, top_p: float) -> float:
    """As `_nucleus_edge`, of one row [V]. A processor takes 20 ms to put 200,000 numbers in order,
    so they are counted by the first bits of their float32, and ordered only where the edge lies.
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
    """[size] float32: independent draws of the exponential distribution, the same ones for the same
    seed and position of the text. None of them is 0.

    A vocabulary of 200,000 meets draws of 5e-6 at every position, and a token that has the least
    one is drawn however unlikely it is. So small draws have 85 random bits, others 32: all are as
    exact as float32 is. (numpy's own draws in float32 are 0 once in 2^23.)
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
    """[size] uint64 random words. Streams lie 2^64 blocks of four apart, positions 2^128."""
    return np.random.Philox(key=seed, counter=[0, stream, position, 0]).random_raw(size)


def draw(probs: Tensor, seed: int, position: int) -> int:
    """A token from one distribution [V], on the CPU: whose exponential clock, ticking at the rate
    of its probability, strikes first.
    """
    return first_largest(ticks(probs, seed, position))


def ticks(probs: Tensor, seed: int, position: int) -> Tensor:
    """One over the time when each token's clock strikes: [V] on the CPU, of a distribution [V]."""
    return probs / noise(seed, position, len(probs))


def first_largest(standing: Tensor) -> int:
    """Index of the largest of [V] on the CPU, the first of equals. numpy's is ten times as fast."""
    return int(standing.numpy().argmax())


def penalised(logits: Tensor, request: Request, ahead: list[int]) -> Tensor:
    """[V] logits to [V] float32 logits on the CPU, less likely where tokens came before.

    ahead  drafted tokens between those of the sequence and the one that is chosen
    """
    scores = checked(logits).cpu()
    token_ids = Before.of(request, ahead, len(scores))
    return token_ids.penalise(scores, request.sampling)


@dataclass(frozen=True, slots=True)
class Before:
    """The tokens before a position, as penalties count them.

    text   [M] int64, prompt and all; times: [V] int64, how often each was generated
    """

    token_ids: Tensor
    times: Tensor

    @classmethod
    def of(cls, request: Request, ahead: list[int], vocab_size: int) -> "Before":
        """In host memory."""
        generated = torch.tensor([*request.output_token_ids, *ahead], dtype=torch.long)
        token_ids = torch.cat([torch.tensor(request.prompt_token_ids, dtype=torch.long), generated])
        return cls(token_ids, torch.bincount(generated, minlength=vocab_size))

    def penalise(self, scores: Tensor, sampling: SamplingParams) -> Tensor:
        """[V] float32 logits to less likely ones, all on the device of these tensors."""
        if sampling.repetition_penalty != 1:
            factor = float(sampling.repetition_penalty)
            repeated = scores[self.token_ids]
            less_likely = torch.where(repeated < 0, repeated * factor, repeated / factor)
            scores = scores.index_put((self.token_ids,), less_likely)
        times = self.times
        return scores - sampling.frequency_penalty * times - sampling.presence_penalty * (times > 0)


def chosen(logits: Tensor, request: Request, ahead: list[int]) -> int:
    """The token behind one row of logits [V], after the sequence and `ahead`, drafted tokens."""
    return first_largest(standings(logits, request, ahead))


def standings(logits: Tensor, request: Request, ahead: list[int]) -> Tensor:
    """[V] logits to [V] float32, by which `chosen` takes the largest: logits, or for drawn tokens
    one over the time when their clocks strike.
    """
    scores = penalised(logits, request, ahead) if request.sampling.penalises else logits
    if request.sampling.greedy:
        return checked(scores)
    probs = distribution(scores[None], request.sampling)[0]
    return ticks(probs, request.seed, request.position + len(ahead))


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
