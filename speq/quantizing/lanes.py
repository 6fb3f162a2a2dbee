"""Lanes of windows that run through the layers together, and the backend that records them.

All windows of text are rows of one table. The first are for calibration and the next are held out,
both with exact experts. The held-out windows follow again, once with quantised experts and once
with rounded ones, each with the routes of its own hidden states. So every expert is read once for
all lanes, and the draft's predictions are known at the end.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from speq.quantizing.activations import ActivationRows
from speq.quantizing.calibration import Calibration
from speq.routing import Route

CALIBRATION, HELD_OUT, DRAFT, ROUNDED = "calibration", "held out", "draft", "rounded"


@dataclass(frozen=True, slots=True)
class Lanes:
    """Places of windows of `length` tokens. windows: {lane: (first, count)}."""

    windows: dict[str, tuple[int, int]]
    length: int

    @classmethod
    def of(cls, calibration: Calibration, rounds_too: bool) -> "Lanes":
        """Lay out the lanes of a calibration. rounds_too: add a lane of rounded experts."""
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
        first, count = self.windows[lane]
        return slice(first * self.length, (first + count) * self.length)

    def starts(self) -> Iterator[int]:
        """First row of each window, lane after lane."""
        return iter(range(0, self.rows, self.length))

    def lane_of(self, start: int) -> str:
        """Lane of the window that begins at row `start`."""
        at = start // self.length
        return next(
            lane for lane, (first, count) in self.windows.items() if first <= at < first + count
        )

    def token_ids(self, calibration: Calibration) -> Tensor:
        """Tokens of every window [windows, length]."""
        held_out = [
            calibration.held_out[: self.windows[lane][1]] for lane in (HELD_OUT, DRAFT, ROUNDED)
        ]
        return torch.cat([calibration.calibration, *held_out])


class RecordingBackend:
    """Backend that records the inputs of a layer's experts and returns zeros.

    Every family adds its experts' sum, or `scale` times it, to the rest of the layer's output, so
    it can be added later.

    inputs        [R, H], inputs of the experts
    topk_ids      [R, K] int64; topk_weights [R, K] float32
    drafts        whether dense layers run on the draft's matrices
    """

    def __init__(self, inputs: ActivationRows, rows: int, top_k: int, scale: float) -> None:
        self.inputs, self.scale = inputs, scale
        self.topk_ids = torch.empty(rows, top_k, dtype=torch.int64)
        self.topk_weights = torch.empty(rows, top_k)
        self.asked = False
        self.drafts = False
        self._start = 0

    def begin(self, start: int) -> None:
        """Set the first row of the next tokens."""
        self._start = start
        self.asked = False

    def __call__(self, layer: int, hidden_states: Tensor, route: Route) -> Tensor:
        rows = slice(self._start, self._start + len(hidden_states))
        self.inputs.write(self._start, hidden_states)
        self.topk_ids[rows] = route.topk_ids
        self.topk_weights[rows] = route.topk_weights.float() * self.scale
        self.asked = True
        return torch.zeros_like(hidden_states)

    def rows_of(self, expert: int, span: slice) -> tuple[Tensor, Tensor]:
        """Rows within a span that are routed to an expert, ascending, and their weights."""
        rows, ranks = torch.where(self.topk_ids[span] == expert)
        rows += span.start
        return rows, self.topk_weights[rows, ranks]
