"""Passes recorded as graphs of the device, which launches them as a whole.

Launching a pass takes the host longer than the pass takes a GPU: a thousand kernels and more. A
graph runs with the shapes and addresses that it was recorded with. So a recorded pass reads its
tokens and positions from the device, and its attention runs over a fixed number of entries, the
same for all positions of a bucket.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from speq.devices.device import Accelerator, Cut, Graph, Processor
from speq.devices.staged import Uploads
from speq.models.kv_cache import KVCache
from speq.models.moe_model import MoEModel

logger = logging.getLogger("speq")

# Contexts that one graph serves. Attention of a pass runs over up to so many entries in vain, and a
# text that grows by so many tokens costs another recording, of about three passes.
BUCKET = 256
# Graphs kept of each kind of pass: those used last. All use one piece of memory, that of the
# widest, so that recording again and again takes no more.
MAX_GRAPHS = 8

# Token ids and positions [1, T], entries that attention runs over, where the host has its part: the
# results of a pass.
Compute = Callable[[Tensor, Tensor, int, Cut], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Recorded:
    """inputs: [2, T] int64, tokens and positions; results: in the graph's memory."""

    graph: Graph
    inputs: Tensor
    results: tuple[Tensor, ...]


class RecordedPasses:
    """One kind of pass over one row of a cache: a graph for each number of tokens and each bucket,
    recorded when it is first wanted. Their memory is given back with this object, which `compute`
    therefore does not refer to.

    Where a graph cannot be recorded there are none from then on, and a warning says why.
    """

    def __init__(self, kind: str, device: Accelerator, cache: KVCache, compute: Compute) -> None:
        self._kind, self._cache, self._compute = kind, cache, compute
        self._device: Accelerator | None = device
        self._uploads = Uploads(device)
        self._passes: dict[tuple[int, int], Recorded] = {}

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(tokens, entries seen) of the graphs kept, the one used last behind the others."""
        return list(self._passes)

    @torch.inference_mode()
    def run(self, token_ids: list[int]) -> tuple[Tensor, ...] | None:
        """A chain of tokens behind the cache's length, which stays as it is.

        Returns the results, which the next run of any of these passes may overwrite; None where the
        pass is not recorded and has to be launched.
        """
        start, count = self._cache.length, len(token_ids)
        seen = min(-(-(start + count) // BUCKET) * BUCKET, self._cache.capacity)
        made = self._passes.pop((count, seen), None) or self._record(count, seen)
        if made is None:
            return None
        self._passes[count, seen] = made
        positions = range(start, start + count)
        self._uploads.write(torch.tensor([token_ids, [*positions]]), made.inputs)
        made.graph.replay()
        return made.results

    def _record(self, count: int, seen: int) -> Recorded | None:
        if self._device is None:
            return None
        while len(self._passes) >= MAX_GRAPHS:
            del self._passes[next(iter(self._passes))]
        beside = next((made.graph for made in self._passes.values()), None)
        inputs = torch.zeros(2, count, dtype=torch.int64, device=self._device.torch)
        # Where the next tokens go, and nothing of worth lies yet.
        inputs[1] = torch.arange(count, device=self._device.torch) + self._cache.length
        results: tuple[Tensor, ...] = ()

        def run(cut: Cut) -> None:
            nonlocal results
            results = self._compute(inputs[:1], inputs[1:], seen, cut)

        try:
            return Recorded(self._device.capture(run, beside), inputs, results)
        except RuntimeError as error:  # torch's for all that CUDA refuses
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            logger.warning("%s run without graphs, one of which failed: %s", self._kind, reason)
            self._device = None
            self._passes.clear()
            return None


def recording_device(
    graphs: str, device: Processor | Accelerator, model: MoEModel
) -> Accelerator | None:
    """The device whose graphs a model's passes run as, if any; a log line says why none do.

    graphs  the option
    """
    if graphs == "none" or isinstance(device, Processor):
        return None
    if model.unrecordable is not None:
        logger.warning("passes run without graphs: %s", model.unrecordable)
        return None
    return device
