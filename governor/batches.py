"""Governors by batch size, since a step's time depends on the requests that share it."""

from dataclasses import dataclass, field

from speq.governor.adaptive import AdaptiveDraftLength
from speq.governor.draft_length import Governor


@dataclass(slots=True)
class Governors:
    """Governors of batches of 1, 2, 3 to 4, 5 to 8 requests, and so on.

    A batch has one draft length. Steps are measured by size; a new size begins with the
    measurements of the nearest one. All sizes share the acceptance.

    alone      governor of batches of one
    most_rows  most rows of a verification
    """

    alone: Governor
    most_rows: int
    _others: dict[int, AdaptiveDraftLength] = field(default_factory=dict, init=False)

    def of(self, batch_size: int) -> Governor:
        """Return the governor of batches of this size."""
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
            self._others[size] = known[near].for_batch(longest, 2.0 ** (size - near))
        return self._others[size]

    def begin(self) -> None:
        """Note that a prefill ran, so that slots hold its experts."""
        for governor in (self.alone, *self._others.values()):
            governor.begin()


def longest_draft(most_rows: int, batch_size: int) -> int:
    """Most tokens that each request of a batch may draft, with `most_rows` rows in all."""
    return max(most_rows // batch_size - 1, 0)
