"""Measures how often guesses come true that the next layer's router makes a layer early.

A guess has a margin over the first expert that is not among the top K, in units of the family's
router logits. Guesses of different margin are counted apart.
"""

# Classes of margin are so wide; the last one is open.
WIDTH = 0.25
CLASSES = 12
# At first the odds are assumed even. The assumption weighs as much as so many guesses.
PRIOR = 4.0


class PredictionRecord:
    """Counts guesses made and guesses that came true, by class of margin.

    Only guesses that would have cost a transfer count. Guesses of experts already in slots are
    right more often, and say nothing about the others.
    """

    def __init__(self) -> None:
        self._made = [PRIOR] * CLASSES
        self._right = [PRIOR / 2] * CLASSES

    def probability(self, margin: float) -> float:
        """The probability that an expert guessed with this margin is wanted."""
        at = self._class(margin)
        return self._right[at] / self._made[at]

    def learn(self, predictions: dict[int, float], wanted: set[int]) -> None:
        """Count a layer's guesses, {expert: margin}, against the experts it wanted in the end."""
        for expert, margin in predictions.items():
            at = self._class(margin)
            self._made[at] += 1
            self._right[at] += expert in wanted

    @staticmethod
    def _class(margin: float) -> int:
        return min(max(int(margin / WIDTH), 0), CLASSES - 1)
