"""Samplers: the host chooses from logits in host memory, or a device from logits that stay there.

Both follow the same rules, but a device sums in its own order, so its choices need not be the
host's bit for bit.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from speq.devices.device import Accelerator, Processor
from speq.devices.staged import Readback, Uploads
from speq.engine.draft import Draft
from speq.engine.request import Request
from speq.engine.sampling import Before, choose, greedy, noise, not_numbers, shape_probs


class Sampler(Protocol):
    def choices(self, draft: Draft, logits: Tensor, request: Request) -> Callable[[int], int]:
        """Return a function from a draft's node to the exact model's token after it.

        Raises SpeqError, here or in the function, if logits [N, V] are not numbers.
        """


class HostSampler:
    """Chooses from logits in host memory; sampled tokens only for nodes that are asked for."""

    def choices(self, draft: Draft, logits: Tensor, request: Request) -> Callable[[int], int]:
        if request.sampling.greedy and request.reads_logits_alone:
            return greedy(logits).__getitem__
        return lambda node: choose(logits[node], request, draft.above(node))


class DeviceSampler:
    """Chooses on an accelerator: one read for all nodes.

    device  the accelerator
    """

    def __init__(self, device: Accelerator) -> None:
        self.device = device
        self._readback = Readback(device)
        self._uploads = Uploads(device)
        self._noise = DeviceNoise(self._uploads)

    def choices(self, draft: Draft, logits: Tensor, request: Request) -> Callable[[int], int]:
        scores = logits.float()
        aheads = [draft.above(node) for node in range(draft.nodes)]
        tokens, highest = self._readback.read(self.choose(scores, request, aheads), scores.amax(-1))
        if highest.isnan().any() or highest.isposinf().any():
            raise not_numbers()
        return tokens.tolist().__getitem__

    def choose(self, scores: Tensor, request: Request, aheads: list[list[int]]) -> Tensor:
        """Choose from [N, V] float32 logits [N] int64 tokens on the device, without a host wait.

        aheads  for each row, the drafted tokens between those of the sequence and the chosen one
        """
        if request.sampling.greedy and request.reads_logits_alone:
            return scores.argmax(-1)
        # Row by row, so that neither sums nor memory depend on the number of rows.
        rows = zip(scores.split(1), aheads, strict=True)
        return torch.cat([self.standings(row, request, ahead).argmax(-1) for row, ahead in rows])

    def standings(self, scores: Tensor, request: Request, ahead: list[int]) -> Tensor:
        """Compute `sampling.standings` of [1, V] float32 logits on the device."""
        sampling, vocab_size = request.sampling, scores.shape[1]
        if request.bias is not None:
            ids, biases = request.bias.at(request.position + len(ahead))
            scores = scores.index_add(1, self._uploads.send(ids), self._uploads.send(biases)[None])
        if sampling.penalises:
            before = Before.of(request, ahead, vocab_size)
            sent = Before(self._uploads.send(before.token_ids), self._uploads.send(before.times))
            scores = sent.penalise(scores[0], sampling)[None]
        allowed = request.allowed(ahead)
        if allowed is not None:
            scores = scores.masked_fill(~self._uploads.send(allowed[:vocab_size]), -torch.inf)
        if sampling.greedy:
            return scores
        clock = self._noise.at(request.seed, request.position, len(ahead), vocab_size)
        return shape_probs(scores, sampling) / clock


class DeviceNoise:
    """Noise by position, sent to an accelerator once for the draft and the exact model."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._seed = -1
        self._rows: dict[int, Tensor] = {}

    def at(self, seed: int, start: int, ahead: int, size: int) -> Tensor:
        """Return `sampling.noise` [size] at the position start + ahead.

        start  position of the sequence's next token; noise of earlier positions is dropped
        """
        if seed != self._seed:
            self._seed, self._rows = seed, {}
        known = self._rows.items()
        self._rows = {at: row for at, row in known if at >= start and len(row) == size}
        position = start + ahead
        if position not in self._rows:
            self._rows[position] = self._uploads.send(noise(seed, position, size))
        return self._rows[position]


def sampler_on(device: Processor | Accelerator) -> Sampler:
    return HostSampler() if isinstance(device, Processor) else DeviceSampler(device)
