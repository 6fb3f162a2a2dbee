"""Which experts a second device holds: they are neither loaded nor missing on the first."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from speq.scheduler.expert_key import ExpertKey

# Called with (layer, {expert: slot}) once it is known what a layer wants of the second device.
Launch = Callable[[int, dict[int, int]], None]


@dataclass(slots=True)
class SecondDevice:
    """The experts of a second device.

    at        their slots there
    few_rows  whether layers run few rows now, and may have such experts
    launch    has it compute them; None: the layer that is served may not have such experts
    """

    at: Mapping[ExpertKey, int]
    few_rows: bool = field(default=True, init=False)
    launch: Launch | None = field(default=None, init=False)

    def __contains__(self, key: ExpertKey) -> bool:
        """Tell whether layers may have `key` of it."""
        return self.few_rows and key in self.at

    def take(self, layer: int, keys: Iterable[ExpertKey]) -> set[ExpertKey]:
        """Launch those of a layer's experts that are there, and return them."""
        if self.launch is None:
            return set()
        found = {key for key in keys if key in self.at}
        if found:
            self.launch(layer, {key.expert: self.at[key] for key in sorted(found)})
        return found
