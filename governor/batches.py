"""A governor for each size of batch: what a cycle takes depends on the texts that share it."""

from dataclasses import dataclass, field

from speq.governor.adaptive import AdaptiveDraftLength
from speq.governor.draft_length import Governor


@dataclass(slots=True)
class Governors:
    """Governors of batches of 1, 2, 3 to 4, 5 to 8 texts, and so on. A batch has one draft length,
    and cycles are measured for each of these sizes apart. A size that was never met begins with
    what is known of the nearest one. What is known of acceptance is common.

    alone      the governor of single texts
    most_rows  that a verification may have
    """

    alone: Governor
    most_rows: int
    _others: dict[int, AdaptiveDraftLength] = field(default_factory=dict, init=False)

    def of(self, batch_size: int) -> Governor:
        """The governor of batches of so many texts."""
        if batch_size == 1 or not isinstance(self.alone, AdaptiveDraftLength):
            return self.alone
        size = (batch_size - 1).bit_length()
        if size not in self._others:
            known = {0: self.alone, **self._others}
            near = min(
                (each for each in known if known[each].model.ready),
                key=lambda each: abs(each - size),
                default=0,
            )
            longest = longest_draft(self.most_rows, 1 << size)
            self._others[size] = known[near].beside(longest, 2.0 ** (size - near))
        return self._others[size]

    def begin(self) -> None:
        """Hear that a prompt was run: slots hold what it left in them."""
        for governor in (self.alone, *self._others.values()):
            governor.begin()


def longest_draft(most_rows: int, batch_size: int) -> int:
    """Tokens that each of so many texts may draft, at most, with so many rows in all."""
    return max(most_rows // batch_size - 1, 0)
