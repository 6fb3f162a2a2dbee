"""Who chooses tokens: the host from logits of its own, or the device from logits that stay there.

Both choose alike, but a device adds up in an order of its own, so it need not choose bit for bit
what the host would.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from speq.devices.device import Accelerator, Processor
from speq.devices.staged import Readback, Uploads
from speq.engine.draft import Draft
from speq.engine.request import Request
from speq.engine.sampling import Before, chosen, greedy, noise, not_numbers, shaped


class Sampler(Protocol):
    def choices(self, draft: Draft, logits: Tensor, request: Request) -> Callable[[int], int]:
        """The exact model's token after each of the draft's nodes, by logits [N, V].

        Raises SpeqError, now or when a node is asked for, where logits are not numbers.
        """


class HostSampler:
    """Chooses from logits in host memory, for drawn tokens only where it is asked to."""

    def choices(self, draft: Draft, logits: Tensor, request: Request) -> Callable[[int], int]:
        if request.sampling.greedy and not request.sampling.penalises:
            return greedy(logits).__getitem__
        return lambda node: chosen(logits[node], request, draft.above(node))


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
        tokens, highest = self._readback.read(self.chosen(scores, request, aheads), scores.amax(-1))
        if highest.isnan().any() or highest.isposinf().any():
            raise not_numbers()
        return tokens.tolist().__getitem__

    def chosen(self, scores: Tensor, request: Request, aheads: list[list[int]]) -> Tensor:
        """[N, V] float32 logits to [N] int64 tokens on the device; the host does not wait.

        aheads  for each row, the drafted tokens between those of the sequence and the one chosen
        """
        if request.sampling.greedy and not request.sampling.penalises:
            return scores.argmax(-1)
        # One by one: a row's sums do not depend on how many there are, nor does their memory.
        rows = zip(scores.split(1), aheads, strict=True)
        return torch.cat([self.standings(row, request, ahead).argmax(-1) for row, ahead in rows])

    def standings(self, scores: Tensor, request: Request, ahead: list[int]) -> Tensor:
        """[1, V] float32 logits to [1, V], as `sampling.standings` makes them, on the device."""
        sampling, vocab_size = request.sampling, scores.shape[1]
        if sampling.penalises:
            before = Before.of(request, ahead, vocab_size)
            sent = Before(self._uploads.send(before.token_ids), self._uploads.send(before.times))
            scores = sent.penalise(scores[0], sampling)[None]
        if sampling.greedy:
            return scores
        clock = self._noise.at(request.seed, request.position, len(ahead), vocab_size)
        return shaped(scores, sampling) / clock


class DeviceNoise:
    """Noise of positions, sent to an accelerator once: the exact model draws with what the draft
    has drawn with.
    """

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._seed = -1
        self._rows: dict[int, Tensor] = {}

    def at(self, seed: int, start: int, ahead: int, size: int) -> Tensor:
        """`sampling.noise` [size] at the position start + ahead.

        start  of the text's next token: what belongs to positions before it is forgotten
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
