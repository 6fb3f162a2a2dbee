"""A device that only keeps account of what is locked for it."""

from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from speq.devices.device import Accelerator


@dataclass
class Pinning:
    """granted: chunks that are locked, the first ones; None: all. held: bytes of those that are, by
    where they begin.
    """

    granted: int | None = None
    held: dict[int, int] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)

    def pin(self, memory: Tensor) -> bool:
        self.asked.append(memory.nbytes)
        if self.granted is not None and len(self.asked) > self.granted:
            return False
        assert memory.data_ptr() not in self.held
        self.held[memory.data_ptr()] = memory.nbytes
        return True

    def unpin(self, memory: Tensor) -> None:
        del self.held[memory.data_ptr()]

    @property
    def accelerator(self) -> Accelerator:
        """The same, to whom locks alone are asked of."""
        return cast(Accelerator, cast(Any, self))
