"""What runs through the layers side by side, and the bank that overhears it.

All windows of text are rows of one table. The first are calibrated on and the next held out, both
with exact experts; behind them the held-out windows come again, once with the quantised experts and
once with rounded ones, each with the routes that its own hidden states choose. So every expert is
read once, for all of it, and what a draft would have said is known at the end.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from speq.quantizing.activations import Rows
from speq.quantizing.calibration import Calibration
from speq.routing import Route

CALIBRATION, HELD_OUT, DRAFT, ROUNDED = "calibration", "held out", "draft", "rounded"


@dataclass(frozen=True, slots=True)
class Lanes:
    """Where windows of `length` tokens lie. windows: {lane: (first, count)}."""

    windows: dict[str, tuple[int, int]]
    length: int

    @classmethod
    def of(cls, calibration: Calibration, rounds_too: bool) -> "Lanes":
        """rounds_too: whether there is a lane of rounded experts beside the draft's."""
        count, length = calibration.calibration.shape
        held_out = len(calibration.held_out)
        windows = {CALIBRATION: (0, count), HELD_OUT: (count, held_out)}
        windows[DRAFT] = (count + held_out, held_out)
        windows[ROUNDED] = (count + 2 * held_out, held_out if rounds_too else 0)
        return cls(windows, length)

    @property
    def num_windows(self) -> int:
        return sum(count for _, count in self.windows.values())

    @property
    def rows(self) -> int:
        return self.num_windows * self.length

    def span(self, lane: str) -> slice:
        """A lane's rows."""
        first, count = self.windows[lane]
        return slice(first * self.length, (first + count) * self.length)

    def starts(self) -> Iterator[int]:
        """The first row of each window, lane after lane."""
        return iter(range(0, self.rows, self.length))

    def lane_of(self, start: int) -> str:
        """The lane of the window that begins with that row."""
        at = start // self.length
        return next(
            lane for lane, (first, count) in self.windows.items() if first <= at < first + count
        )

    def token_ids(self, calibration: Calibration) -> Tensor:
        """The tokens of every window [windows, length]."""
        held_out = [
            calibration.held_out[: self.windows[lane][1]] for lane in (HELD_OUT, DRAFT, ROUNDED)
        ]
        return torch.cat([calibration.calibration, *held_out])


class Overhearing:
    """A bank that keeps what a layer's experts are asked, and answers with zeros.

    Every family adds its experts' sum to the rest of the layer's output, so it can come later.

    inputs        [R, H], what the experts were given
    topk_ids      [R, K] int64; topk_weights [R, K] float32
    drafts        whether dense layers run on the draft's matrices
    """

    def __init__(self, inputs: Rows, rows: int, top_k: int) -> None:
        self.inputs = inputs
        self.topk_ids = torch.empty(rows, top_k, dtype=torch.int64)
        self.topk_weights = torch.empty(rows, top_k)
        self.asked = False
        self.drafts = False
        self._start = 0

    def begin(self, start: int) -> None:
        """The next tokens are those of rows from `start` on."""
        self._start = start
        self.asked = False

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        rows = slice(self._start, self._start + len(hidden_states))
        self.inputs.write(self._start, hidden_states)
        self.topk_ids[rows] = route.topk_ids
        self.topk_weights[rows] = route.topk_weights.float()
        self.asked = True
        return torch.zeros_like(hidden_states)

    def rows_of(self, expert: int, span: slice) -> tuple[Tensor, Tensor]:
        """The rows within a span that go to an expert, ascending, and their weights."""
        rows, ranks = torch.where(self.topk_ids[span] == expert)
        rows += span.start
        return rows, self.topk_weights[rows, ranks]
