"""Which experts a second device holds: they are neither loaded nor missing on the first."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from speq.scheduler.expert_key import ExpertKey

# Called with (layer, {expert: slot}) once it is known what a layer wants of the second device.
Launch = Callable[[int, dict[int, int]], None]


@dataclass(slots=True)
class SecondDevice:
    """The experts of a second device.

    at      their slots there
    launch  has it compute them; None: the layer that is served may not have such experts
    """

    at: Mapping[ExpertKey, int]
    launch: Launch | None = field(default=None, init=False)

    def take(self, layer: int, keys: Iterable[ExpertKey]) -> set[ExpertKey]:
        """Launch those of a layer's experts that are there, and return them."""
        if self.launch is None:
            return set()
        found = {key for key in keys if key in self.at}
        if found:
            self.launch(layer, {key.expert: self.at[key] for key in sorted(found)})
        return found
