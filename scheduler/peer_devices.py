"""Which experts further devices hold: they are neither loaded nor missing on the first."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from speq.scheduler.expert_key import ExpertKey


class PeerSlot(NamedTuple):
    """A slot of a further device. peer: its place among these"""

    peer: int
    slot: int


# Called with (layer, {expert: slot}) once it is known what a layer wants of further devices.
Launch = Callable[[int, dict[int, PeerSlot]], None]


@dataclass(slots=True)
class PeerDevices:
    """The experts of further devices.

    at         their slots there
    most_rows  rows of a layer up to which it may have such experts
    rows       of the layers that run now
    launch     has them computed; None: the layer that is served may not have such experts
    """

    at: Mapping[ExpertKey, PeerSlot]
    most_rows: int
    rows: int = field(default=1, init=False)
    launch: Launch | None = field(default=None, init=False)

    def __contains__(self, key: ExpertKey) -> bool:
        """Tell whether layers may have `key` of them."""
        return self.rows <= self.most_rows and key in self.at

    def take(self, layer: int, keys: Iterable[ExpertKey]) -> set[ExpertKey]:
        """Launch those of a layer's experts that are there, and return them."""
        if self.launch is None:
            return set()
        found = {key for key in keys if key in self.at}
        if found:
            self.launch(layer, {key.expert: self.at[key] for key in sorted(found)})
        return found
