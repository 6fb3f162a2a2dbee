"""Sums over the tokens of a text that compare a model's distributions with the exact ones."""

import math
from dataclasses import dataclass

from torch import Tensor

from speq.quantizing.report import TextReport


@dataclass(slots=True)
class TextScore:
    """Sums of one model; see TextReport."""

    tokens: int = 0
    loss: float = 0.0
    same: int = 0
    overlap: float = 0.0
    divergence: float = 0.0

    def add(self, found: Tensor, exact: Tensor, targets: Tensor) -> None:
        """Add tokens: log-probabilities of the model and of the exact one [N, V] float32, and the
        next tokens [N].
        """
        self.tokens += len(targets)
        self.loss -= float(found.gather(1, targets[:, None]).double().sum())
        self.same += int((found.argmax(-1) == exact.argmax(-1)).sum())
        self.overlap += float(found.minimum(exact).exp().sum(-1).double().sum())
        self.divergence += float((exact.exp() * (exact - found)).sum(-1).double().sum())

    def report(self) -> TextReport:
        return TextReport(
            self.tokens,
            math.exp(self.loss / self.tokens),
            self.same / self.tokens,
            self.overlap / self.tokens,
            self.divergence / self.tokens,
        )
