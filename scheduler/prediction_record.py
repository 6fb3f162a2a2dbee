"""Measures how often predictions of the next layer's router, made a layer early, come true.

A prediction has a margin over the first expert outside the top K, in router logits. Predictions are
counted by class of margin.
"""

# Width of a class of margins; the last class is open.
WIDTH = 0.25
CLASSES = 12
# At first a probability of 1/2 is assumed, with the weight of this many predictions.
PRIOR = 4.0


class PredictionRecord:
    """Counts predictions, and those that came true, by class of margin.

    Only predictions that would have cost a transfer count. Predictions of resident experts are
    right more often and say nothing about the others.
    """

    def __init__(self) -> None:
        self._made = [PRIOR] * CLASSES
        self._right = [PRIOR / 2] * CLASSES

    def probability(self, margin: float) -> float:
        """Probability that an expert predicted with this margin is used."""
        at = self._class(margin)
        return self._right[at] / self._made[at]

    def learn(self, predictions: dict[int, float], wanted: set[int]) -> None:
        """Compare a layer's predictions, {expert: margin}, with the experts that it used."""
        for expert, margin in predictions.items():
            at = self._class(margin)
            self._made[at] += 1
            self._right[at] += expert in wanted

    @staticmethod
    def _class(margin: float) -> int:
        return min(max(int(margin / WIDTH), 0), CLASSES - 1)
