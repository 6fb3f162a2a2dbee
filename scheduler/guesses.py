"""How far the next layer's router, asked a layer early, can be believed: measured as it comes true.

Guesses are told apart by their margin over the first expert that is not among the top K, in units
of the router's logits, whatever those are in a family.
"""

# A margin of so much, and every multiple of it, is a class of its own; the last is open.
WIDTH = 0.25
CLASSES = 12
# Guesses that the assumption of even odds counts as, until real ones outweigh it.
PRIOR = 4.0


class GuessRecord:
    """Counts of guesses made and of those that came true, by class of margin.

    Only guesses that would have cost a transfer count: those that concern experts already there are
    right more often, and say nothing about the others.
    """

    def __init__(self) -> None:
        self._made = [PRIOR] * CLASSES
        self._right = [PRIOR / 2] * CLASSES

    def probability(self, margin: float) -> float:
        """That an expert guessed with this margin is wanted."""
        at = self._class(margin)
        return self._right[at] / self._made[at]

    def learn(self, guesses: dict[int, float], wanted: set[int]) -> None:
        """guesses: {expert: margin} of a layer that wanted these in the end."""
        for expert, margin in guesses.items():
            at = self._class(margin)
            self._made[at] += 1
            self._right[at] += expert in wanted

    @staticmethod
    def _class(margin: float) -> int:
        return min(max(int(margin / WIDTH), 0), CLASSES - 1)
