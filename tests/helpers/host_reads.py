"""How often the host waits for a device, in each part of a step."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from speq.engine import engine as engine_module
from speq.engine.engine import Engine
from speq.stats import StepStats
from tests.helpers.host_device import HostDevice
from tests.helpers.host_tensors import HostTensor, caller

# Each part of a step: where its function is, and what it is called there.
PARTS = {
    "propose": (Engine, "propose"),
    "verify": (Engine, "verify"),
    "accept": (engine_module, "accept"),
}


@dataclass
class Step:
    """stats: what the step did; waited: by part, every place where the host waited.

    outcome_s  when the outcome was known, by the recorder's clock
    sent       where tensors went to the device by torch's ops, from memory that is not pinned: the
               host waits until they are copied
    """

    stats: StepStats
    layers: int
    outcome_s: float
    waited: dict[str, list[str]] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)

    @property
    def most(self) -> dict[str, int]:
        """How often the host may wait: for each drafted token, for each layer and miss, and for
        the outcome.
        """
        misses = self.stats.requests - self.stats.hits
        return {
            "propose": self.stats.draft_length,
            "verify": self.layers + misses,
            "accept": 1,
            "else": 0,
        }

    def check(self) -> None:
        for part, most in self.most.items():
            places = Counter(self.waited.get(part, []))
            assert places.total() <= most, f"{part} may wait {most} times: {dict(places)}"
        assert not self.sent, f"sent from memory that is not pinned: {dict(Counter(self.sent))}"


class Sending(TorchDispatchMode):
    """Notices ops that take tensors of the host to the device; numbers go with the launch."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [isinstance(leaf, HostTensor) for leaf in tree_leaves((given, result))]
        of_host = [t for t in given if not isinstance(t, HostTensor) and t.dim() and t.numel()]
        read = func.overloadpacket is torch.ops.aten.copy_ and not isinstance(args[0], HostTensor)
        if any(there) and of_host and not read:
            self.places.append(f"{func.overloadpacket.__name__}, {caller()}")
        return result


@contextmanager
def steps_of(device: HostDevice, engine: Engine) -> Iterator[list[Step]]:
    """The steps that the engine takes in the block."""
    steps: list[Step] = []
    waited: dict[str, list[str]] = {}
    ended_s: dict[str, float] = {}

    def seen() -> list[str]:
        """All waits so far: events of the device, and reads by torch's ops."""
        return [*device.waits, *(f"{what}, {where}" for what, where in device.reads)]

    def parted(part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any, **kwargs: Any) -> Any:
            before = Counter(seen())
            try:
                return run(*args, **kwargs)
            finally:
                ended_s[part] = engine.recorder.clock()
                waited.setdefault(part, []).extend((Counter(seen()) - before).elements())

        return within

    step = Engine.step

    def whole(self: Engine, *args: Any) -> list[list[int]]:
        waited.clear()
        before = Counter(seen())
        with Sending() as sending:
            emitted = step(self, *args)
        found = Counter(seen()) - before
        for part in PARTS:
            found -= Counter(waited.get(part, []))
        places = {**waited, "else": [*found.elements()]}
        layers, outcome_s = self.model.num_moe_layers, ended_s["accept"]
        steps.append(Step(self.recorder.step, layers, outcome_s, places, sending.places))
        return emitted

    with pytest.MonkeyPatch.context() as patch:
        for part, (owner, name) in PARTS.items():
            patch.setattr(owner, name, parted(part, getattr(owner, name)))
        patch.setattr(Engine, "step", whole)
        # However slow this machine is: clocks are compared once in a while, which waits.
        patch.setattr("speq.scheduler.device_clock.ANCHOR_S", math.inf)
        yield steps
