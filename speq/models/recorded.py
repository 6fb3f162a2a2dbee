"""Passes recorded as device graphs, each launched as a whole.

Launching a pass takes the host longer than the pass takes a GPU: a thousand kernels and more. A
graph runs with the shapes and addresses of its recording. So a recorded pass reads its tokens and
positions from the device, and its attention reads a fixed number of cached tokens, the same for all
positions of a bucket.
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

# Context lengths that one graph serves. Attention reads up to so many cached tokens in vain, and a
# sequence that grows by so many tokens costs another recording, as long as about three passes.
BUCKET = 256
# Most graphs of each kind of pass; the least recently used ones are dropped. All share the memory
# of the widest, so recording again takes no more.
MAX_GRAPHS = 8

# Computes a pass from token ids and positions [1, T], the cached tokens that attention reads, and
# the cut where the host has its part.
Compute = Callable[[Tensor, Tensor, int, Cut], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class PassGraph:
    """A recorded pass.

    inputs   [2, T] int64, tokens and positions
    results  in the graph's memory
    """

    graph: Graph
    inputs: Tensor
    results: tuple[Tensor, ...]


class RecordedPasses:
    """Graphs of one kind of pass over one KV cache: one for each number of tokens and each bucket,
    recorded at first use. Their memory is freed with this object, so `compute` must not refer to
    it.

    If a recording fails, a warning says why, and no more are made.
    """

    def __init__(self, kind: str, device: Accelerator, cache: KVCache, compute: Compute) -> None:
        self._kind, self._cache, self._compute = kind, cache, compute
        self._device: Accelerator | None = device
        self._uploads = Uploads(device)
        self._passes: dict[tuple[int, int], PassGraph] = {}

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(tokens, cached tokens read) of the graphs kept, most recently used last."""
        return list(self._passes)

    @torch.inference_mode()
    def run(self, token_ids: list[int]) -> tuple[Tensor, ...] | None:
        """Run a chain of tokens after the cache's length, which does not change.

        Returns the results, which the next run of any of these passes may overwrite. None: the pass
        is not recorded and must be launched kernel by kernel.
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

    def _record(self, count: int, seen: int) -> PassGraph | None:
        if self._device is None:
            return None
        while len(self._passes) >= MAX_GRAPHS:
            del self._passes[next(iter(self._passes))]
        beside = next((made.graph for made in self._passes.values()), None)
        inputs = torch.zeros(2, count, dtype=torch.int64, device=self._device.torch)
        # Positions of the next tokens, where no KV is cached yet.
        inputs[1] = torch.arange(count, device=self._device.torch) + self._cache.length
        results: tuple[Tensor, ...] = ()

        def run(cut: Cut) -> None:
            nonlocal results
            results = self._compute(inputs[:1], inputs[1:], seen, cut)

        try:
            return PassGraph(self._device.capture(run, beside), inputs, results)
        except RuntimeError as error:  # torch raises it for every CUDA error
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            logger.warning("%s run without graphs: recording one failed: %s", self._kind, reason)
            self._device = None
            self._passes.clear()
            return None


def recording_device(
    graphs: str, device: Processor | Accelerator, model: MoEModel
) -> Accelerator | None:
    """Device that records a model's passes; None if they are not recorded, and a log line says why.

    graphs  the option's value
    """
    if graphs == "none" or isinstance(device, Processor):
        return None
    if model.unrecordable is not None:
        logger.warning("passes run without graphs: %s", model.unrecordable)
        return None
    return device
