"""One pass over the INT4 experts, and the token it drafts."""

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from speq.decode.drafter import DraftBase
from speq.decode.sampler import DeviceSampler
from speq.decode.sampling import chosen
from speq.decode.sequence import Sequence
from speq.devices.device import Accelerator
from speq.devices.staged import Readback
from speq.layers.draft_experts import DraftExperts, OnRoute
from speq.routing import Route


class DraftPass(Protocol):
    def next(self, sequence: Sequence, drafted: list[int], on_route: OnRoute) -> int | None:
        """The token behind the sequence and what is drafted; None where logits are not numbers.

        Writes KV entries of the last of them behind the cache's length, which stays as it is.
        on_route is told the routes, under the number of the drafted token.
        """

    def end(self) -> None:
        """No more tokens of this draft."""


def draft_pass_over(base: DraftBase) -> DraftPass:
    assert base.int4 is not None, "planned for"
    if isinstance(base.sampler, DeviceSampler):
        return DevicePass(base, base.int4, base.sampler)
    return HostPass(base, base.int4)


class HostPass:
    """In host memory: routes are told in the midst of the pass, the next layers still to come."""

    def __init__(self, base: DraftBase, bank: DraftExperts) -> None:
        self._model, self._bank, self._cache = base.model, bank, base.cache

    def next(self, sequence: Sequence, drafted: list[int], on_route: OnRoute) -> int | None:
        self._bank.on_route = partial(on_route, len(drafted))
        last_id = drafted[-1] if drafted else sequence.pending_id
        logits = self._model.score(self._bank, self._cache, [last_id]).logits
        if not logits.isfinite().all():
            return None
        return chosen(logits[0], sequence, drafted)

    def end(self) -> None:
        self._bank.on_route = None


class DraftOutput:
    """What a pass on an accelerator leaves there for the host, in one piece of memory that stays.

    route_ids      [L, K] int64, route_weights [L, K] float32: of the token that was run
    token_id       [1] int64, the one that was chosen
    lowest, highest  [] float32, of its logits: not finite where any of them is not
    """

    def __init__(self, device: torch.device, num_layers: int, top_k: int) -> None:
        choices = num_layers * top_k
        self._sizes = [8 * choices, 8, 4 * choices, 8]
        self._shape = num_layers, top_k
        self.packed = torch.zeros(sum(self._sizes), dtype=torch.uint8, device=device)
        self.route_ids, self.token_id, self.route_weights, bounds = self._parts(self.packed)
        self.lowest, self.highest = bounds.unbind()
        self._by_layer = [*zip(self.route_ids, self.route_weights, strict=True)]

    def note(self, layer: int, route: Route) -> None:
        """Keep a layer's route; the host neither waits nor learns of it."""
        ids, weights = self._by_layer[layer]
        ids.copy_(route.topk_ids[0])
        weights.copy_(route.topk_weights[0])

    def on_host(self, packed: Tensor) -> tuple[list[Route], int | None]:
        """The routes by layer and the token, from a copy of `packed` in host memory."""
        ids, token_id, weights, bounds = self._parts(packed)
        routes = [Route(*of_layer) for of_layer in zip(ids.split(1), weights.split(1), strict=True)]
        return routes, int(token_id) if bounds.isfinite().all() else None

    def _parts(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ids, token_id, weights, bounds = packed.split(self._sizes)
        return (
            ids.view(torch.int64).view(self._shape),
            token_id.view(torch.int64),
            weights.view(torch.float32).view(self._shape),
            bounds.view(torch.float32),
        )


class DevicePass:
    """On an accelerator: the host reads once a token, routes and token together."""

    def __init__(self, base: DraftBase, bank: DraftExperts, sampler: DeviceSampler) -> None:
        self._model, self._bank, self._cache = base.model, bank, base.cache
        self._sampler = sampler
        device: Accelerator = sampler.device
        self._readback = Readback(device)
        self._output = DraftOutput(device.torch, base.model.num_moe_layers, base.top_k)

    def next(self, sequence: Sequence, drafted: list[int], on_route: OnRoute) -> int | None:
        self.launch(sequence, drafted)
        return self.read(len(drafted), on_route)

    def launch(self, sequence: Sequence, drafted: list[int]) -> None:
        """Queue all of the pass, up to the output on the device; the host does not wait."""
        self._bank.on_route = self._output.note
        last_id = drafted[-1] if drafted else sequence.pending_id
        scores = self._model.score(self._bank, self._cache, [last_id]).logits.float()
        output = self._output
        output.token_id.copy_(self._sampler.chosen(scores, sequence, [drafted]))
        torch.aminmax(scores, out=(output.lowest, output.highest))

    def read(self, token: int, on_route: OnRoute) -> int | None:
        """Wait for the output, tell the routes of the draft's token so numbered; what it drafts."""
        (packed,) = self._readback.read(self._output.packed)
        routes, token_id = self._output.on_host(packed)
        for layer, route in enumerate(routes):
            on_route(token, layer, route)
        return token_id

    def end(self) -> None:
        self._bank.on_route = None
